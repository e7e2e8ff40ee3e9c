"""``rlbuffer worker``."""

from __future__ import annotations

import json
import threading
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from rlbuffer_cli import options

if TYPE_CHECKING:
    from rlbuffer.settings import RunSettings

SHARING = 2
"""Processes that share this machine's cores, the worker included; a set OMP_NUM_THREADS counts instead."""


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
    config: str | None,
    redis: str | None,
    run: str | None,
    home: str | None,
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
      rlbuffer worker vcopy                      the section [worker.vcopy] of rlbuffer.toml
      rlbuffer worker --env repeat --group-size 16
    """
    flags = {
        "env": ("--env", env),
        "group_size": ("--group-size", group_size),
        "seed": ("--seed", seed),
        "temperature": ("--temperature", temperature),
    }
    key = name or _only_worker(config, redis, run, home, env)
    loaded = options.load(config, redis, run, home, {f"worker.{key}.{k}": v for k, v in flags.items()})
    settings = _known(loaded.settings, key)

    from rlbuffer import processes

    title = f"{key}-{replica}" if replica or settings.worker[key].replicas > 1 else key
    processes.name_process(f"worker {title}")
    processes.share_cores(SHARING)
    stop = threading.Event()
    processes.stop_on_signals(stop)
    narrator = processes.WorkerNarrator(lambda line: click.echo(f"{datetime.now():%H:%M:%S} {line}"))

    def on_event(event: dict[str, Any]) -> None:
        if display == "json":
            click.echo(json.dumps(event, default=str))
        elif display != "none":
            narrator(event)

    return processes.sample(settings, key, replica, title, stop, on_event)


def _only_worker(config: str | None, redis: str | None, run: str | None, home: str | None, env: str | None) -> str:
    """Which section is meant when no NAME is given: one named like the env, or the only one there is."""
    from rlbuffer.errors import ConfigError

    if env is not None:
        return env.rpartition(":")[2].lower()
    from rlbuffer.loading import load

    known = list(load(config).settings.worker)
    if len(known) == 1:
        return known[0]
    if known:
        raise click.UsageError(f"which worker? The config has {', '.join(known)}: rlbuffer worker {known[0]}")
    raise ConfigError(
        "which env? Give --env (vcopy, repeat, arithmetic, package.module:factory), or a [worker.NAME] section."
    )


def _known(settings: RunSettings, key: str) -> RunSettings:
    from rlbuffer.errors import ConfigError
    from rlbuffer.filters import nearest

    if key not in settings.worker:
        hint = nearest(key, list(settings.worker)) or " Give --env, or add the section."
        raise ConfigError(f"the config has no [worker.{key}] section.{hint}", setting=f"worker.{key}")
    return settings
