"""Parts that `worker` and `score` share, the commands that run one process of a `[KIND.NAME]` section."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from rlbuffer_cli.options import echo
from rlbuffer_cli.starting import starting

if TYPE_CHECKING:
    from rlbuffer.events.event import Event

SHARING = 2
"""Processes that share this machine's cores, this one included; a set OMP_NUM_THREADS counts instead."""

AnEvent = TypeVar("AnEvent", bound="Event")


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


def run_alone(
    kind: str,
    key: str,
    replica: int,
    replicas: int,
    display: str,
    narrator: Callable[[Callable[[str], None]], Callable[[AnEvent], None]],
    work: Callable[[str, threading.Event, Callable[[AnEvent], None]], int],
) -> int:
    """Runs `work` (process name, stop, on_event) until a signal sets `stop`. -> its exit code."""
    from rlbuffer.events.event import as_object
    from rlbuffer.process.environment import name_process, share_cores
    from rlbuffer.process.signals import stop_on_signals
    from rlbuffer.process.watchdog import ended_when_stuck
    from rlbuffer.run import members

    title = f"{key}-{replica}" if replica or replicas > 1 else key
    name_process(f"{kind} {title}")
    share_cores(SHARING)
    stop = threading.Event()
    narrate = narrator(lambda line: echo(f"{datetime.now():%H:%M:%S} {line}"))

    def on_event(event: AnEvent) -> None:
        if display == "json":
            echo(json.dumps(as_object(event), default=str))
        elif display != "none":
            narrate(event)

    starting(f"{kind} {title}: loading what it works with (torch, the model)")
    with stop_on_signals(stop), ended_when_stuck(stop):
        code = work(title, stop, on_event)
    return 0 if code == members.DONE else code
