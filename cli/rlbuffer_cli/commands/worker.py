"""``rlbuffer worker``."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import click

from rlbuffer_cli import options, sections


@click.command("worker")
@click.argument("name", required=False)
@options.common
@click.option("--env", metavar="ENV", help="Env to sample: a built-in one, or package.module:factory.")
@click.option("--group-size", type=int, metavar="N", help="Rollouts per group.")
@click.option("--seed", type=int, metavar="N", help="Of sampling.")
@click.option("--temperature", type=float, metavar="T", help="Sampling temperature.")
@click.option("--replica", type=int, default=0, metavar="I", help="Number of this process among equal ones.")
@click.option("--display", type=click.Choice(["auto", "plain", "json", "none"]), default="auto", help="What to print.")
def command(
    name: str | None,
    given: options.Given,
    env: str | None,
    group_size: int | None,
    seed: int | None,
    temperature: float | None,
    replica: int,
    display: str,
) -> int:
    """Sample and score rollouts of one env and push them.

    NAME is a [worker.NAME] section of the config; without a config, --env is enough. A worker waits for leave to
    sample (a ticket), loads each new policy version, and stops cleanly on ctrl-C: what it was sampling is given
    back.

    \b
    Examples:
      rlbuffer worker vcopy       (the section [worker.vcopy] of rlbuffer.toml)
      rlbuffer worker --env repeat --group-size 16
    """
    flags = {
        "env": ("--env", env),
        "group_size": ("--group-size", group_size),
        "temperature": ("--temperature", temperature),
    }
    key = name or _only_worker(given.config, env)
    named = {f"worker.{key}.{k}": v for k, v in flags.items()} | {"seed": ("--seed", seed)}
    from rlbuffer.errors import ConfigError

    try:
        loaded = given.load(named, parts=(f"worker.{key}",))
    except ConfigError as error:
        _tell_run(given, named, key, str(error))
        raise
    sections.check("worker", key, loaded.settings.worker, loaded.file, "--env")

    return sections.run_alone("worker", key, replica, loaded, display)


def _tell_run(
    given: options.Given,
    named: Mapping[str, tuple[str, Any]],
    key: str,
    why: str,
) -> None:
    """A run that is there hears why this worker does not begin."""
    from rlbuffer.checks.loading import load
    from rlbuffer.errors import ConfigError, RlbufferError
    from rlbuffer.worker.heartbeat import telling_why
    from rlbuffer_cli.session import open_existing

    with suppress(RlbufferError):  # the settings say no more where the run is, or it is not there
        loaded = load(given.config, flags={**given.flags, **named})
        with open_existing(loaded, run_given=True) as buffer, telling_why(buffer, key, loaded.settings.worker[key]):
            raise ConfigError(why)


def _only_worker(config: str | None, env: str | None) -> str:
    """The section that is meant when no NAME is given: one named like the env, or the only one there is."""
    if env is not None:
        return env.rpartition(":")[2].lower()
    from rlbuffer.checks.loading import load

    return sections.only(
        "worker",
        "worker",
        list(load(config).settings.worker),
        "which env? Give --env (vcopy, repeat, arithmetic, package.module:factory), or a [worker.NAME] section.",
    )
