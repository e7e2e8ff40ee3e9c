"""The pages of `rlbuffer inspect --web`: what each reads, by its path. Every link is a path of the same server."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from typing import Any
from urllib.parse import urlencode

from rlbuffer.client.step_view import StepView
from rlbuffer.errors import FilterError, NotFound
from rlbuffer.records.states import State
from rlbuffer.state.text import plural
from rlbuffer_cli import look
from rlbuffer_cli.facts import best_and_worst, env_shades, member_of, rank_bars
from rlbuffer_cli.plots import curves_of, trends
from rlbuffer_cli.run_tables import ENVS, READ_RECORDS, env_rows
from rlbuffer_cli.sheets import Sheet, read
from rlbuffer_cli.shown_run import ShownRun, Standing
from rlbuffer_cli.table import Target, View, ordered
from rlbuffer_cli.tables import MEMBERS, STEPS, VIEWS
from rlbuffer_cli.text import time_of
from rlbuffer_cli.view import account, agents, alerts, figures, notes, states
from rlbuffer_cli.web.pages import LENSES, PageData, drawn, page, shown_group, shown_pair, shown_rollout
from rlbuffer_cli.whole_run import WholeRun

Query = Mapping[str, str]
ROWS_ON_A_PAGE = 200
WORST_ROLLOUTS = 50
"""Rollouts of a step that its page lists, the worst ones."""
TABS = (("overview", "./"), *((name, name) for name in VIEWS))
OF_SERVER = frozenset(name for name, view in VIEWS.items() if view.of_server)


def route(run: ShownRun, sources: PageData, name: str, query: Query) -> Iterator[str] | None:
    """The pieces of a page; None where there is none of that name."""
    if name in VIEWS:
        return _listed(run, VIEWS[name], query)
    pages: dict[str, Callable[[], Iterator[str]]] = {
        "": lambda: _overview(run),
        "group": lambda: _group(run, query, sources),
        "rollout": lambda: _rollout(run, query, sources),
        "compare": lambda: _compare(run, query, sources),
        "step": lambda: _step(run, query),
    }
    return pages[name]() if name in pages else None


def refusal(title: str, problem: str) -> Iterator[str]:
    """The page that says why there is no other."""
    return page("base", title=title, problems=[f"✕ {problem}"])


def _page(
    run: ShownRun, template: str, tab: str, title: str, *, standing: Standing | None = None, **values: Any
) -> Iterator[str]:
    at, standing = time_of(run.now()), standing or run.standing(READ_RECORDS, is_brief=False)
    return page(
        template,
        title=f"{title} · run {run.name}",
        forms="self",
        run=run.name,
        tabs=[tab for tab in TABS if run.has_server or tab[0] not in OF_SERVER],
        tab=tab,
        at=at,
        href=href,
        **{"count": {"problems": standing.problems}, "standing": standing.facts, **values},
    )


def link(path: str, **query: str) -> str:
    return f"{path}?{urlencode(query)}" if query else path


def href(view: View, item: Any) -> str:
    """Where the first cell of a row leads; "" for nowhere."""
    target = view.opens(item) if view.opens is not None else None
    if target is None:
        return ""
    if target.kind == "table":
        return link(target.name, where=target.where)
    if target.kind == "rollout":
        return link("rollout", id=target.group, rollout=target.name)
    return link(target.kind, **{"n" if target.kind == "step" else "id": target.name})


def _overview(run: ShownRun) -> Iterator[str]:
    parts: dict[str, Any] = {"alerts": [], "states": [], "notes": [], "view": None, "items": []}
    problems = 0
    if isinstance(run, WholeRun):
        state = run.state()
        facts, problems = figures(state), len(state.problems)
        parts["alerts"] = list(alerts(state))
        parts["states"] = [*states(state).values(), *account(state)]
        parts["notes"] = [facts.pop("memory"), *notes(state)]
        parts |= {"view": ENVS, "items": env_rows(state)}
        numbers = [*facts.values(), *agents(state).values()]
    else:
        numbers = list(run.figures().values())
    return _page(
        run,
        "overview",
        "overview",
        "overview",
        standing=Standing([], problems),
        figures=numbers,
        curves=_curves(run),
        **parts,
    )


def _curves(run: ShownRun) -> list[dict[str, Any]]:
    headers = run.headers()
    curves = {curve.name: curve for curve in trends(run.measured(), headers)}
    records = [{"step": h.step, "age": h.age, "fill": h.fill, "tokens": h.tokens} for h in headers]
    if len(records) > 1:
        # Of steps that close at a number of groups no row is waited for.
        names = [name for name in ("age", "fill", "tokens") if name != "fill" or any(h.capacity_share for h in headers)]
        curves |= {name: curves_of(records, name)[0] for name in names}
    return drawn({name: curve for name, curve in curves.items() if len(curve.points) > 1})


def _listed(run: ShownRun, view: View, query: Query) -> Iterator[str]:
    """A table by a filter, in an order: both stand in the address."""
    where, sort = query.get("where", ""), query.get("sort", "")
    target = Target("table", view.name, where=where)
    try:
        sheet = read(run, target, ROWS_ON_A_PAGE)
    except FilterError as error:
        sheet = Sheet(target=target, view=view, problems=[error])
    items = sheet.items
    is_reversed, by = sort.startswith("-"), sort.removeprefix("-")

    def order(title: str) -> str:
        return link(view.name, where=where, sort=f"-{title}" if by == title and not is_reversed else title)

    first = "the first " if len(items) == ROWS_ON_A_PAGE else ""
    chips = [(look.state(str(each)), link("groups", where=f"state:{each}")) for each in State]
    return _page(
        run,
        "table",
        view.name,
        view.name,
        view=view,
        items=ordered(view, items, by, is_reversed=is_reversed) if sort else items,
        where=where,
        sort=sort,
        order=order,
        amount=f"{first}{plural(len(items), 'row')}",
        chips=chips if view.name == "groups" else [],
        curves=_curves(run) if view is STEPS else [],
        details=[(view.key(item), lines) for item in items if (lines := view.more(item))],
        problems=[f"✕ {problem}" for problem in sheet.problems],
    )


def _group(run: ShownRun, query: Query, sources: PageData) -> Iterator[str]:
    detail = run.group(query.get("id", ""))
    group = shown_group(detail, sources)
    both = best_and_worst(detail)
    ways = [] if both is None else [("compare the best and the worst", compared(detail.view.group_id, *both))]
    return _page(run, "group", "groups", f"group {detail.view.group_id}", group=group, view=MEMBERS, ways=ways)


def _rollout(run: ShownRun, query: Query, sources: PageData) -> Iterator[str]:
    detail = run.group(query.get("id", ""))
    member = member_of(detail, query.get("rollout", ""))
    names, group_id = [one.rollout_id for one in detail.tree()], detail.view.group_id
    at = names.index(member.rollout_id)
    near = [(word, at + by) for word, by in (("previous", -1), ("next", 1)) if 0 <= at + by < len(names)]
    ways = [(f"group {group_id}", link("group", id=group_id))]
    ways += [(word, link("rollout", id=group_id, rollout=names[n])) for word, n in near]
    both = best_and_worst(detail) or ()
    others = [
        (word, name) for word, name in zip(("best", "worst"), both, strict=bool(both)) if name != member.rollout_id
    ]
    ways += [(f"compare with the {word}", compared(group_id, member.rollout_id, name)) for word, name in others]
    has_pieces = member.rollout is not None and sources.texts.has_pieces(member.rollout)
    return _page(
        run,
        "rollout",
        "groups",
        f"rollout {member.rollout_id}",
        group=shown_group(detail, sources),
        shown=shown_rollout(detail, member, sources),
        view=MEMBERS,
        ways=ways,
        lenses=LENSES,
        lens="logprob" if has_pieces else "plain",
    )


def compared(group_id: str, one: str, other: str) -> str:
    """The address of two rollouts of a group, side by side."""
    return link("compare", id=group_id, one=one, other=other)


def _compare(run: ShownRun, query: Query, sources: PageData) -> Iterator[str]:
    """Two rollouts of a group: where they part, and how each goes on."""
    detail = run.group(query.get("id", ""))
    one, other = (member_of(detail, query.get(name, "")) for name in ("one", "other"))
    group_id = detail.view.group_id
    has_pieces = one.rollout is not None and sources.texts.has_pieces(one.rollout)
    return _page(
        run,
        "compare",
        "groups",
        f"{one.rollout_id} and {other.rollout_id}",
        pair=shown_pair(detail, one, other, sources),
        ways=[
            (f"group {group_id}", link("group", id=group_id)),
            *((m.rollout_id, link("rollout", id=group_id, rollout=m.rollout_id)) for m in (one, other)),
            ("the other way round", compared(group_id, other.rollout_id, one.rollout_id)),
        ],
        view=MEMBERS,
        lenses=LENSES,
        lens="logprob" if has_pieces else "plain",
    )


def _step(run: ShownRun, query: Query) -> Iterator[str]:
    """What a step holds, why it was closed, its rows by rank, its rollouts and groups."""
    number = int(query["n"]) if query.get("n", "").isdecimal() else 0
    if number < 1:
        raise NotFound("a step has a number from 1: step?n=40")
    sheet = read(run, Target("step", str(number)))
    view: StepView = sheet.found
    marks, capacity = env_shades(view), max(1, view.row_tokens)

    def bar(row: list[tuple[str, int]]) -> dict[str, Any]:
        ends = list(accumulate(size for _, size in row))
        parts = [
            (f"{1000 * (end - size) / capacity:.1f}", f"{1000 * size / capacity:.1f}", marks[env])
            for end, (env, size) in zip(ends, row, strict=True)
        ]
        return {"title": f"{sum(size for _, size in row):,} of {capacity:,} tokens", "parts": parts}

    ranks = rank_bars(view, run.cost())
    return _page(
        run,
        "step",
        "steps",
        f"step {number}",
        lines=sheet.lines,
        capacity=f"{capacity:,}",
        marks=list(marks.items()),
        ranks=[{"title": title, "rows": [bar(row) for row in rows]} for title, rows in ranks],
        view=sheet.view,
        items=sheet.items[:WORST_ROLLOUTS],
        groups=[(name, link("group", id=name)) for name in view.header.group_ids],
    )
