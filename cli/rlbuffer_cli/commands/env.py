"""``rlbuffer env``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from rlbuffer.errors import NotFound
from rlbuffer.state.text import did_you_mean
from rlbuffer_cli import options
from rlbuffer_cli.options import say
from rlbuffer_cli.session import open_run

if TYPE_CHECKING:
    from rlbuffer.client.buffer import Buffer
    from rlbuffer.store.operator import OperatorStore


@options.group("env")
def command() -> None:
    """Pause an env, say that nothing more comes of it, or let it take part again.

    \b
    Example:
      rlbuffer env pause math --run demo
      rlbuffer env resume math --run demo
    """


@command.command("pause")
@click.argument("env")
@options.common_of_run
def pause(env: str, given: options.RunFlags) -> int:
    """Leave an env out of the next steps.

    No step waits for it, nothing of it is trained, and its workers get no tickets. What it has in the pool stays
    there and grows older; its share of a step goes to the other envs in proportion.

    \b
    Example:
      rlbuffer env pause math
    """
    with _run_of(env, given) as (store, name):
        is_new = store.pause(env)
    say(
        f'{env} is paused in run "{name}": steps go on without it. Back: rlbuffer env resume {env}'
        if is_new
        else f'{env} was paused already in run "{name}"'
    )
    return 0


@command.command("done")
@click.argument("env")
@options.common_of_run
def done(env: str, given: options.RunFlags) -> int:
    """Say that nothing more comes of an env.

    Its workers get no further ticket and end; what they have begun is finished, and what it has is trained. When all
    envs of the run are done, the run trains what is left and ends.

    \b
    Example:
      rlbuffer env done math
    """
    with _run_of(env, given) as (store, name):
        store.say_done(env, epoch=store.meta().epoch)
    say(f'{env} is done in run "{name}": no further ticket is given. Back: rlbuffer env resume {env}')
    return 0


@command.command("resume")
@click.argument("env")
@options.common_of_run
def resume(env: str, given: options.RunFlags) -> int:
    """Let an env take part again that is paused or done.

    What it missed while it was paused is not made up for. An env that was said to be done has the end, if any, that its
    workers say; start them again.

    \b
    Example:
      rlbuffer env resume math
    """
    with _run_of(env, given) as (store, name):
        was_paused, was_done = store.resume(env), store.forget_end(env)
    is_back = was_paused or was_done
    say(f'{env} takes part again in run "{name}"' if is_back else f'{env} was not paused in run "{name}"')
    return 0


@contextmanager
def _run_of(env: str, given: options.RunFlags) -> Iterator[tuple[OperatorStore, str]]:
    """The run's store and its name."""
    from rlbuffer.records.info import ENV_NAME
    from rlbuffer.store.operator import OperatorStore

    if not ENV_NAME.match(env):
        raise click.UsageError(f"{env!r} is not an env name: {ENV_NAME.pattern[:-2]}")
    with open_run(given) as buffer:
        _check_known(buffer, env)
        yield buffer.store.role(OperatorStore), buffer.run


def _check_known(buffer: Buffer, env: str) -> None:
    """NotFound unless the run has met the env, or its settings or a worker name it: a typing error changes nothing."""
    store = buffer.store
    sampled = {str(beat["env"]) for beat in store.heartbeats("worker").values() if "env" in beat}
    config = store.meta().config
    sources = store.sources()
    sampled |= sources.done | sources.open | sources.ends.keys() | store.paused()
    envs = sorted({*store.ledger().envs, *config.get("budgets", {}), *config.get("envs", {}), *sampled})
    if env not in envs:
        hint = did_you_mean(env, envs) or f" It knows {', '.join(envs)}." * bool(envs)
        raise NotFound(f"run {buffer.run!r} knows no env {env!r}.{hint}")
