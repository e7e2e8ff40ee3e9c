"""Parts that `worker` and `score` share, the commands that run one process of a `[KIND.NAME]` section."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rlbuffer_cli.options import redis_origin, writing
from rlbuffer_cli.starting import starting

if TYPE_CHECKING:
    from rlbuffer.config.loading import Loaded

SHARING = 2
"""Processes that share this machine's cores, this one included; a set OMP_NUM_THREADS counts instead."""


def only(kind: str, what: str, known: Sequence[str], none: str) -> str:
    """The section that is meant when no NAME is given: the only one there is. ConfigError with `none` without any."""
    from rlbuffer.errors import ConfigError

    if len(known) == 1:
        return known[0]
    if known:
        raise click.UsageError(f"which {what}? The config has {', '.join(known)}: rlbuffer {kind} {known[0]}")
    raise ConfigError(none)


def check(kind: str, key: str, known: Iterable[str], file: Path | None, flags: str) -> None:
    """ConfigError unless `file` (None: there is none) has a section `key`, with the name that may have been meant or
    else `flags`, which do without one."""
    from rlbuffer.errors import ConfigError
    from rlbuffer.state.text import did_you_mean

    names = list(known)
    if key not in names:
        if file is None:
            text = f"no rlbuffer.toml is here, and so no [{kind}.{key}] section. Give {flags}, or a file to begin with:"
            raise ConfigError(f"{text} `rlbuffer config example > rlbuffer.toml`", setting=f"{kind}.{key}")
        hint = did_you_mean(key, names, otherwise=f" Give {flags}, or add the section.")
        raise ConfigError(f"{file} has no [{kind}.{key}] section.{hint}", setting=f"{kind}.{key}")


def run_alone(kind: str, key: str, replica: int, loaded: Loaded, display: str) -> int:
    """Runs one process of ``[KIND.KEY]`` until a signal. -> its exit code."""
    from rlbuffer.process.environment import name_process, share_cores
    from rlbuffer.process.signals import stop_on_signals
    from rlbuffer.process.watchdog import ended_when_stuck
    from rlbuffer.run import members

    settings = loaded.settings
    replicas = settings.worker[key].replicas if kind == "worker" else settings.score[key].replicas
    title = f"{key}-{replica}" if replica or replicas > 1 else key
    name_process(f"{kind} {title}")
    share_cores(SHARING)
    stop = threading.Event()
    starting(f"{kind} {title}: loading what it works with (torch, the model)")
    with stop_on_signals(stop), ended_when_stuck(stop), writing(display):
        code = members.member(settings, kind, key, replica, title, stop, origin=redis_origin(loaded))
    return 0 if code == members.DONE else code
