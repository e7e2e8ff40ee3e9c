"""``rlbuffer env``."""

from __future__ import annotations

import click

from rlbuffer_cli import options
from rlbuffer_cli.options import echo


@click.group("env")
def command() -> None:
    """Pause an env, so that steps go on without it, or let it take part again.

    \b
    Example:
      rlbuffer env pause math --run demo
      rlbuffer env resume math --run demo
    """


@command.command("pause")
@click.argument("env")
@options.common
def pause(env: str, config: str | None, redis: str | None, run: str | None, home: str | None) -> int:
    """Leave an env out of the next steps.

    No step waits for it, nothing of it is trained, and its workers get no tickets. What it has in the pool stays
    there and grows older; its share of a step goes to the other envs in proportion.

    \b
    Example:
      rlbuffer env pause math
    """
    from rlbuffer_cli.session import open_existing

    _check(env)
    with open_existing(options.load(config, redis, run, home), run_given=run is not None) as buffer:
        known = {*buffer.store.ledger().envs, *buffer.store.meta().config.get("budgets", {})}
        is_new = buffer.store.pause(env)
        name = buffer.run
    echo(
        f'{env} is paused in run "{name}": steps go on without it. Back: rlbuffer env resume {env}'
        if is_new
        else f'{env} was paused already in run "{name}"'
    )
    if env not in known:
        echo(f"Warning: run {name!r} knows no env {env!r}: {', '.join(sorted(known)) or 'none yet'}", err=True)
    return 0


@command.command("resume")
@click.argument("env")
@options.common
def resume(env: str, config: str | None, redis: str | None, run: str | None, home: str | None) -> int:
    """Let a paused env take part again.

    What it missed while it was paused is not made up for.

    \b
    Example:
      rlbuffer env resume math
    """
    from rlbuffer_cli.session import open_existing

    _check(env)
    with open_existing(options.load(config, redis, run, home), run_given=run is not None) as buffer:
        was_paused = buffer.store.resume(env)
        name = buffer.run
    echo(f'{env} takes part again in run "{name}"' if was_paused else f'{env} was not paused in run "{name}"')
    return 0


def _check(env: str) -> None:
    from rlbuffer.records import ENV_NAME

    if not ENV_NAME.match(env):
        raise click.UsageError(f"{env!r} is not an env name: {ENV_NAME.pattern[:-2]}")
