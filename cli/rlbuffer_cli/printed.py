"""What the browser shows, printed or as JSON lines."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.text import Text

from rlbuffer.client.views import StepView
from rlbuffer.state.text import printable
from rlbuffer_cli import facts, look
from rlbuffer_cli.options import echo, say, show_json
from rlbuffer_cli.table import Printed, Target, View, of_tuples
from rlbuffer_cli.tables import (
    GROUP_ORDER,
    GROUPS,
    MEMBERS,
    VIEWS,
    detail_record,
    member_rows,
    rollout_record,
    shared_words,
    step_record,
)
from rlbuffer_cli.text import columns_of

if TYPE_CHECKING:
    from rlbuffer.client.texts import Texts
    from rlbuffer.client.views import GroupDetail, RolloutView
    from rlbuffer.records.rollout import Rollout
    from rlbuffer_cli.whole_run import WholeRun

EVERYTHING, LISTED_GROUPS = 2**31, 30
"""Rows that are printed unless `--limit` says otherwise."""
PRINTED_TOKENS = 200
TOKENS = of_tuples(
    "tokens",
    ("token", "id", "text", "mask", "logprob", "advantage"),
    {"token", "id", "logprob", "advantage"},
)


def show(
    run: WholeRun, target: Target, found: GroupDetail | StepView | None, limit: int | None, *, is_json: bool
) -> int:
    """Prints a target, at most `limit` rows of a table. -> exit code.

    Args:
        found: the group, or the step, of the target as it was read; None of a table.
    """
    if found is None:
        view = VIEWS[target.name]
        most = limit or (LISTED_GROUPS if view is GROUPS else EVERYTHING)
        return show_listed(view, run, target.where, most, is_json=is_json)
    if isinstance(found, StepView):
        show_step(run, found, is_json=is_json)
        return 0
    texts = run.buffer.texts
    if target.kind == "group":
        show_group(found, texts, is_json=is_json)
        return 0
    member = facts.member_of(found, target.name)
    if target.kind == "rollout":
        show_rollout(found, member, texts, is_json=is_json)
    else:
        show_pair(found, member, facts.member_of(found, target.other), texts, is_json=is_json)
    return 0


# -- tables ------------------------------------------------------------------------------------------------------------
def show_listed(view: View, run: WholeRun, where: str, limit: int, *, is_json: bool) -> int:
    """Prints the table of a view. -> exit code."""
    run.problems = []
    items = view.read(run, where, limit)
    if is_json:
        for item in items:
            show_json(view.record(item))
    else:
        if above := view.above(run, items, columns_of(sys.stdout)):
            look.show(*above, "")
        look.show(Printed(view, items) if items else look.plain(view.nothing(where)))
        for item in items:
            if lines := view.more(item):
                say("\n".join([view.key(item), *(f"  {line}" for line in lines)]), indent="    ")
        if view is GROUPS and items:
            if len(items) == limit:
                say(f"the first {limit} ({GROUP_ORDER}): --limit shows more, --where chooses", err=True)
            say(f"one group: rlbuffer inspect {view.key(items[0])}", err=True)
    for problem in run.problems:
        say(f"Error: {problem}", err=True)
    return 1 if run.problems else 0


# -- one thing ---------------------------------------------------------------------------------------------------------
def show_group(detail: GroupDetail, texts: Texts, *, is_json: bool) -> None:
    """Prints a group: what it is, then one row per rollout."""
    if is_json:
        show_json(detail_record(detail))
        return
    prompt = facts.shared_prompt(detail, texts)
    for line in facts.headline(detail.view):
        say(line, indent="  ")
    for line in facts.shared_lines(detail, prompt, 2 * facts.MAX_TEXT):
        echo(line)
    if detail.members:
        look.show("", Printed(MEMBERS, member_rows(detail, lambda m: facts.answer(m, texts, bool(prompt)))))
        echo(f"\none rollout: rlbuffer inspect {detail.members[0].rollout_id}")


def show_rollout(detail: GroupDetail, member: RolloutView, texts: Texts, *, is_json: bool) -> None:
    """Prints a rollout: verdict, life, then one row for each of its first tokens, or for each of its sequences."""
    if is_json:
        show_json(rollout_record(member, detail.view))
        return
    for line in facts.headline(detail.view):
        say(line, indent="  ")
    echo(f"rollout {member.rollout_id}   {' · '.join(facts.verdict(member))}")
    say("  " + " -> ".join(facts.life(detail.view, member)), indent="    ")
    rollout: Rollout | None = member.rollout
    if rollout is None:
        echo("  its payload is no longer kept")
        return
    if rollout.further:
        its = member_rows(replace(detail, members=(member,)), lambda m: facts.answer(m, texts, False))
        look.show("", Printed(MEMBERS, its))
        echo(f"\none sequence: rlbuffer inspect {member.rollout_id}.1")
        return
    if member.shared is not None:
        echo(f"  {shared_words(member)}")
    text = texts.whole(rollout)
    if text is not None:
        echo(f"  text {printable(text)}")
    end = min(PRINTED_TOKENS, rollout.length)
    rows = [[str(at), *cells] for at, cells in enumerate(facts.token_cells(member, texts, 0, end))]
    look.show("", Printed(TOKENS, rows))
    if end < rollout.length:
        echo(f"the first {end} tokens of {rollout.length:,}: --json has them all")


def show_pair(detail: GroupDetail, one: RolloutView, other: RolloutView, texts: Texts, *, is_json: bool) -> None:
    """Prints where two rollouts part; as JSON ``rlbuffer.pair/1``: None where they are the same, or a payload is
    gone."""
    if is_json:
        is_there = one.rollout is not None and other.rollout is not None
        record = {"rollouts": [one.rollout_id, other.rollout_id], "rewards": [one.reward, other.reward]}
        parts = facts.first_difference(one, other) if is_there else None
        show_json({"schema": "rlbuffer.pair/1", **record, "part_at_token": parts})
        return
    for line in facts.pair_lines(detail, one, other, texts):
        say(line, indent="    ")
    rows = list(facts.pair_rows(one, other, texts, PRINTED_TOKENS))
    if rows:
        look.show("", Printed(facts.pair_view(one.rollout_id, other.rollout_id), rows))


def show_step(run: WholeRun, step: StepView, *, is_json: bool) -> None:
    """Prints a step: what it holds, why it was closed, and its rows by rank."""
    cost = facts.cost_of(run.buffer)
    if is_json:
        ranks = facts.rank_figures(step, cost)
        show_json({**step_record(step.header), "row_tokens": step.row_tokens, "ranks": ranks})
        return
    for line in facts.step_lines(step, trained=run.buffer.store.trainer().trained):
        say(line, indent="    ")
    look.show(Text(), *facts.rank_lines(step, columns_of(sys.stdout), cost))
