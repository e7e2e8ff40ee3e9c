"""``rlbuffer weights``."""

from __future__ import annotations

import os
import threading

import click

from rlbuffer_cli import options
from rlbuffer_cli.options import echo


@click.group("weights")
def command() -> None:
    """Serve policy versions to other hosts, or relay them.

    \b
    Example:
      rlbuffer weights serve --listen 0.0.0.0:9465
      rlbuffer weights serve --listen 0.0.0.0:9465 --upstream http://trainer:9465
    """


@command.command("serve")
@options.common
@click.option("--listen", metavar="HOST:PORT", help="Where to serve. [default: weights.listen]")
@click.option("--upstream", metavar="URL", help="Be a relay: fetch from there what is not in the cache yet.")
def serve(
    given: options.Given,
    listen: str | None,
    upstream: str | None,
) -> int:
    """Serve policy versions over HTTP until ctrl-C.

    Without --upstream it serves what the trainer publishes on this host: for trainers started by torchrun, and hosts
    where that should be a process of its own (`rlbuffer train` and `rlbuffer run` serve by themselves when
    weights.listen is set). With --upstream it is a relay: it keeps the versions that it was asked for.
    RLBUFFER_WEIGHTS_TOKEN, when set, is asked for as bearer token, and sent upstream.

    \b
    Example:
      rlbuffer weights serve --listen 0.0.0.0:9465 --upstream http://trainer:9465
    """
    from rlbuffer.config.addresses import is_url
    from rlbuffer.errors import ConfigError
    from rlbuffer.process.environment import name_process
    from rlbuffer.process.signals import stop_on_signals
    from rlbuffer.weights.cache import TOKEN_VARIABLE, VersionCache
    from rlbuffer.weights.places import load_serving

    settings = given.load().settings
    address = listen or settings.weights.listen
    if not address:
        raise ConfigError(
            "where should it listen? Give --listen HOST:PORT, or set weights.listen", setting="weights.listen"
        )
    if upstream is not None and not is_url(upstream):
        raise click.UsageError(f"--upstream {upstream} must begin with http:// or https://")
    serving = load_serving()
    name_process("weights")
    stop = threading.Event()
    cache = VersionCache.of(settings, stop=stop) if upstream else None
    folder = cache.directory if cache is not None else settings.output_dir / "weights"
    app = serving.make_app(folder, token=os.environ.get(TOKEN_VARIABLE, ""), upstream=upstream or "", cache=cache)
    with stop_on_signals(stop), serving.FileServer(app, address) as server:
        echo(f"serving {folder} at {address} ({server.url} from here)" + (f", from {upstream}" if upstream else ""))
        stop.wait()
    return 0
