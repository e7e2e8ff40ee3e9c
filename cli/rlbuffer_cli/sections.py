"""Parts that `worker` and `score` share, the commands that run one process of a `[KIND.NAME]` section."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import click

from rlbuffer.errors import ConfigError
from rlbuffer.state.text import did_you_mean
from rlbuffer_cli.options import redis_origin, writing
from rlbuffer_cli.starting import starting

if TYPE_CHECKING:
    from rlbuffer.config.loading import Loaded
    from rlbuffer.config.settings import RunSettings

SHARING = 2
"""Processes that share this machine's cores, this one included; a set OMP_NUM_THREADS counts instead."""


def only(kind: str, settings: RunSettings, flags: str) -> str:
    """The section that is meant when no NAME is given: the only one there is. `flags` do without one."""
    names = list(sections_of(kind, settings))
    if not names:
        raise ConfigError(f"there is no [{kind}.NAME] section. Give {flags}, or add one.")
    if len(names) > 1:
        raise click.UsageError(f"which one? The config has {', '.join(names)}: rlbuffer {kind} {names[0]}")
    return names[0]


def sections_of(kind: str, settings: RunSettings) -> dict[str, Any]:
    """The `[KIND.NAME]` sections by their names."""
    found: dict[str, Any] = getattr(settings, kind)
    return found


def run_alone(kind: str, key: str, replica: int, loaded: Loaded, display: str, flags: str) -> int:
    """Runs one process of ``[KIND.KEY]`` until a signal. -> its exit code.

    Raises:
        ConfigError: there is no such section; `flags` do without one.
    """
    from rlbuffer.process.environment import name_process, share_cores
    from rlbuffer.process.signals import stop_on_signals
    from rlbuffer.process.watchdog import ended_when_stuck
    from rlbuffer.run import members

    settings, sections = loaded.settings, sections_of(kind, loaded.settings)
    if key not in sections:
        otherwise = f" Give {flags}, add the section, or begin with a file: `rlbuffer config init`"
        hint = did_you_mean(key, list(sections), otherwise=otherwise)
        where = loaded.file or "no rlbuffer.toml is here"
        raise ConfigError(f"there is no [{kind}.{key}] section ({where}).{hint}", setting=f"{kind}.{key}")
    title = f"{key}-{replica}" if replica or sections[key].replicas > 1 else key
    name_process(f"{kind} {title}")
    share_cores(SHARING)
    stop = threading.Event()
    starting(f"{kind} {title}: loading what it works with (torch, the model)")
    with stop_on_signals(stop), ended_when_stuck(stop), writing(display):
        code = members.member(settings, kind, key, replica, title, stop, origin=redis_origin(loaded))
    return 0 if code == members.DONE else code
