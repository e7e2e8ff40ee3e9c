"""Pages of `rlbuffer inspect --web`: the screens of the browser as HTML. Every link is a path of the same server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from urllib.parse import urlencode

from rlbuffer.client.buffer import Buffer
from rlbuffer.client.run_state import read_run_state
from rlbuffer.errors import FilterError, NotFound, RlbufferError
from rlbuffer.state.text import plural
from rlbuffer_cli.render.curves import recent_metrics, trend_lines
from rlbuffer_cli.render.group import MEMBER_HEADER, headline, largest_reward, member_of, member_row
from rlbuffer_cli.render.html import SERVED_POLICY, Sources, group_facts, head, lens_choice, rollout_section, safe
from rlbuffer_cli.render.pair import PAIR_HEADER, best_and_worst, pair_lines, pair_rows
from rlbuffer_cli.render.pool import GROUP_HEADER, GROUP_ORDER, SORTS, group_row
from rlbuffer_cli.render.run import (
    ENV_HEADER,
    PROCESS_HEADER,
    READ_RECORDS,
    env_row,
    process_lines,
    process_rows,
    run_lines,
)
from rlbuffer_cli.render.steps import (
    ROLLOUT_HEADER,
    STEP_HEADER,
    cost_of,
    rank_lines,
    rollout_rows,
    step_lines,
    step_row,
    worst_first,
)
from rlbuffer_cli.whole_run import WholeRun

GROUPS_ON_A_PAGE = 200
PAIR_TOKENS = 2000
WORST_ROLLOUTS = 50
"""Rollouts of a step that its page lists, the worst ones."""
BAR_COLUMNS = 110
PAGE_END = "</main></body></html>\n"


def link(path: str, text: str, **query: str) -> str:
    """A link to another page of the server."""
    target = f"{path}?{urlencode(query)}" if query else path
    return f'<a href="{safe(target)}">{safe(text, 300)}</a>'


def table(header: Sequence[str], rows: Sequence[Sequence[str]], links: Sequence[str] = ()) -> str:
    """Rows of text; `links` is the finished HTML of the first column."""
    out = [f"<table><tr>{''.join(f'<th>{safe(name)}</th>' for name in header)}</tr>\n"]
    for at, row in enumerate(rows):
        cells = [links[at] if links and i == 0 else safe(cell, 300) for i, cell in enumerate(row)]
        out.append(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>\n")
    return "".join([*out, "</table>\n"])


def lines(texts: Sequence[str]) -> str:
    """Lines as they stand."""
    return f"<pre>{safe(chr(10).join(texts))}</pre>\n"


def frame(buffer: Buffer, title: str) -> Iterator[str]:
    """The beginning of every page, with the way to the others."""
    yield from head(f"{title} · run {buffer.run}", SERVED_POLICY)
    ways = " · ".join((link("./", "pool"), link("steps", "steps"), link("workers", "workers")))
    yield f'<p class="n">{ways}</p>\n'


def pool(run: WholeRun, query: Mapping[str, str]) -> Iterator[str]:
    """The run, its envs, and its groups by a filter, in an order."""
    where, sort = query.get("where", ""), query.get("sort", "newest first")
    problems: list[RlbufferError] = []
    try:
        views = run.groups(where, GROUPS_ON_A_PAGE, problems)
    except FilterError as error:
        views, problems = [], [error]
    views = sorted(views, key=SORTS.get(sort, SORTS["newest first"]))
    state = read_run_state(run.buffer.store)
    yield from frame(run.buffer, "pool")
    yield lines(run_lines(state))
    yield table(ENV_HEADER, [env_row(state, env) for env in state.envs])
    yield (
        f'<form><label>filter <input name="where" size="60" value="{safe(where)}"></label>'
        f'<input type="hidden" name="sort" value="{safe(sort)}"><input type="submit" value="show"></form>\n'
    )
    yield "".join(f"<p>! {safe(str(problem))}</p>\n" for problem in problems)
    shown = {name: "pool first" if name == "newest first" else name for name in SORTS}
    orders = " · ".join(link("./", label, where=where, sort=name) for name, label in shown.items())
    order = GROUP_ORDER if sort == "newest first" else f"by {sort}"
    yield f'<p class="n">{plural(len(views), "group")}, {safe(order)}; by {orders}</p>\n'
    names = [link("group", view.group_id, id=view.group_id) for view in views]
    yield table(GROUP_HEADER, [group_row(view) for view in views], names)
    yield PAGE_END


def group(run: WholeRun, query: Mapping[str, str], sources: Sources) -> Iterator[str]:
    """A group: what its rollouts share, and a row for each."""
    detail = run.group(query.get("id", ""))
    yield from frame(run.buffer, f"group {detail.view.group_id}")
    yield f"<h4>{safe(headline(detail.view)[0])}</h4>\n"
    yield from group_facts(detail, sources)
    if detail.view.step is not None:
        yield f"<p>{link('step', f'step {detail.view.step}', n=str(detail.view.step))}</p>\n"
    if (names := best_and_worst(detail)) is not None:
        ids = {"one": names[0], "other": names[1], "id": detail.view.group_id}
        yield f"<p>{link('pair', 'the best beside the worst', **ids)}</p>\n"
    best = largest_reward(detail)
    rows = [member_row(member, best, "")[:-1] for member in detail.members]
    ids_of = [link("rollout", m.rollout_id, id=detail.view.group_id, rollout=m.rollout_id) for m in detail.members]
    yield table(MEMBER_HEADER[:-1], rows, ids_of) if rows else "<p>its rollouts are no longer kept</p>\n"
    yield PAGE_END


def rollout(run: WholeRun, query: Mapping[str, str], sources: Sources) -> Iterator[str]:
    """A rollout through the lenses."""
    detail = run.group(query.get("id", ""))
    member = member_of(detail, query.get("rollout", ""))
    yield from frame(run.buffer, f"rollout {member.rollout_id}")
    at = detail.members.index(member)
    near = [(word, at + by) for word, by in (("previous", -1), ("next", 1)) if 0 <= at + by < len(detail.members)]
    group_id = detail.view.group_id
    ways = [link("group", f"group {group_id}", id=group_id)]
    ways += [link("rollout", word, id=group_id, rollout=detail.members[i].rollout_id) for word, i in near]
    yield f'<p class="n">{" · ".join(ways)}</p>\n{lens_choice()}'
    yield from rollout_section(detail, member, sources, is_open=True)
    yield PAGE_END


def pair(run: WholeRun, query: Mapping[str, str]) -> Iterator[str]:
    """Two rollouts of a group, from where they part."""
    detail = run.group(query.get("id", ""))
    one, other = (member_of(detail, query.get(name, "")) for name in ("one", "other"))
    yield from frame(run.buffer, f"{one.rollout_id} and {other.rollout_id}")
    yield f'<p class="n">{link("group", f"group {detail.view.group_id}", id=detail.view.group_id)}</p>\n'
    yield lines(pair_lines(detail, one, other, run.buffer.texts))
    yield table(PAIR_HEADER, list(pair_rows(one, other, run.buffer.texts, PAIR_TOKENS)))
    yield PAGE_END


def steps(run: WholeRun) -> Iterator[str]:
    """Curves over the committed steps of server and archive, and a row for each."""
    problems: list[RlbufferError] = []
    headers = run.headers(problems)
    trained = run.buffer.store.trainer().trained
    yield from frame(run.buffer, "steps")
    yield "".join(f"<p>! {safe(str(problem))}</p>\n" for problem in problems)
    numbers = [header.step for header in headers]
    curves: dict[str, list[float | None]] = {
        "reward": [header.reward for header in headers],
        "age": [header.age for header in headers],
        "fill": [header.fill for header in headers],
        "tokens": [float(header.tokens) for header in headers],
    }
    drawn = {
        name: [(n, v) for n, v in zip(numbers, values, strict=True) if v is not None] for name, values in curves.items()
    }
    drawn["entropy"] = _entropy(run.buffer)
    known = [n for points in drawn.values() for n, _ in points]
    for name, points in drawn.items():
        yield curve(name, points, (min(known), max(known))) if len(points) > 1 else ""
    yield lines(trend_lines(run.buffer.settings.output_dir, headers))
    rows = [step_row(header, trained=trained) for header in headers[::-1]]
    yield table(STEP_HEADER, rows, [link("step", str(n), n=str(n)) for n in numbers[::-1]])
    yield PAGE_END


def _entropy(buffer: Buffer) -> list[tuple[int, float]]:
    records = recent_metrics(buffer.settings.output_dir)
    return [(r["step"], r["entropy"]) for r in records if isinstance(r.get("entropy"), float)]


def step(run: WholeRun, query: Mapping[str, str]) -> Iterator[str]:
    """A step: what it holds, why it was closed, its rows by rank, and its groups."""
    number = int(query["n"]) if query.get("n", "").isdecimal() else 0
    if number < 1:
        raise NotFound("a step has a number from 1: step?n=40")
    view, cost = run.step(number), cost_of(run.buffer)
    yield from frame(run.buffer, f"step {number}")
    yield lines(step_lines(view, trained=run.buffer.store.trainer().trained))
    yield lines(list(rank_lines(view, BAR_COLUMNS, cost)))
    worst = worst_first(view)
    names = [link("rollout", m.info.rollout_id, id=m.group_id, rollout=m.info.rollout_id) for m in worst]
    yield table(ROLLOUT_HEADER, rollout_rows(view)[:WORST_ROLLOUTS], names[:WORST_ROLLOUTS])
    yield f"<p>{' · '.join(link('group', name, id=name) for name in view.header.group_ids)}</p>\n"
    yield PAGE_END


def workers(buffer: Buffer) -> Iterator[str]:
    """Processes: when each was heard, and what failed last."""
    state = read_run_state(buffer.store, history=READ_RECORDS)
    rows = process_rows(state)
    yield from frame(buffer, "workers")
    yield table(PROCESS_HEADER, list(rows.values()))
    yield lines([line for who in rows if (known := process_lines(state, who)) for line in (who, *known)])
    yield PAGE_END


def curve(name: str, points: Sequence[tuple[int, float]], steps: tuple[int, int]) -> str:
    """A line of (step, value), its ends in numbers. The whole width is from the first to the last of `steps`."""
    low, high = min(v for _, v in points), max(v for _, v in points)
    first, across, up = steps[0], max(1, steps[1] - steps[0]), (high - low) or 1.0
    places = " ".join(f"{600 * (n - first) / across:.1f},{80 - 76 * (v - low) / up:.1f}" for n, v in points)
    words = f"{name}: {low:.4g} to {high:.4g} over steps {points[0][0]} to {points[-1][0]}, last {points[-1][1]:.4g}"
    return (
        f'<h4>{safe(words)}</h4><svg viewBox="0 0 600 84" width="600" height="84" role="img">'
        f'<polyline fill="none" stroke="currentColor" points="{places}"/></svg>\n'
    )
