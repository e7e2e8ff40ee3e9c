"""``rlbuffer export``."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from rlbuffer.errors import RlbufferError
from rlbuffer.state.text import plural
from rlbuffer_cli import options
from rlbuffer_cli.options import say, show_json
from rlbuffer_cli.session import open_run
from rlbuffer_cli.starting import clear

STDOUT = "-"

if TYPE_CHECKING:
    from rlbuffer.archive.library import ArchivedGroup
    from rlbuffer.client.buffer import Buffer
    from rlbuffer.client.details import GroupDetail
    from rlbuffer.records.group import Group


@options.command("export")
@options.common_of_run
@click.option("--where", default="", metavar="FILTER", help="Only groups that match, e.g. 'env:math reward<0.1'.")
@click.option(
    "-o", "--output", required=True, metavar="FILE", help="FILE.jsonl, FILE.parquet or FILE.html; - is JSONL on stdout."
)
@click.option("--archive", metavar="DIR", help="Groups of an archive instead of the server: no server is needed.")
@options.json_lines("The counts as one object.")
def command(given: options.RunFlags, where: str, output: str, archive: str | None) -> int:
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

    path = Path(output)
    if output != STDOUT and path.suffix not in (".jsonl", ".parquet", ".html"):
        raise click.UsageError(f"-o takes FILE.jsonl, FILE.parquet, FILE.html or -, got {output!r}")
    if output == STDOUT and options.is_json():
        raise click.UsageError("-o - and --json are both for stdout: name a file, or leave --json out")
    parse(where)  # a typing mistake needs no server
    gone: list[str] = []
    with nullcontext() if archive is not None else open_run(given) as buffer:
        try:
            if buffer is None:
                found = _of_archive(Path(str(archive)), where, gone)
            else:
                found = _of_server(buffer, where, gone)
            counts = _write(path, found, buffer, where, gone)
        except BrokenPipeError:
            raise  # the reader has left
        except OSError as error:
            raise RlbufferError(f"cannot write {output}: {error.strerror or error}") from None
    missing = len(set(gone))
    if options.is_json():
        show_json({"schema": "rlbuffer.export/1", "run": found.run, **counts, "gone": missing})
        return 0
    what = f"{plural(counts['groups'], 'group')} with {plural(counts['rollouts'], 'rollout')}"
    whole = f"; no longer kept whole: {plural(missing, 'group')}" if missing else ""
    say(f'{"stdout" if output == STDOUT else output}: {what} of run "{found.run}"{whole}', err=True)
    return 0


class MatchingGroups(NamedTuple):
    """The groups of a run that match the filter; each is read when it is asked for."""

    run: str
    groups: Iterator[Group]
    """As they were pushed."""
    details: Iterator[GroupDetail]
    """As `inspect` shows them."""


def _of_server(buffer: Buffer, where: str, gone: list[str]) -> MatchingGroups:
    from rlbuffer.client.exporting import export_groups
    from rlbuffer.client.searching import list_details
    from rlbuffer.client.texts import Texts, tokenizer_directory

    texts = Texts(tokenizer_directory(buffer.settings))
    details = list_details(buffer.store, where=where, limit=2**31, text_of=texts.decoded)
    return MatchingGroups(buffer.run, export_groups(buffer, where, gone), details)


def _of_archive(folder: Path, where: str, gone: list[str]) -> MatchingGroups:
    from rlbuffer.archive import Archive
    from rlbuffer.archive.groups import pushes_of
    from rlbuffer.client.filters import parse
    from rlbuffer_cli.archived_run import details_of

    filtered, archive = parse(where), Archive(folder)

    def chosen() -> Iterator[tuple[ArchivedGroup, GroupDetail]]:
        for group, detail in details_of(archive, archive.all_groups()):
            if filtered.matches(detail.view, detail.members):
                yield group, detail

    def groups() -> Iterator[Group]:
        for group, _ in chosen():
            gone.extend([] if group.members else [group.group_id])
            yield from pushes_of(group.members, gone)

    return MatchingGroups(archive.run, groups(), (detail for _, detail in chosen()))


def _write(path: Path, found: MatchingGroups, buffer: Buffer | None, where: str, gone: list[str]) -> Counter[str]:
    """Writes the file, whole or not at all, or lines on stdout. -> how many groups and rollouts it has."""
    from rlbuffer.process.files import write_whole
    from rlbuffer.wire.jsonl import line_of

    counts = Counter(groups=0, rollouts=0)

    def pushed() -> Iterator[Group]:
        for group in found.groups:
            counts.update(groups=1, rollouts=len(group.rollouts))
            yield group

    def shown() -> Iterator[GroupDetail]:
        for detail in found.details:  # one without rollouts is on the page by its figures
            counts.update(groups=1, rollouts=len(detail.members))
            gone.extend([] if detail.members else [detail.view.group_id])
            yield detail

    lines = (f"{line_of(group)}\n" for group in pushed())
    if path.suffix == ".html":
        from rlbuffer_cli.web.pages import write_page
        from rlbuffer_cli.whole_run import WholeRun

        run = None if buffer is None else WholeRun(buffer)
        write_page(shown(), str(path), title=f"run {found.run}: groups {where}".rstrip(), run=run)
    elif path.suffix == ".parquet":
        from rlbuffer.archive.groups import write_groups

        write_groups(path, pushed(), run=found.run)
    elif str(path) == STDOUT:
        clear()
        sys.stdout.writelines(lines)
        sys.stdout.flush()  # a reader that has left ends it here, before anything is reported
    else:
        write_whole(path, lines)
    return counts
