"""``rlbuffer inspect``."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import click

from rlbuffer_cli import options
from rlbuffer_cli.options import echo, say
from rlbuffer_cli.starting import clear, is_drawable

if TYPE_CHECKING:
    from rlbuffer.client.texts import Texts
    from rlbuffer.client.views import GroupDetail, RolloutView
    from rlbuffer.errors import RlbufferError
    from rlbuffer_cli.whole_run import WholeRun

LISTED_GROUPS = 30
"""Groups that are printed unless `--limit` says otherwise."""


@click.command("inspect")
@click.argument("identifier", metavar="[ID]", required=False)
@options.common
@click.option("--where", default="", metavar="FILTER", help="Only groups that match, e.g. 'env:vcopy age>=1'.")
@click.option("--plain", is_flag=True, help="Print, also on a terminal. [default: browse on a terminal]")
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Print so many groups. [default: 30]")
@click.option("--tokens", "window", metavar="A:B", help="Of a rollout: tokens A to B. [default: the first 200]")
@click.option("--tokenizer", metavar="DIR", help="Decode with DIR/tokenizer.json. [default: that of model.path]")
@click.option("--with", "other", metavar="ID", help="Beside rollout ID, another of its group: where they part.")
@click.option("--steps", is_flag=True, help="Print the committed steps that can still be read.")
@click.option("--step", "number", type=click.IntRange(1), metavar="N", help="Print step N: its envs, ranks and rows.")
@click.option("--workers", is_flag=True, help="Print who was heard when, and what failed last.")
@click.option("--html", metavar="FILE", help="Write groups, or the one of ID, as one page to FILE; - is stdout.")
@click.option("--web", is_flag=True, help="Serve these views to a web browser on this machine.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, metavar="P", help="Of --web. [default: a free one]")
@click.option("--json", "as_json", is_flag=True, help="One object per line: groups, or the group or rollout whole.")
@click.option("--totals", is_flag=True, help="The run, its envs and its workers, without groups.")
@click.option("--archive", metavar="DIR", help="Where an ID is looked for that the server has let go.")
@click.option("--alive", metavar="WHO", help="Only whether WHO has been heard: batcher, 'worker NAME' or 'rank N'.")
@click.option(
    "--within", type=click.FloatRange(0), default=30.0, show_default=True, metavar="S", help="Seconds, for --alive."
)
def command(
    identifier: str | None,
    given: options.Given,
    where: str,
    plain: bool,
    limit: int | None,
    window: str | None,
    tokenizer: str | None,
    html: str | None,
    other: str | None,
    steps: bool,
    number: int | None,
    workers: bool,
    web: bool,
    port: int,
    as_json: bool,
    totals: bool,
    archive: str | None,
    alive: str | None,
    within: float,
) -> int:
    """Look at the pool, a group or a rollout. Changes nothing.

    On a terminal this opens a browser: `?` shows its keys, `q` leaves it. Elsewhere, and with --plain, --json, --limit,
    --tokens, --totals, --steps, --step, --workers or --with, it prints.

    Without ID: the run, its envs, and its groups: those in the pool, then those in steps, then dropped ones, the newest
    of each first. With the ID of a group: its rollouts. With the ID of a rollout (GROUP/INDEX): its tokens. The
    beginning of an ID is enough where it is unique. Without --run, the run that was opened last. What the server has
    let go comes from --archive, or from the archive that `serve` says it writes.

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
    States         forming ready packed trained dropped

    \b
    Examples:
      rlbuffer inspect --where 'env:vcopy state:ready reward<0.5'
      rlbuffer inspect --where 'stop:length rollout.reward>0 text:/final answer/i'
      rlbuffer inspect vcopy.120
      rlbuffer inspect vcopy.120/3 --json
      rlbuffer inspect vcopy.120/3 --with vcopy.120/5
      rlbuffer inspect --step 40
      rlbuffer inspect --where 'step:40 rollout.reward<0.1' --html worst.html
      rlbuffer inspect --alive 'worker vcopy' --within 60 || echo 'not heard'
    """
    if alive is not None:
        return _alive(given, alive, within, as_json)
    from rlbuffer.client.filters import parse
    from rlbuffer_cli.session import open_existing
    from rlbuffer_cli.whole_run import WholeRun

    parse(where)  # a typing mistake needs no server
    bounds = _window(window)
    with open_existing(given.load(), run_given=given.run is not None) as buffer:
        run = WholeRun(buffer, archive)
        if tokenizer is not None:
            buffer.texts = _texts(tokenizer)
        if html is not None:
            return _page(run, identifier, where, limit or LISTED_GROUPS, html)
        if web:
            return _web(run, port)
        if steps or workers or number is not None:
            return _printed(run, number, "processes" if workers else "steps", as_json)
        if other is not None:
            return _pair(run, identifier, other, as_json)
        if not (plain or as_json or totals or limit or window) and _may_browse():
            from rlbuffer_cli.browse.app import browse

            if identifier is not None:
                _look_up(run, identifier)  # what is not there is an error here, too, and opens nothing
            clear()
            return browse(run, identifier=identifier, where=where)
        if identifier is not None:
            return _one(run, identifier, bounds, as_json)
        return _pool(run, where, limit or LISTED_GROUPS, as_json, totals)


def _web(run: WholeRun, port: int) -> int:
    from rlbuffer_cli.web.server import serve_pages

    try:
        return serve_pages(run, port)
    except OSError as error:
        raise click.UsageError(f"--port {port}: {error.strerror}") from None


def _printed(run: WholeRun, number: int | None, name: str, as_json: bool) -> int:
    from rlbuffer_cli.render.printed import EVERYTHING, show_listed, show_step
    from rlbuffer_cli.tables import VIEWS

    if number is not None:
        return show_step(run, number, as_json=as_json)
    return show_listed(VIEWS[name], run, "", EVERYTHING, as_json=as_json)


def _pair(run: WholeRun, identifier: str | None, other: str, as_json: bool) -> int:
    from rlbuffer_cli.render.group import member_of
    from rlbuffer_cli.render.pair import pair_record, show_pair

    if identifier is None:
        raise click.UsageError("--with compares two rollouts: rlbuffer inspect GROUP/INDEX --with GROUP/INDEX")
    detail = run.group(identifier)
    is_here = any(member.rollout_id == other for member in detail.members)
    # Else looked up by itself: what this group's id begins with may be the whole id of another.
    if "/" in other and not is_here and (group_id := run.group(other).view.group_id) != detail.view.group_id:
        raise click.UsageError(
            f"--with {other}: only rollouts of one group are compared; {identifier} is of group "
            f"{detail.view.group_id!r}, this one of {group_id!r}"
        )
    one, second = member_of(detail, identifier), member_of(detail, other)
    if as_json:
        echo(json.dumps(pair_record(one, second)))
    else:
        show_pair(detail, one, second, run.buffer.texts)
    return 0


def _page(run: WholeRun, identifier: str | None, where: str, limit: int, file: str) -> int:
    from rlbuffer_cli.web.files import STDOUT, one_of, write_page

    problems: list[RlbufferError] = []
    buffer = run.buffer
    title = f"{identifier} of run {buffer.run}" if identifier else f"run {buffer.run}: groups {where}".rstrip()
    if identifier is not None:
        details = iter([one_of(run.group(identifier), identifier)])
    else:
        details = run.details(where, limit, problems)
    try:
        write_page(buffer, details, file, title=title)
    except BrokenPipeError:
        raise  # the reader has left
    except OSError as error:
        raise click.UsageError(f"--html {file}: {error.strerror}") from None
    for problem in problems:
        say(f"Error: {problem}", err=True)
    if file != STDOUT:
        say(f"wrote {file}", err=True)
    return 1 if problems else 0


def _texts(directory: str) -> Texts:
    from rlbuffer.client.texts import Texts

    texts = Texts(directory)
    if texts.lacks:
        raise click.UsageError(f"--tokenizer {directory}: {texts.lacks}")
    return texts


def _may_browse() -> bool:
    """True where a person sits at a terminal that can be drawn on."""
    return sys.stdin.isatty() and is_drawable(sys.stdout)


def _pool(run: WholeRun, where: str, limit: int, as_json: bool, totals: bool) -> int:
    from rlbuffer.client.run_state import read_run_state
    from rlbuffer_cli import look
    from rlbuffer_cli.render.printed import show_listed
    from rlbuffer_cli.tables import GROUPS
    from rlbuffer_cli.view import run_view

    if not totals:
        return show_listed(GROUPS, run, where, limit, as_json=as_json)
    state = read_run_state(run.buffer.store)
    if as_json:
        echo(json.dumps(state.as_object()))
    else:
        look.show(run_view(state))
    return 0


def _alive(given: options.Given, who: str, within: float, as_json: bool) -> int:
    from rlbuffer.state.text import duration
    from rlbuffer_cli.alive import heard

    seconds, has_stopped = heard(who, run=given.run, redis=given.redis, config=given.config), False
    if seconds is None or seconds > within:  # the careful way says what is wrong
        seconds, has_stopped = _last_heard(given, who)
    is_alive = seconds <= within and not has_stopped
    if as_json:
        echo(json.dumps({"schema": "rlbuffer.alive/1", "process": who, "seconds_ago": seconds, "alive": is_alive}))
    else:
        why = "" if is_alive else ", when it stopped" if has_stopped else f", more than {within:g} s"
        echo(f"{who} was heard {duration(seconds)} ago{why}")
    return 0 if is_alive else 1


def _last_heard(given: options.Given, who: str) -> tuple[float, bool]:
    """Seconds since then, and whether it was the goodbye of a batcher."""
    from rlbuffer.client.run_state import read_run_state
    from rlbuffer.errors import NotFound
    from rlbuffer_cli.session import open_existing

    with open_existing(given.load(), run_given=given.run is not None) as buffer:
        seen = {process.title: process for process in read_run_state(buffer.store).processes}
        if who not in seen:
            known = ", ".join(seen) or "nobody"
            raise NotFound(f"{who!r} has never been heard in run {buffer.run!r}. Heard were: {known}.")
        return seen[who].seconds_ago, who == "batcher" and seen[who].has_stopped


def _look_up(run: WholeRun, identifier: str) -> tuple[GroupDetail, RolloutView | None]:
    """The group, and the rollout where `identifier` (GROUP/INDEX) names one. Raises NotFound, AmbiguousId."""
    from rlbuffer_cli.render.group import member_of

    detail = run.group(identifier)
    return detail, member_of(detail, identifier) if "/" in identifier else None


def _one(run: WholeRun, identifier: str, bounds: tuple[int, int], as_json: bool) -> int:
    from rlbuffer_cli.render import group

    (detail, member), texts = _look_up(run, identifier), run.buffer.texts
    if member is None:
        if as_json:
            echo(json.dumps(group.detail_record(detail)))
        else:
            group.show_group(detail, texts)
        return 0
    if as_json:
        echo(json.dumps(group.rollout_record(member, detail.view)))
    else:
        group.show_rollout(detail, member, bounds, texts)
    return 0


def _window(text: str | None) -> tuple[int, int]:
    if text is None:
        return 0, 200
    first, colon, last = text.partition(":")
    try:
        start = int(first) if first else 0
        end = int(last) if last else start + (200 if colon else 1)
    except ValueError:
        raise click.UsageError(f"--tokens takes A:B, e.g. 100:300, got {text!r}") from None
    if start < 0 or end <= start:
        raise click.UsageError(f"--tokens takes A:B with 0 <= A < B, got {text!r}")
    return start, end
