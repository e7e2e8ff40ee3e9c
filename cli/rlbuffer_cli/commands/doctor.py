"""``rlbuffer doctor``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rlbuffer.state.text import plural
from rlbuffer_cli import options
from rlbuffer_cli.options import answer, say
from rlbuffer_cli.starting import starting

if TYPE_CHECKING:
    from rlbuffer.checks.check import Finding

LEVEL_COLOURS = {"ok": "green", "warning": "yellow", "failure": "red"}


@options.command("doctor")
@options.common
@options.purpose
@click.option(
    "--archive", type=click.Path(path_type=Path), metavar="DIR", help="Look at the steps of an archive alone."
)
@options.json_lines("One object per line.")
def command(given: options.RunFlags, purpose: str | None, archive: Path | None) -> int:
    """Look at settings, host and server, and say what to do about each trouble. Changes nothing.

    One line each: ok, warning, or failure with its fix. Exit code 1 when there is a failure. Starts no server; modules
    that the settings name are imported in a process of its own. Of a run it says what its last steps name as a cause
    for which it learns wrongly; of an archive all causes, and from which step to which.

    \b
    Examples:
      rlbuffer doctor --redis redis://host:6379
      rlbuffer doctor --run math
      rlbuffer doctor --archive /data/math
    """
    from rlbuffer.checks.check import Level
    from rlbuffer.checks.loading import diagnose
    from rlbuffer.config.loading import DEFAULT_FILE

    starting("looking at settings, host and server" if archive is None else "looking at the archive")
    given.check()
    has_file = bool(given.config or os.environ.get("RLBUFFER_CONFIG") or Path(DEFAULT_FILE).is_file())
    parts = options.parts_of(purpose or ("run" if has_file else ""))
    found = diagnose(given.config, given.flags(), parts) if archive is None else _of_archive(archive)
    counts = dict.fromkeys(Level, 0)
    for finding in found:
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


def _of_archive(folder: Path) -> Iterator[Finding]:
    """What the steps that the archive knows of name."""
    from rlbuffer.archive import Archive
    from rlbuffer.checks.check import failure, ok, warning
    from rlbuffer.state.text import printable
    from rlbuffer.state.verdicts import WRONG, readable, spells

    trained = {record["step"]: readable(record) for record in Archive(folder).trained}
    records = [trained[step] for step in sorted(trained)]
    found = spells(records)
    for problem, first, last in found:
        text = f"named in steps {first} to {last}. {printable(str(problem))}"
        yield replace((failure if problem.kind in WRONG else warning)(text), check="learning")
    if not found:
        measured = sum(bool(record.drift) for record in records)
        says = ok if measured else warning
        text = f"{plural(len(records), 'trained step')}, {measured} measured by the age of tokens; no cause is named"
        yield replace(says(text), check="learning")
