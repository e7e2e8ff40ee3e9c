"""Settings as every command loads them: what cannot work together, or on this host, is refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import rlbuffer.checks.host
import rlbuffer.checks.settings  # noqa: F401 - both make their checks
from rlbuffer.checks.check import CHECKS, Check, Context, Finding, Level, Parts, failure, found, ok
from rlbuffer.config import loading, refusal
from rlbuffer.config.loading import Loaded
from rlbuffer.errors import ConfigError, clause
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
        ConfigError: every mistake that was found.
    """
    given = loading.read(config, environ=environ, flags=flags)
    settings, wrong = loading.sound(given)
    loaded = Loaded(settings=settings, sources=MappingProxyType(given.sources), file=given.file)
    in_values = [*wrong.values()]
    warnings: dict[str, str] = {}
    kinds = {Level.OK: {}, Level.WARNING: warnings, Level.FAILURE: wrong}
    for finding in found_in(loaded, parts, has_host=bool(parts)):
        if any(loading.concerns(name, in_values) for name in finding.settings):
            continue  # it may be there only because that setting was left out
        message = clause(finding.text) + (f". {finding.fix}" if finding.fix else "")
        kinds[finding.level][message] = next(iter(finding.settings), "")
    if wrong:
        raise refusal.together(wrong)
    return replace(loaded, warnings=tuple(warnings))


def found_in(loaded: Loaded, parts: Parts, *, has_host: bool) -> Iterator[Finding]:
    """What the checks of sound settings find, and those of this host; each text begins with the place of its
    settings."""
    context = Context(loaded=loaded, parts=frozenset(parts))
    for finding in (*found(context, "settings"), *(found(context, "host") if has_host else ())):
        yield replace(finding, text=f"{loading.located(loaded.sources, *finding.settings)}{finding.text}")


def diagnose(config: str | None, flags: Mapping[str, tuple[str, Any]], parts: Parts) -> Iterator[Finding]:
    """What all checks find, also what is as it should be."""
    from rlbuffer.checks import server

    try:
        given = loading.read(config, flags=flags)
    except ConfigError as error:
        yield replace(
            failure(str(error), error.setting), check="settings", fix="Correct it: nothing else was looked at"
        )
        return
    settings, wrong = loading.sound(given)
    loaded = Loaded(settings=settings, sources=MappingProxyType(given.sources), file=given.file)
    yield from (replace(failure(text, name), check="settings") for text, name in wrong.items())
    if not wrong:
        where = str(loaded.file) if loaded.file else "no config file (all defaults)"
        yield replace(ok(f"{where}, {plural(len(loaded.sources), 'setting')} given"), check="settings")
    found_here = found_in(loaded, parts, has_host=True)
    findings = [one for one in found_here if not any(loading.concerns(name, wrong.values()) for name in one.settings)]
    yield from findings
    has_place = not any(loading.concerns(name, wrong.values()) for name in ("redis_url", "redis_password_file", "home"))
    if has_place and not any(
        one.level is Level.FAILURE and one.check in ("home", "server-address") for one in findings
    ):
        yield from server.check_server(Context(loaded=loaded, parts=frozenset(parts)))


def checks_of(setting: str) -> tuple[Check, ...]:
    """The checks whose findings can name `setting`, a name of the settings' page such as ``worker.NAME.env``."""
    from rlbuffer.checks import server  # noqa: F401 - it makes its checks

    return tuple(check for check in CHECKS if setting in check.settings)
