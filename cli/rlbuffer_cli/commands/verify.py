"""``rlbuffer verify``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from rlbuffer.state.text import plural
from rlbuffer_cli import options
from rlbuffer_cli.options import say, show_json
from rlbuffer_cli.session import open_run

if TYPE_CHECKING:
    from rlbuffer.store.records import Report


@options.command("verify")
@options.common_of_run
@click.option("--archive", metavar="DIR", help="Check an archive instead of the server: no server is needed.")
@options.json_lines("One object per finding, then the report.")
def command(given: options.RunFlags, archive: str | None) -> int:
    """Recompute the ledger and check every invariant. Changes nothing.

    pushed = pending + packed + trained + dropped, in rollouts and tokens, per env; every step dense and chained;
    every payload that a step refers to present and whole. Of an archive: every step once, no hole, every digest and
    every payload's checksum. Exit code 0 when all of it holds, 1 when not.

    \b
    Examples:
      rlbuffer verify --run math && echo fine
      rlbuffer verify --archive /data/math
    """
    lacks: tuple[str, ...] = ()
    if archive is not None:
        report, name, lacks = _of_archive(archive)
    else:
        with open_run(given) as buffer:
            report, name = buffer.verify(), buffer.run
    if options.is_json():
        for finding in report.findings:
            show_json({"schema": "rlbuffer.finding/1", "invariant": finding.invariant, "message": finding.message})
        show_json(
            {"schema": "rlbuffer.report/1", "run": name, "ok": report.ok, "checked": report.checked, "lacks": lacks}
        )
        return 0 if report.ok else 1
    checked = " · ".join(f"{what.replace('_', ' ')} {count:,}" for what, count in report.checked.items())
    say(f'run "{name}": checked {checked}')
    for finding in report.findings:
        say(f"  {finding.invariant:<4} {finding.message}", indent=" " * 7)
    if lacks:
        say(f"files of an older format do not say: {'; '.join(lacks)}")
    say("ok: everything adds up" if report.ok else f"FAILED: {plural(len(report.findings), 'finding')}")
    return 0 if report.ok else 1


def _of_archive(folder: str) -> tuple[Report, str, tuple[str, ...]]:
    from rlbuffer.archive.check import check_archive
    from rlbuffer.archive.library import Archive
    from rlbuffer_cli.progress import showing

    with showing("reading the archive") as tell:
        archive = Archive(folder)
        return check_archive(archive, tell), archive.run, archive.lacks
