"""``rlbuffer export``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rlbuffer.state.text import plural
from rlbuffer_cli import options
from rlbuffer_cli.options import echo, say
from rlbuffer_cli.starting import clear

STDOUT = "-"

if TYPE_CHECKING:
    from rlbuffer.archive.library import ArchivedGroup
    from rlbuffer.client.views import GroupDetail
    from rlbuffer.records.group import Group
    from rlbuffer_cli.web.pages import Sources


@click.command("export")
@options.common
@click.option("--where", default="", metavar="FILTER", help="Only groups that match, e.g. 'env:math reward<0.1'.")
@click.option(
    "-o", "--output", required=True, metavar="FILE", help="FILE.jsonl, FILE.parquet or FILE.html; - is JSONL on stdout."
)
@click.option("--archive", metavar="DIR", help="Groups of an archive instead of the server: no server is needed.")
@click.option("--json", "as_json", is_flag=True, help="The counts as one object.")
def command(given: options.Given, where: str, output: str, archive: str | None, as_json: bool) -> int:
    """Write groups into a file that `rlbuffer push` reads, or into a page for people.

    JSON Lines for people and scripts, Parquet with the columns of an archive's rollouts. Pushed into another run, every
    rollout is the same, byte for byte. HTML is one page, as of `rlbuffer inspect --html`: it fetches nothing and runs
    no script. A group of which nothing is kept any more is left out and counted. The filter is that of
    `rlbuffer inspect`.

    \b
    Examples:
      rlbuffer export --where 'env:math reward>=1' -o good.parquet
      rlbuffer export --archive /data/math -o math.jsonl
      rlbuffer export --archive /data/math --where 'step:40 rollout.reward<0.1' \\
        -o worst.html
      rlbuffer export --where state:ready -o - | head -1
      rlbuffer push good.parquet --run another
    """
    from rlbuffer.client.filters import parse
    from rlbuffer.errors import RlbufferError

    path = Path(output)
    if output != STDOUT and path.suffix not in (".jsonl", ".parquet", ".html"):
        raise click.UsageError(f"-o takes FILE.jsonl, FILE.parquet, FILE.html or -, got {output!r}")
    if output == STDOUT and as_json:
        raise click.UsageError("-o - and --json are both for stdout: name a file, or leave --json out")
    parse(where)  # a typing mistake needs no server
    gone: list[str] = []
    counts = [0, 0]
    is_page = path.suffix == ".html"
    try:
        if archive is not None and is_page:
            run = _run_of(Path(archive))
            _write_page(path, _details_of(Path(archive), where), gone, counts, f"run {run}: groups {where}".rstrip())
        elif archive is not None:
            run = _write(path, _of_archive(Path(archive), where, gone), counts, _run_of(Path(archive)))
        else:
            run = _of_server(given, path, where, gone, counts)
    except BrokenPipeError:
        raise  # the reader has left
    except OSError as error:
        raise RlbufferError(f"cannot write {output}: {error.strerror or error}") from None
    groups, rollouts = counts
    missing = len(set(gone))
    if as_json:
        record = {"schema": "rlbuffer.export/1", "run": run, "groups": groups, "rollouts": rollouts, "gone": missing}
        echo(json.dumps(record))
    else:
        what = f"{plural(groups, 'group')} with {plural(rollouts, 'rollout')}"
        verb = "is" if missing == 1 else "are"
        whole = f"; {plural(missing, 'group')} {verb} no longer kept whole" if missing else ""
        say(f'{"stdout" if output == STDOUT else output}: {what} of run "{run}"{whole}', err=True)
    return 0


def _of_server(given: options.Given, path: Path, where: str, gone: list[str], counts: list[int]) -> str:
    """Writes the groups of the server. -> the run."""
    from rlbuffer.client.exporting import export_groups
    from rlbuffer.client.searching import list_details
    from rlbuffer_cli.session import open_run
    from rlbuffer_cli.web.files import sources_of

    with open_run(given) as buffer:
        if path.suffix != ".html":
            return _write(path, export_groups(buffer, where, gone), counts, buffer.run)
        details = list_details(buffer.store, where=where, limit=2**31, text_of=buffer.texts.decoded)
        title = f"run {buffer.run}: groups {where}".rstrip()
        _write_page(path, details, gone, counts, title, sources_of(buffer), buffer.store.now())
        return buffer.run


def _of_archive(folder: Path, where: str, gone: list[str]) -> Iterator[Group]:
    from rlbuffer.archive.groups import pushes_of

    for group, _ in _chosen(folder, where):
        if not group.members:
            gone.append(group.group_id)
        yield from pushes_of(group.members, gone)


def _details_of(folder: Path, where: str) -> Iterator[GroupDetail]:
    for _, detail in _chosen(folder, where):
        yield detail


def _chosen(folder: Path, where: str) -> Iterator[tuple[ArchivedGroup, GroupDetail]]:
    from rlbuffer.archive import Archive
    from rlbuffer.archive.groups import archived_groups
    from rlbuffer.client.filters import parse
    from rlbuffer_cli.archived import detail_of

    chosen, archive = parse(where), Archive(folder)
    for group in archived_groups(archive):
        detail = detail_of(archive, group)
        if chosen.matches(detail.view, detail.members):
            yield group, detail


def _run_of(folder: Path) -> str:
    from rlbuffer.archive import Archive

    return Archive(folder).run


def _write_page(
    path: Path,
    details: Iterable[GroupDetail],
    gone: list[str],
    counts: list[int],
    title: str,
    sources: Sources | None = None,
    now: float | None = None,
) -> None:
    """Writes a page, and counts groups and rollouts; a group without rollouts is on it by its figures."""
    from rlbuffer.client.texts import Texts
    from rlbuffer_cli.web.files import write_pieces
    from rlbuffer_cli.web.pages import Sources, export

    def counted() -> Iterator[GroupDetail]:
        for detail in details:
            counts[0] += 1
            counts[1] += len(detail.members)
            if not detail.members:
                gone.append(detail.view.group_id)
            yield detail

    write_pieces(export(counted(), title=title, sources=sources or Sources(texts=Texts()), now=now), str(path))


def _write(path: Path, groups: Iterable[Group], counts: list[int], run: str) -> str:
    """Writes the file, whole or not at all, or lines on stdout, and counts groups and rollouts. -> the run."""

    def counted() -> Iterator[Group]:
        for group in groups:
            counts[0] += 1
            counts[1] += len(group.rollouts)
            yield group

    if path.suffix == ".parquet":
        from rlbuffer.archive.groups import write_groups

        write_groups(path, counted(), run=run)
        return run
    from rlbuffer.process.files import write_whole
    from rlbuffer.wire.json_lines import line_of

    lines = (f"{line_of(group)}\n" for group in counted())
    if str(path) == STDOUT:
        clear()
        sys.stdout.writelines(lines)
        sys.stdout.flush()  # a reader that has left ends it here, before anything is reported
    else:
        write_whole(path, lines)
    return run
