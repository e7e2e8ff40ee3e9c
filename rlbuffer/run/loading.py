"""Settings as every command loads them: checked against the envs, the samplers and this host, too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rlbuffer.config import loading
from rlbuffer.config.cross_checks import Checks
from rlbuffer.config.loading import Loaded, folders_of
from rlbuffer.config.mistakes import Mistake, Places
from rlbuffer.config.settings import RunSettings
from rlbuffer.run.env_checks import with_envs
from rlbuffer.run.host_checks import Parts, on_host


def load(
    config: str | Path | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, tuple[str, Any]] = MappingProxyType({}),
    parts: Parts = (),
) -> Loaded:
    """Loads as :func:`rlbuffer.config.loading.load` does, and refuses what the envs cannot work with or `parts` do not
    find here.

    Args:
        config, environ, flags: as there.
        parts: those that shall run here: their needs must be on this host (:mod:`rlbuffer.run.host_checks`).

    Raises:
        ConfigError: every mistake, in one message.
    """
    return loading.load(config, environ=environ, flags=flags, checks=checks_of(parts))


def meant_run(loaded: Loaded, runs: Mapping[str, float], *, is_named: bool = False) -> str:
    """The run to look at where nothing shall be begun: the one that a flag or a variable names, or the file where the
    server has it, else the one that was opened last.

    Args:
        runs: those of the server -> when each was opened.
        is_named: the settings' run counts, wherever it comes from.
    """
    run, source = loaded.settings.run, loaded.source("run")
    if is_named or source in ("--run", "RLBUFFER_RUN") or not runs or (run in runs and source != "default"):
        return run
    return max(runs, key=lambda name: runs[name])


def checks_of(parts: Parts = ()) -> Checks:
    """The checks of the envs, and of what `parts` need of this host, for :mod:`rlbuffer.config.loading`."""

    def checks(settings: RunSettings, places: Places, file: Path | None) -> Iterator[Mistake]:
        yield from with_envs(settings, places)
        yield from on_host(settings, places, parts, folders_of(file))

    return checks
