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
    from rlbuffer.run.diagnosis import Diagnosis

GRADE_COLOURS = {"ok": "green", "warning": "yellow", "failure": "red"}


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

    One line each: ok, warning, or failure with its fix. Exit code 1 when there is a failure. Starts no server and
    imports neither torch nor a model.

    \b
    Example:
      rlbuffer doctor --redis redis://host:6379
    """
    from rlbuffer.config.loading import DEFAULT_FILE, load
    from rlbuffer.errors import ConfigError
    from rlbuffer.run.diagnosis import Health, failed
    from rlbuffer.run.doctor import diagnose, is_failed
    from rlbuffer.run.host_checks import EVERYTHING
    from rlbuffer.run.loading import mistakes_in

    starting("looking at settings, host and server")
    given.check()
    has_file = bool(given.config or os.environ.get("RLBUFFER_CONFIG") or Path(DEFAULT_FILE).is_file())
    chosen = purpose or ("run" if has_file else "")
    parts = EVERYTHING if chosen == "run" else (chosen,) if chosen else ()
    diagnoses: list[Diagnosis] = []
    try:
        loaded = load(given.config, flags=given.flags)
    except ConfigError as error:
        diagnoses.append(failed("settings", str(error), "correct the file: nothing else was looked at"))
    else:
        diagnoses += diagnose(loaded, list(mistakes_in(loaded, parts)), parts)
    for diagnosis in diagnoses:
        if as_json:
            echo(json.dumps({"schema": "rlbuffer.diagnosis/1", **_fields(diagnosis)}))
        else:
            _show(diagnosis)
    if not as_json:
        counts = [sum(d.verdict == verdict for d in diagnoses) for verdict in (Health.FAILURE, Health.WARNING)]
        named = [plural(n, word) for n, word in zip(counts, ("failure", "warning"), strict=True)]
        echo(", ".join(named))
    return 1 if is_failed(diagnoses) else 0


def _fields(diagnosis: Diagnosis) -> dict[str, str]:
    return {name: str(getattr(diagnosis, name)) for name in ("subject", "verdict", "text", "fix")}


def _show(diagnosis: Diagnosis) -> None:
    from rlbuffer.state.text import printable
    from rlbuffer_cli.render.text import wrapped

    clear()
    head = f"{diagnosis.verdict:<8} {diagnosis.subject:<12} "
    first, *rest = wrapped(printable(head + diagnosis.text), indent="    ")
    if has_colours(sys.stdout):
        word = str(diagnosis.verdict)
        first = click.style(word, fg=GRADE_COLOURS[word]) + first[len(word) :]
    click.echo(first)
    for line in (*rest, *(wrapped(f"    fix: {printable(diagnosis.fix)}", indent="    ") if diagnosis.fix else ())):
        click.echo(line)
