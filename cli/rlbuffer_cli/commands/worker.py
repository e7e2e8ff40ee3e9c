"""``rlbuffer worker``."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import click

from rlbuffer.errors import ConfigError, RlbufferError
from rlbuffer_cli import options, sections
from rlbuffer_cli.session import of_run, open_existing

if TYPE_CHECKING:
    from rlbuffer.config.loading import Loaded

HOW = "--env (vcopy, repeat, jsonl, package.module:factory)"


@options.command("worker")
@click.argument("name", required=False)
@options.common
@options.setting(".env", "Env to sample: a built-in one, or package.module:factory.", metavar="ENV", is_handed=True)
@options.setting(".group_size", "Rollouts per group.", type=int, metavar="N")
@options.setting("seed", "Of sampling.", type=int, metavar="N")
@options.setting(".temperature", "Sampling temperature.", type=float, metavar="T")
@click.option("--replica", type=int, default=0, metavar="I", help="Number of this process among equal ones.")
@click.option("--display", type=click.Choice(["auto", "plain", "json", "none"]), default="auto", help="What to print.")
def command(name: str | None, given: options.RunFlags, env: str | None, replica: int, display: str) -> int:
    """Sample and score rollouts of one env and push them.

    NAME is a [worker.NAME] section of the config; without a config, --env is enough. A worker waits for leave to
    sample (a ticket), loads each new policy version, and stops cleanly on ctrl-C: what it was sampling is given
    back.

    \b
    Examples:
      rlbuffer worker vcopy       (the section [worker.vcopy] of rlbuffer.toml)
      rlbuffer worker --env repeat --group-size 16
    """
    from rlbuffer.checks.loading import load

    # Without a name: the section named like the env, or the only one there is.
    key = name or (
        (env.rpartition(":")[2].lower() or "env") if env else sections.only("worker", load(given.config).settings, HOW)
    )
    section = f"worker.{key}"
    try:
        loaded = given.load(parts=(section,))
    except ConfigError as error:
        with suppress(RlbufferError):  # the settings say no more where the run is, or it is not there
            _tell_run(load(given.config, flags=given.flags(section)), key, error)
        raise
    return sections.run_alone("worker", key, replica, loaded, display, HOW)


def _tell_run(loaded: Loaded, key: str, why: ConfigError) -> None:
    """A run that is there hears why this worker does not begin."""
    from rlbuffer.store.worker import WorkerStore
    from rlbuffer.worker.heartbeat import telling_why

    settings = loaded.settings
    with open_existing(of_run(loaded, settings.run)) as buffer:
        store = buffer.store.role(WorkerStore)
        with telling_why(store, key, settings.worker[key]):
            raise why
