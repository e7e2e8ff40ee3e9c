"""``rlbuffer gateway``."""

from __future__ import annotations

import threading

import click

from rlbuffer_cli import options


@options.command("gateway")
@options.common
@options.setting(
    "gateway.engines", "Server that samples; may be repeated.", flag="--engine", multiple=True, metavar="URL"
)
@options.setting("gateway.listen", "Where agents ask.", metavar="HOST:PORT")
@click.option("--replica", type=int, default=0, metavar="I", help="Number of this process among equal ones.")
@click.option("--display", type=click.Choice(["auto", "plain", "json", "none"]), default="auto", help="What to print.")
def command(given: options.RunFlags, replica: int, display: str) -> int:
    """Answer agents of other programs, and record their rollouts.

    An agent needs nothing of rlbuffer: it asks a base URL with its own client, of OpenAI's or Anthropic's kind. What
    was sampled is on the server before the agent hears of it. Several may listen at one address, and each goes on with
    what another has begun.

    \b
    Examples:
      rlbuffer gateway --engine http://127.0.0.1:8000 --run math
      rlbuffer gateway            (the section [gateway] of rlbuffer.toml)
    """
    from rlbuffer.process.environment import name_process
    from rlbuffer.process.signals import stop_on_signals
    from rlbuffer.run import members

    loaded = given.load(parts=("gateway",))
    title = f"gateway-{replica}" if replica or loaded.settings.gateway.replicas > 1 else "gateway"
    name_process(title)
    stop = threading.Event()
    with stop_on_signals(stop), options.writing(display):
        return members.gateway(loaded.settings, title, stop, origin=options.redis_origin(loaded))
