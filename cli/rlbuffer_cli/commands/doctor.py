"""``rlbuffer doctor``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rlbuffer.state.text import plural
from rlbuffer_cli import options
from rlbuffer_cli.options import echo
from rlbuffer_cli.starting import clear, has_colours, starting

if TYPE_CHECKING:
    from rlbuffer.checks.check import Finding

LEVEL_COLOURS = {"ok": "green", "warning": "yellow", "failure": "red"}


@click.command("doctor")
@options.common
@click.option(
    "--for",
    "purpose",
    type=click.Choice(["run", "serve", "worker", "score", "train"]),
    help="Which command shall find what it needs on this host. [default: run where there is a config file]",
)
@click.option("--json", "as_json", is_flag=True, help="One object per line.")
def command(given: options.Given, purpose: str | None, as_json: bool) -> int:
    """Look at settings, host and server, and say what to do about each trouble. Changes nothing.

    One line each: ok, warning, or failure with its fix. Exit code 1 when there is a failure. Starts no server; modules
    that the settings name are imported in a process of its own.

    \b
    Example:
      rlbuffer doctor --redis redis://host:6379
    """
    from rlbuffer.checks.check import EVERYTHING, Level
    from rlbuffer.checks.loading import diagnose
    from rlbuffer.config.loading import DEFAULT_FILE

    starting("looking at settings, host and server")
    given.check()
    has_file = bool(given.config or os.environ.get("RLBUFFER_CONFIG") or Path(DEFAULT_FILE).is_file())
    chosen = purpose or ("run" if has_file else "")
    parts = EVERYTHING if chosen == "run" else (chosen,) if chosen else ()
    counts = dict.fromkeys(Level, 0)
    for finding in diagnose(given.config, given.flags, parts):
        counts[finding.level] += 1
        text = " ".join(finding.text.split())
        if as_json:
            record = {"check": finding.check, "level": finding.level, "settings": finding.settings}
            echo(json.dumps({"schema": "rlbuffer.check/1", **record, "text": text, "fix": finding.fix}))
        else:
            _show(finding, text)
    if not as_json:
        echo(", ".join(plural(counts[level], str(level)) for level in (Level.FAILURE, Level.WARNING)))
    return 1 if counts[Level.FAILURE] else 0


def _show(finding: Finding, text: str) -> None:
    from rlbuffer.state.text import printable
    from rlbuffer_cli.text import wrapped

    clear()
    head = f"{finding.level:<8} {finding.check:<15} "
    first, *rest = wrapped(printable(head + text), indent="    ")
    if has_colours(sys.stdout):
        word = str(finding.level)
        first = click.style(word, fg=LEVEL_COLOURS[word]) + first[len(word) :]
    click.echo(first)
    for line in (*rest, *(wrapped(f"    fix: {printable(finding.fix)}", indent="    ") if finding.fix else ())):
        click.echo(line)
