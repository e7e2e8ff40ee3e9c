"""``rlbuffer export``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rlbuffer_cli import options
from rlbuffer_cli.options import echo

if TYPE_CHECKING:
    from rlbuffer.records.group import Group


@click.command("export")
@options.common
@click.option("--where", default="", metavar="FILTER", help="Only groups that match, e.g. 'env:math reward<0.1'.")
@click.option("-o", "--output", required=True, metavar="FILE", help="FILE.jsonl or FILE.parquet; it is made anew.")
@click.option("--archive", metavar="DIR", help="Groups of an archive instead of the server: no server is needed.")
@click.option("--json", "as_json", is_flag=True, help="The counts as one object.")
def command(given: options.Given, where: str, output: str, archive: str | None, as_json: bool) -> int:
    """Write groups into a file that `rlbuffer push` reads.

    JSON Lines for people and scripts, Parquet with the columns of an archive's rollouts. Pushed into another run, every
    rollout is the same, byte for byte. A group of which nothing is kept any more is left out and counted. The filter is
    that of `rlbuffer inspect`.

    \b
    Examples:
      rlbuffer export --where 'env:math reward>=1' -o good.parquet
      rlbuffer export --archive /data/math -o math.jsonl
      rlbuffer push good.parquet --run another
    """
    from rlbuffer.client.filters import parse

    path = Path(output)
    if path.suffix not in (".jsonl", ".parquet"):
        raise click.UsageError(f"-o takes FILE.jsonl or FILE.parquet, got {output!r}")
    parse(where)  # a typing mistake needs no server
    gone: list[str] = []
    counts = [0, 0]
    if archive is not None:
        run = _write(path, _of_archive(Path(archive), where, gone), counts, _run_of(Path(archive)))
    else:
        from rlbuffer.client.exporting import export_groups
        from rlbuffer_cli.session import open_existing

        with open_existing(given.load(), run_given=given.run is not None) as buffer:
            run = _write(path, export_groups(buffer, where, gone), counts, buffer.run)
    groups, rollouts = counts
    missing = len(set(gone))
    if as_json:
        record = {"schema": "rlbuffer.export/1", "run": run, "groups": groups, "rollouts": rollouts, "gone": missing}
        echo(json.dumps(record))
    else:
        what = f"{groups} group{'s' * (groups != 1)} with {rollouts} rollouts"
        echo(f'{output}: {what} of run "{run}"' + f"; {missing} groups are no longer kept whole" * (missing > 0))
    return 0


def _of_archive(folder: Path, where: str, gone: list[str]) -> Iterator[Group]:
    from rlbuffer.archive import Archive
    from rlbuffer.archive.groups import archived_groups, pushes_of
    from rlbuffer.client.filters import parse
    from rlbuffer_cli.archived import detail_of

    chosen = parse(where)
    for group in archived_groups(Archive(folder)):
        if chosen.matches(detail_of(group).view):
            if not group.members:
                gone.append(group.group_id)
            yield from pushes_of(group.members, gone)


def _run_of(folder: Path) -> str:
    from rlbuffer.archive import Archive

    return Archive(folder).run


def _write(path: Path, groups: Iterable[Group], counts: list[int], run: str) -> str:
    """Writes the file, whole or not at all, and counts groups and rollouts. -> the run."""

    def counted() -> Iterator[Group]:
        for group in groups:
            counts[0] += 1
            counts[1] += len(group.rollouts)
            yield group

    if path.suffix == ".parquet":
        from rlbuffer.archive.groups import write_groups

        write_groups(path, counted(), run=run)
        return run
    from rlbuffer.process.files import write_lines
    from rlbuffer.wire.json_lines import line_of

    write_lines(path, (line_of(group) for group in counted()))
    return run
