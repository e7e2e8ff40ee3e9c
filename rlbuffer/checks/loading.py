"""Settings as every command loads them: what cannot work together, or on this host, is refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import rlbuffer.checks.host
import rlbuffer.checks.settings  # noqa: F401 - both make their checks
from rlbuffer.checks.check import CHECKS, Check, Context, Finding, Level, Parts, found, ok, refused
from rlbuffer.config import loading, refusal
from rlbuffer.config.loading import Loaded
from rlbuffer.errors import ConfigError
from rlbuffer.state.text import plural


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
        parts: those that shall run here: their needs must be on this host.

    Raises:
        ConfigError: every mistake in single values; where there is none, every other one.
    """
    loaded = loading.load(config, environ=environ, flags=flags)
    findings = list(found_in(loaded, parts))
    if wrong := [finding for finding in findings if finding.level is Level.FAILURE]:
        raise refusal.together({said(finding, loaded): next(iter(finding.settings), "") for finding in wrong})
    warnings = (said(finding, loaded) for finding in findings if finding.level is Level.WARNING)
    return replace(loaded, warnings=tuple(warnings))


def found_in(loaded: Loaded, parts: Parts = ()) -> Iterator[Finding]:
    """What the checks of sound settings find, and where something shall run, those of this host."""
    context = Context(loaded=loaded, parts=frozenset(parts))
    yield from found(context, "settings")
    if parts:
        yield from found(context, "host")


def diagnose(
    config: str | None, flags: Mapping[str, tuple[str, Any]], parts: Parts
) -> Iterator[tuple[Finding, Loaded | None]]:
    """What all checks find, also what is as it should be; each with the settings that say where it comes from."""
    from rlbuffer.checks import server

    try:
        loaded = loading.load(config, flags=flags)
    except ConfigError as error:
        yield replace(refused(error), check="settings", fix="Correct it: nothing else was looked at"), None
        return
    context, is_found = Context(loaded=loaded, parts=frozenset(parts)), True
    findings = list(found(context, "settings"))
    if not any(finding.level is Level.FAILURE for finding in findings):
        where = str(loaded.file) if loaded.file else "no config file (all defaults)"
        findings.append(replace(ok(f"{where}, {plural(len(loaded.sources), 'setting')} given"), check="settings"))
    for finding in (*findings, *found(context, "host")):
        needed = ("server-address",) if loaded.settings.redis_url else ("home", "server-address")
        is_found = is_found and not (finding.level is Level.FAILURE and finding.check in needed)
        yield finding, loaded
    for finding in server.look(context) if is_found else ():
        yield finding, loaded


def said(finding: Finding, loaded: Loaded | None) -> str:
    """A finding as people read it: where, what, and what to do."""
    text = finding.text.rstrip(".")
    return f"{located(finding, loaded)}{text}" + (f". {finding.fix}" if finding.fix else "")


def located(finding: Finding, loaded: Loaded | None) -> str:
    """The places of its settings, of the table where one is missing, and two blanks; "" where all are defaults."""
    names = []
    for name in finding.settings if loaded is not None else ():
        while loaded.place(name) == "default" and "." in name:
            name = name.rpartition(".")[0]
        if loaded.place(name) != "default":
            names.append(name)
    return f"{loaded.place(*dict.fromkeys(names))}  " if loaded is not None and names else ""


def checks_of(setting: str) -> tuple[Check, ...]:
    """The checks whose findings can name `setting`, a name of the settings' page such as ``worker.NAME.env``."""
    from rlbuffer.checks import server  # noqa: F401 - it makes its checks

    return tuple(check for check in CHECKS if setting in check.settings)
