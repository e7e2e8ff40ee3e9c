"""Settings as every command loads them: checked against each other, the envs, the samplers and this host, too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rlbuffer.config import loading, refusal
from rlbuffer.config.cross_checks import together
from rlbuffer.config.doubts import doubts
from rlbuffer.config.loading import Loaded, folders_of
from rlbuffer.config.mistakes import Mistake
from rlbuffer.run.env_checks import with_envs
from rlbuffer.run.host_checks import Parts, on_host


def load(
    config: str | Path | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, tuple[str, Any]] = MappingProxyType({}),
    parts: Parts = (),
) -> Loaded:
    """Loads as :func:`rlbuffer.config.loading.load` does, and refuses what cannot work together or on this host.

    Args:
        config, environ, flags: as there.
        parts: those that shall run here: their needs must be on this host (:mod:`rlbuffer.run.host_checks`).

    Raises:
        ConfigError: every mistake in single values; where there is none, every other one.
    """
    loaded = loading.load(config, environ=environ, flags=flags)
    mistakes = list(mistakes_in(loaded, parts))
    if wrong := {mistake.text: mistake.settings[0] for mistake in mistakes if not mistake.works}:
        raise refusal.together(wrong)
    return replace(loaded, warnings=tuple(mistake.text for mistake in mistakes))


def mistakes_in(loaded: Loaded, parts: Parts = ()) -> Iterator[Mistake]:
    """Everything in sound settings that cannot work together, or on this host, or hardly as meant."""
    settings = loaded.settings
    for text in doubts(settings, loaded.place):
        yield Mistake(text, ("",), works=True)
    yield from together(settings, loaded.place)
    yield from with_envs(settings, loaded.place)
    yield from on_host(settings, loaded.place, parts, folders_of(loaded.file))


def meant_run(loaded: Loaded, runs: Mapping[str, float], *, is_named: bool = False) -> str:
    """The run to look at where nothing shall be begun: the one that a flag or a variable names, or the file where the
    server has it, else the one that was opened last.

    Args:
        runs: those of the server -> when each was opened.
        is_named: the settings' run counts, wherever it comes from.
    """
    run, source = loaded.settings.run, loaded.place("run")
    if is_named or source in ("--run", "RLBUFFER_RUN") or not runs or (run in runs and source != "default"):
        return run
    return max(runs, key=lambda name: runs[name])
