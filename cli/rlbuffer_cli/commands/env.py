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
    """Pause an env, or all, say that nothing more comes of one, or let it take part again.

    \b
    Examples:
      rlbuffer env pause math --run demo
      rlbuffer env resume math --run demo
      rlbuffer env pause --all
    """


_env_or_all = click.argument("env", required=False)
_all = click.option("--all", "is_all", is_flag=True, help="Every env of the run, those that come later too.")


@command.command("pause")
@_env_or_all
@_all
@options.common_of_run
def pause(env: str | None, is_all: bool, given: options.RunFlags) -> int:
    """Leave an env out of the next steps, or let the run come to rest.

    No step waits for a paused env, nothing of it is trained, and its workers get no tickets. What it has in the pool
    stays there and grows older; its share of a step goes to the other envs in proportion.

    With --all no env gets tickets. Workers finish what they have tickets for, and steps are made while they can be:
    `rlbuffer inspect` says when none can be made any more. Workers that need no tickets are not held back.

    \b
    Examples:
      rlbuffer env pause math
      rlbuffer env pause --all
    """
    if (env := _one_of(env, is_all)) is None:
        with _store_of(given) as (store, name):
            store.ask_drain()
        say(f'run "{name}" gives no more tickets, and comes to rest. Back: rlbuffer env resume --all')
        return 0
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
@_env_or_all
@_all
@options.common_of_run
def resume(env: str | None, is_all: bool, given: options.RunFlags) -> int:
    """Let an env take part again that is paused or done.

    What it missed while it was paused is not made up for. An env that was said to be done has the end, if any, that its
    workers say; start them again. --all takes back `env pause --all`; envs that were paused by name stay paused.

    \b
    Examples:
      rlbuffer env resume math
      rlbuffer env resume --all
    """
    if (env := _one_of(env, is_all)) is None:
        with _store_of(given) as (store, name):
            was_paused = store.ask_undrain()
        say(f'run "{name}" gives tickets again' if was_paused else f'run "{name}" gave tickets already')
        return 0
    with _run_of(env, given) as (store, name):
        was_paused, was_done = store.resume(env), store.forget_end(env)
    is_back = was_paused or was_done
    say(f'{env} takes part again in run "{name}"' if is_back else f'{env} was not paused in run "{name}"')
    return 0


def _one_of(env: str | None, is_all: bool) -> str | None:
    """The env; None for all of them."""
    if (env is None) != is_all:
        path = click.get_current_context().command_path
        raise click.UsageError(f"name one env, `{path} ENV`, or all of them, `{path} --all`")
    return env


@contextmanager
def _store_of(given: options.RunFlags) -> Iterator[tuple[OperatorStore, str]]:
    """The run's store and its name."""
    from rlbuffer.store.operator import OperatorStore

    with open_run(given) as buffer:
        yield buffer.store.role(OperatorStore), buffer.run


@contextmanager
def _run_of(env: str, given: options.RunFlags) -> Iterator[tuple[OperatorStore, str]]:
    """The store and the name of a run that knows this env."""
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
