"""What is shown of a table, a group, a rollout, two rollouts, or a step: read and worded here, for every screen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import click
from rich.console import RenderableType
from rich.text import Text

from rlbuffer.client.details import GroupDetail
from rlbuffer.client.filters import parse
from rlbuffer.client.rollout_view import RolloutView
from rlbuffer.client.searching import with_text
from rlbuffer.errors import NotFound, RlbufferError
from rlbuffer.state.text import plural, printable
from rlbuffer_cli import facts
from rlbuffer_cli.shown_run import ShownRun
from rlbuffer_cli.table import EVERYTHING, Target, View, of_tuples
from rlbuffer_cli.tables import (
    GROUP_ORDER,
    GROUPS,
    MEMBERS,
    VIEWS,
    WORST,
    detail_record,
    rollout_record,
    shared_words,
    step_record,
    worst_rows,
)

TOKENS = of_tuples(
    "tokens",
    ("token", "id", "text", "mask", "logprob", "advantage"),
    {"token", "id", "logprob", "advantage"},
    empty="its payload is no longer kept",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """All that is shown of a target."""

    target: Target
    """With ids that are whole."""
    view: View
    items: Sequence[Any] = ()
    lines: Sequence[str | Text] = ()
    """What is said of it."""
    shared: Mapping[str, Any] = field(default_factory=dict)
    """What its rollouts share, by name; a screen shows as much of each as it has room for."""
    above: Callable[[int], Sequence[RenderableType]] = lambda width: ()
    """Columns of the terminal -> what is drawn between the lines and the rows."""
    record: Callable[[], Mapping[str, Any]] | None = None
    """The thing as JSON; None of a table, whose items have one each."""
    found: Any = None
    """The group or the step that was read."""
    hints: Sequence[str] = ()
    """What to type next."""
    problems: Sequence[RlbufferError] = ()
    """What could not be read of a table."""

    def all_lines(self, most: int = facts.LINE_OF_TEXT) -> list[str | Text]:
        """The lines, and one for each thing that is shared, of which `most` characters are shown."""
        return [*self.lines, *facts.shared_lines(self.shared, most)]

    @property
    def nothing(self) -> str:
        """What stands where there are no items."""
        return self.view.nothing(self.target.where if self.target.kind == "table" else "")


def read(run: ShownRun, target: Target, most: int = EVERYTHING) -> Sheet:
    """Reads a target: `most` rows of a table, or tokens.

    Raises:
        NotFound: there is none. UsageError: a pair of two groups.
    """
    if target.kind == "table":
        return _table(run, target, most)
    if target.kind == "step":
        return _step(run, target)
    detail = run.group(target.group or target.name)
    if target.kind == "group":
        return _group(run, detail, target.where)
    member = facts.member_of(detail, target.name)
    if target.kind == "rollout":
        return _rollout(run, detail, member, most)
    return _pair(run, detail, member, target, most)


def _table(run: ShownRun, target: Target, most: int) -> Sheet:
    view, run.problems = VIEWS[target.name], []
    if view.of_server and not run.has_server:
        there = ", ".join(each.name for each in VIEWS.values() if not each.of_server)
        raise NotFound(
            f"{view.many or view.name} of run {run.name!r} are known to its server alone, which is not there; its "
            f"archive has {there}"
        )
    items, hints = view.listed(run, target.where, most), []
    if view is GROUPS and items:
        hints = [f"the first {most} ({GROUP_ORDER}): --limit shows more, --where chooses"] * (len(items) == most)
        hints.append(f"one group: rlbuffer inspect {view.key(items[0])}{run.flags}")
    return Sheet(
        target=target,
        view=view,
        items=items,
        above=lambda width: view.above(run, items, width),
        hints=hints,
        problems=run.problems,
    )


def _group(run: ShownRun, detail: GroupDetail, where: str) -> Sheet:
    """A row per rollout; those that the filter's terms about rollouts choose are marked."""
    texts, chosen = run.texts, parse(where)

    def matches(member: RolloutView) -> bool:
        return bool(chosen.rollout_terms) and chosen.matches_rollout(with_text(member, texts.decoded))

    return Sheet(
        target=Target("group", detail.view.group_id, where=where),
        view=MEMBERS,
        items=facts.rows_of(detail, texts, matches),
        lines=facts.headline(detail.view),
        shared=facts.shared_values(detail, texts),
        record=lambda: detail_record(detail),
        found=detail,
        hints=[f"one rollout: rlbuffer inspect {m.rollout_id}{run.flags}" for m in detail.members[:1]],
    )


def _rollout(run: ShownRun, detail: GroupDetail, member: RolloutView, most: int) -> Sheet:
    """A row for each of its first tokens, or for each of its sequences."""
    texts, rollout, group = run.texts, member.rollout, detail.view
    headline = f"rollout {member.rollout_id}   {' · '.join(facts.verdict(member))}"
    sheet = Sheet(
        target=Target("rollout", member.rollout_id, group.group_id),
        view=TOKENS,
        lines=[*facts.headline(group), headline, f"  {' -> '.join(facts.life(group, member))}"],
        record=lambda: rollout_record(member, group),
        found=detail,
    )
    if rollout is None:
        return replace(sheet, view=replace(TOKENS, empty=member.lacks))
    if rollout.further:
        rows = facts.rows_of(replace(detail, members=(member,)), texts)
        hint = f"one sequence: rlbuffer inspect {member.rollout_id}.1{run.flags}"
        return replace(sheet, view=MEMBERS, items=rows, hints=[hint])
    end = min(most, rollout.length)
    spoken = [
        f"  {turn.role or 'text':<9} {printable(turn.text)}" for turn in texts.prompt(rollout) + texts.answer(rollout)
    ]
    shared = [f"  {shared_words(member)}"] if member.shared is not None else []
    return replace(
        sheet,
        lines=[*sheet.lines, *shared, *spoken],
        items=[(str(at), *cells) for at, cells in enumerate(facts.token_cells(member, texts, 0, end))],
        hints=[f"the first {end} of {plural(rollout.length, 'token')}: --json has them all"] * (end < rollout.length),
    )


def _pair(run: ShownRun, detail: GroupDetail, one: RolloutView, target: Target, most: int) -> Sheet:
    """Two rollouts of a group: where they part, and the tokens from there on."""
    group_id, texts = detail.view.group_id, run.texts
    is_here = any(member.rollout_id == target.other for member in detail.members)
    # Else looked up by itself: what this group's id begins with may be the whole id of another.
    if "/" in target.other and not is_here and (others := run.group(target.other).view.group_id) != group_id:
        raise click.UsageError(
            f"only rollouts of one group are compared; {target.name} is of group {group_id!r}, {target.other} of "
            f"{others!r}"
        )
    other = facts.member_of(detail, target.other)
    both, parts = (one, other), facts.first_difference(one, other)
    return Sheet(
        target=Target("pair", one.rollout_id, group_id, other.rollout_id),
        view=facts.pair_view(one.rollout_id, other.rollout_id),
        items=list(facts.pair_rows(one, other, texts, most)),
        lines=[
            *facts.shared_lines(facts.shared_values(detail, texts), facts.LINE_OF_TEXT),
            *facts.pair_lines(one, other),
        ],
        record=lambda: {
            "schema": "rlbuffer.pair/1",
            "rollouts": [member.rollout_id for member in both],
            "rewards": [member.reward for member in both],
            "part_at_token": parts,
        },
        found=detail,
    )


def _step(run: ShownRun, target: Target) -> Sheet:
    """What it holds, why it was closed, its rows by rank, and its scored rollouts."""
    step, cost = run.step(int(target.name)), run.cost()
    return Sheet(
        target=Target("step", str(step.header.step)),
        view=WORST,
        items=worst_rows(step),
        lines=facts.step_lines(step, trained=run.trained()),
        above=lambda width: list(facts.rank_lines(step, width, cost)),
        record=lambda: {
            **step_record(step.header),
            "row_tokens": step.row_tokens,
            "ranks": facts.rank_figures(step, cost),
        },
        found=step,
    )
