"""``rlbuffer doctor``."""

from __future__ import annotations

import os
from pathlib import Path

from rlbuffer.state.text import plural
from rlbuffer_cli import options
from rlbuffer_cli.options import answer, say
from rlbuffer_cli.starting import starting

LEVEL_COLOURS = {"ok": "green", "warning": "yellow", "failure": "red"}


@options.command("doctor")
@options.common
@options.purpose
@options.json_lines("One object per line.")
def command(given: options.RunFlags, purpose: str | None) -> int:
    """Look at settings, host and server, and say what to do about each trouble. Changes nothing.

    One line each: ok, warning, or failure with its fix. Exit code 1 when there is a failure. Starts no server; modules
    that the settings name are imported in a process of its own.

    \b
    Example:
      rlbuffer doctor --redis redis://host:6379
    """
    from rlbuffer.checks.check import Level
    from rlbuffer.checks.loading import diagnose
    from rlbuffer.config.loading import DEFAULT_FILE

    starting("looking at settings, host and server")
    given.check()
    has_file = bool(given.config or os.environ.get("RLBUFFER_CONFIG") or Path(DEFAULT_FILE).is_file())
    parts = options.parts_of(purpose or ("run" if has_file else ""))
    counts = dict.fromkeys(Level, 0)
    for finding in diagnose(given.config, given.flags(), parts):
        counts[finding.level] += 1
        level, text = str(finding.level), " ".join(finding.text.split())
        record = {"check": finding.check, "level": level, "settings": finding.settings}
        fix = f"\n    fix: {finding.fix}" if finding.fix else ""
        answer(
            {"schema": "rlbuffer.check/1", **record, "text": text, "fix": finding.fix},
            f"{level:<8} {finding.check:<15} {text}{fix}",
            indent="    ",
            colour=LEVEL_COLOURS[level],
        )
    if not options.is_json():
        say(", ".join(plural(counts[level], str(level)) for level in (Level.FAILURE, Level.WARNING)))
    return 1 if counts[Level.FAILURE] else 0
