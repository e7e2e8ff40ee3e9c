"""``rlbuffer inspect``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rlbuffer.errors import ArchiveError, NotFound, RlbufferError, clause
from rlbuffer.state.text import did_you_mean
from rlbuffer_cli import options
from rlbuffer_cli.options import say
from rlbuffer_cli.session import of_run, open_existing, open_run
from rlbuffer_cli.starting import clear, is_drawable

if TYPE_CHECKING:
    from rlbuffer.client.texts import Texts
    from rlbuffer_cli.shown_run import ShownRun
    from rlbuffer_cli.table import Target


@options.command("inspect")
@click.argument("what", metavar="[ID | TABLE | step:N]", required=False)
@click.argument("other", metavar="[ID]", required=False)
@options.common_of_run
@click.option("--where", default="", metavar="FILTER", help="Only groups that match, e.g. 'env:vcopy age>=1'.")
@click.option("--plain", is_flag=True, help="Print, also on a terminal. [default: browse on a terminal]")
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Print so many rows. [default: 30 groups]")
@options.json_lines("One object per row, or the group, rollout or step whole.")
@click.option("--html", metavar="FILE", help="Write groups, or the one of ID, as one page to FILE; - is stdout.")
@click.option(
    "--web",
    is_flag=False,
    flag_value="0",
    type=click.IntRange(0, 65535),
    metavar="[PORT]",
    help="Serve these views to a web browser on this machine. [default: a free port]",
)
@click.option(
    "--archive", metavar="DIR", help="What the server has let go; all that is left of a run whose server is not there."
)
@click.option("--tokenizer", metavar="DIR", help="Decode with DIR/tokenizer.json. [default: that of model.path]")
def command(
    what: str | None,
    other: str | None,
    given: options.RunFlags,
    where: str,
    plain: bool,
    limit: int | None,
    html: str | None,
    web: int | None,
    archive: str | None,
    tokenizer: str | None,
) -> int:
    """Look at the pool, a group or a rollout. Changes nothing.

    On a terminal this opens a browser: `?` shows its keys, `q` leaves it. Elsewhere, and with --plain, --json or
    --limit, it prints.

    Without ID: the run, its envs, and its groups: those in the pool, then those in steps, then dropped ones, the newest
    of each first. TABLE is another one: steps, drift (trainer against sampler, by the age of tokens), processes, envs,
    problems, or open, the rollouts that agents are at work on. With the ID of a group: its rollouts. With
    the ID of a rollout (GROUP/INDEX): its tokens; with those of two of a group: where they part. The beginning of an ID
    is enough where it is unique. Without --run, the run that was opened last. What the server has let go comes from
    --archive, or from the archive that `serve` says it writes. Where the server, or the run on it, is not there,
    --archive shows the archive alone: its groups, steps and drift.

    \b
    Filter fields
      text         env state reason worker adapter id prompt
                   `field:value`, commas for alternatives
                   `id:a` and `prompt:a`: what begins with a; `id=a`: only a
                   `prompt:"a, b"`: with its blank and comma
      numbers      age reward tokens step waited (in seconds)
                   `field>=value`, 8k = 8000
      of rollouts  stop truncated:yes text:word text:/regex/i (flags i, s, m)
                   rollout.reward rollout.tokens rollout.trained
                   rollout.version rollout.advantage rollout.logprob
                   all must hold for one and the same rollout of a group
      of tables    steps: step state age reward tokens
                   drift: step age tokens
                   others: env, or a part of the name
    States         forming ready packed trained dropped

    \b
    Examples:
      rlbuffer inspect --where 'env:vcopy state:ready reward<0.5'
      rlbuffer inspect --where 'stop:length rollout.reward>0 text:/final answer/i'
      rlbuffer inspect vcopy.120
      rlbuffer inspect vcopy.120/3 --json
      rlbuffer inspect vcopy.120/3 vcopy.120/5
      rlbuffer inspect processes
      rlbuffer inspect open
      rlbuffer inspect step:40
      rlbuffer inspect drift --where 'step>=40 age:0'
      rlbuffer inspect --where 'step:40 rollout.reward<0.1' --html worst.html
      rlbuffer inspect --archive /data/math
    """
    from rlbuffer_cli import printed, sheets
    from rlbuffer_cli.tables import GROUPS, VIEWS

    is_table = what is None or what in VIEWS
    VIEWS[what if what in VIEWS else GROUPS.name].takes(where)  # a typing mistake needs no server
    with _opened(given, archive) as run, _naming_tables(what or ""):
        if tokenizer is not None:
            run.texts = _texts(tokenizer)
        if html is not None:
            return _page(run, None if is_table else what, where, limit or printed.LISTED_GROUPS, html)
        if web is not None:
            return _web(run, web)
        target = _target(what or GROUPS.name, other, where)
        if plain or options.is_json() or limit or not sys.stdin.isatty() or not is_drawable(sys.stdout):
            return printed.show(run, target, limit)
        from rlbuffer_cli.browse.app import browse

        if not is_table:  # what is not there is an error on a terminal, too, and opens nothing
            target = sheets.read(run, target, 0).target
        clear()
        return browse(run, opens=target, where=where if not is_table or target.name == GROUPS.name else "")


@contextmanager
def _opened(given: options.RunFlags, archive: str | None) -> Iterator[ShownRun]:
    """The run on its server, with its archive; the archive alone where the run cannot be had from a server."""
    from rlbuffer.config.loading import TYPED
    from rlbuffer_cli.archived_run import ArchivedRun, ArchiveFolder
    from rlbuffer_cli.whole_run import WholeRun

    if archive is None:
        with open_run(given) as buffer:
            yield WholeRun(buffer)
        return
    loaded = given.load()
    try:
        left = ArchivedRun(ArchiveFolder(Path(archive)))
    except ArchiveError as wrong:  # its first file is not written yet, or one is torn
        try:
            buffer = open_existing(loaded)
        except RlbufferError:
            raise wrong from None
        with buffer:
            yield WholeRun(buffer, archive)
        return
    if loaded.place("run") in TYPED and loaded.settings.run != left.name:
        raise click.UsageError(f'--archive {archive} is of run "{left.name}", not of "{loaded.settings.run}"')
    try:
        buffer = open_existing(of_run(loaded, left.name))
    except RlbufferError as error:
        say(f"showing the archive alone: {error}", err=True)
        yield left
    else:
        with buffer:
            yield WholeRun(buffer, archive)


@contextmanager
def _naming_tables(what: str) -> Iterator[None]:
    """Adds the tables to the error that a word finds nothing: without the dot of a ticket's id it may mean one."""
    from rlbuffer_cli.tables import VIEWS

    try:
        yield
    except NotFound as error:
        if not what.isalpha() or what in VIEWS:
            raise
        tables = did_you_mean(what, VIEWS, otherwise=f" The tables are {', '.join(VIEWS)}.")
        raise NotFound(f"{clause(error)}.{tables}") from error


def _target(what: str, other: str | None, where: str) -> Target:
    """The table or the thing that is meant."""
    from rlbuffer_cli.table import Target
    from rlbuffer_cli.tables import VIEWS

    kind, _, number = what.partition(":")
    if what in VIEWS:
        return Target("table", what, where=where)
    if kind == "step" and number.isdecimal():
        return Target("step", number)
    if other is not None:
        return Target("pair", what, group=what, other=other)
    return Target("rollout", what, group=what) if "/" in what else Target("group", what, where=where)


def _web(run: ShownRun, port: int) -> int:
    from rlbuffer_cli.web.server import serve_pages

    try:
        return serve_pages(run, port)
    except OSError as error:
        raise click.UsageError(f"--web {port}: {error.strerror}") from None


def _page(run: ShownRun, identifier: str | None, where: str, limit: int, file: str) -> int:
    from rlbuffer_cli.web.pages import STDOUT, one_of, write_page

    title = f"{identifier} of run {run.name}" if identifier else f"run {run.name}: groups {where}".rstrip()
    details = [one_of(run.group(identifier), identifier)] if identifier else run.details(where, limit)
    try:
        write_page(details, file, title=title, run=run)
    except BrokenPipeError:
        raise  # the reader has left
    except OSError as error:
        raise click.UsageError(f"--html {file}: {error.strerror}") from None
    for problem in run.problems:
        say(f"Error: {problem}", err=True)
    if file != STDOUT:
        say(f"wrote {file}", err=True)
    return 1 if run.problems else 0


def _texts(directory: str) -> Texts:
    from rlbuffer.client.texts import Texts

    texts = Texts(directory)
    if texts.lacks:
        raise click.UsageError(f"--tokenizer {directory}: {texts.lacks}")
    return texts
