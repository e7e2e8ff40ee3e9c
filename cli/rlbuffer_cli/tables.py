"""The tables of what a run trains on: groups, a group's rollouts, steps, a step's rollouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from typing import Any, NamedTuple

from rich.console import RenderableType
from rich.text import Text

from rlbuffer.client.agent_calls import calls_in
from rlbuffer.client.details import GroupDetail
from rlbuffer.client.group_view import GroupView
from rlbuffer.client.rollout_view import RolloutView
from rlbuffer.client.step_view import StepView
from rlbuffer.records.info import folded
from rlbuffer.records.rollout import Rollout
from rlbuffer.records.states import State
from rlbuffer.records.step_header import StepHeader
from rlbuffer.state.text import amount, duration, percent, plural, printable
from rlbuffer.store.records import PartRollout, by_rollout
from rlbuffer_cli import look
from rlbuffer_cli.drift import DRIFT
from rlbuffer_cli.open_rollouts import OPEN, open_record, standing
from rlbuffer_cli.plots import small_charts, trends
from rlbuffer_cli.run_tables import ENVS, PROBLEMS, PROCESSES
from rlbuffer_cli.table import Column, Target, View, bar, figure
from rlbuffer_cli.text import MINUS, WIDE, as_json, cut, time_of, utc

GROUP_ORDER = "first those in the pool, then those in steps, then dropped ones, the newest of each first"
NOT_KEPT = "-"
"""Stands for what a dropped group had and its record has not."""
SHOWN_CALLS = 8
"""Calls of a sequence that are named."""
SHOWN_ANSWER, SHOWN_NAME = 160, 20
"""Columns of an answer, and of a sequence's name, in a row."""


# -- groups ------------------------------------------------------------------------------------------------------------
class GroupRow(NamedTuple):
    """A group, and the axis of all rewards in its table."""

    view: GroupView
    low: float
    high: float
    question: str = ""
    """The prompt's id, and what it asks where that is known."""

    @property
    def state(self) -> Text:
        """With its step, or why it was dropped."""
        view = self.view
        uses = f" (use {view.uses})" if view.uses > 1 else ""
        return look.state(view.state, view.reason or (f"in {view.step}{uses}" if view.step else ""))

    @property
    def size(self) -> str:
        """Rollouts of those that are planned."""
        return f"{self.view.rollouts}" + (f"/{self.view.planned_size}" if self.view.planned_size else "")

    @property
    def unkept(self) -> str:
        """What stands for a number that is not known."""
        return NOT_KEPT if self.view.state == State.DROPPED else ""


def group_rows(
    views: Sequence[GroupView], question: Callable[[GroupView], str] = lambda view: view.prompt_id
) -> list[GroupRow]:
    """Rows with one axis: from 0 to 1, or as far as rewards go."""
    rewards = [reward for view in views for reward in view.rewards]
    low, high = min(0.0, *rewards, 0.0), max(1.0, *rewards, 1.0)
    return [GroupRow(view, low, high, question(view)) for view in views]


def group_record(view: GroupView) -> dict[str, Any]:
    """``rlbuffer.group/1``: numbers raw, ids whole, UTC times."""
    return {"schema": "rlbuffer.group/1", **asdict(view), "created": utc(view.created)}


def detail_record(detail: GroupDetail) -> dict[str, Any]:
    """``rlbuffer.group/1`` with answer, metadata and every rollout whole."""
    members = [rollout_record(member, detail.view) for member in detail.members]
    return group_record(detail.view) | {
        "answer": as_json(detail.answer),
        "metadata": as_json(detail.metadata),
        "members": members,
    }


_FIELDS = (
    *("rollout_id", "reward", "rewards", "advantage", "length", "loss_tokens", "prompt_tokens", "is_truncated"),
    *("finish_reason", "left_out", "logprob_mean", "step", "text", "name", "sequence"),
)
"""Of a rollout's view, which its record has by the same names."""


def rollout_record(member: RolloutView, view: GroupView) -> dict[str, Any]:
    """``rlbuffer.rollout/1``; the payload's fields are there while the payload is, of several sequences in `sequences`,
    a record each."""
    shared, place = member.shared, member.place
    record: dict[str, Any] = {
        "schema": "rlbuffer.rollout/1",
        "group_id": view.group_id,
        "env": view.env,
        "state": view.state,
        **{name: getattr(member, name) for name in _FIELDS},
        "min_policy_version": member.min_version,
        "max_policy_version": member.max_version,
        "failure": member.failure._asdict() if member.failure else None,
        "rank": place.rank if place else None,
        "row": place.row if place else None,
        "shared_with": shared.rollout_id if shared else None,
        "shared_tokens": shared.tokens if shared else 0,
        "shared_trained": shared.trained if shared else 0,
        "sequences": [rollout_record(sequence, view) for sequence in member.sequences()],
    }
    if member.underway is not None:
        record["open"] = open_record(member.underway.rollout)
    rollout: Rollout | None = member.rollout
    if rollout is not None:
        record |= {"successes": dict(rollout.successes), "metadata": as_json(rollout.metadata)}
    if rollout is not None and not rollout.further:
        record |= {
            "tokens": rollout.tokens.tolist(),
            "loss_mask": rollout.loss_mask.tolist(),
            "logprobs": rollout.logprobs.tolist(),
            "version_spans": [list(span) for span in rollout.version_spans],
            "turns": [as_json(tuple(turn)) for turn in rollout.turns],
            "calls": [call._asdict() for call in calls_in(rollout)],
            "columns": {name: values.tolist() for name, values in rollout.columns.items()},
            "attachments": {name: values.tolist() for name, values in rollout.attachments.items()},
        }
    return record


def _head_of_groups(run: Any, items: Sequence[GroupRow], width: int) -> Sequence[RenderableType]:
    return list(run.head(width))


def _legend_of_groups(rows: Sequence[GroupRow]) -> str:
    unkept = "   -: not kept of a dropped group" if any(r.view.state == State.DROPPED for r in rows) else ""
    return f"spread: rewards from {rows[0].low:g} to {rows[0].high:g}, the cell of their mean in colour{unkept}"


GROUPS = View(
    name="groups",
    answers="Who waits for whom? Which env has what, and how old is it? Which groups are there?",
    read=lambda run, where, most: group_rows(run.groups(where, most), run.question),
    key=lambda row: row.view.group_id,
    record=lambda row: group_record(row.view),
    opens=lambda row: Target("group", row.view.group_id),
    above=_head_of_groups,
    filter_help="env:math age>=2 reward<0.1",
    empty="no groups yet",
    legend=_legend_of_groups,
    columns=(
        Column("group", lambda row: row.view.group_id),
        Column("state", lambda row: row.state, lambda row: (row.view.state, row.view.reason)),
        figure("reward", lambda row: row.view.reward, unknown=lambda row: row.unkept),
        Column("spread", lambda row: look.strip(row.view.rewards, row.low, row.high) or row.unkept),
        figure("age", lambda row: row.view.age, "d", unknown=lambda row: row.unkept),
        figure("tokens", lambda row: row.view.tokens, amount),
        figure("waited", lambda row: row.view.waited_seconds, duration, unknown=lambda row: row.unkept),
        Column("rollouts", lambda row: row.size, lambda row: row.view.rollouts, True, WIDE),
        Column("env", lambda row: row.view.env, at=WIDE),
        Column("worker", lambda row: row.view.worker, at=WIDE),
        Column("prompt", lambda row: cut(printable(row.question), SHOWN_ANSWER), at=WIDE),
    ),
)


# -- a group's rollouts ------------------------------------------------------------------------------------------------
def shared_words(member: RolloutView) -> str:
    """What the sequence shares with an earlier one of its rollout; "" for nothing."""
    shared = member.shared
    if shared is None:
        return ""
    words = f"{plural(shared.tokens, 'token')} shared with {shared.rollout_id.rpartition('/')[2]}"
    return f"{words}, {shared.trained:,} trained before" if shared.trained else words


def calls_words(member: RolloutView) -> str:
    """The calls of an agent that made the sequence; "" of one that came elsewhere."""
    numbers = [call.number for call in calls_in(member.rollout)] if member.rollout is not None else []
    if len(numbers) > SHOWN_CALLS:
        return f"{len(numbers):,} calls, {numbers[0]} to {numbers[-1]}"
    return f"call{'s' * (len(numbers) > 1)} {' → '.join(map(str, numbers))}" if numbers else ""


def version_range(member: RolloutView) -> str:
    """The first and the last policy version that sampled it."""
    return "-".join(f"v{version}" for version in sorted({member.min_version, member.max_version}))


def age_of(group: GroupView, member: RolloutView) -> int | None:
    """The rollout's age: the group's is that of its oldest."""
    return None if group.age is None else group.age + group.min_version - member.min_version


class MemberRow(NamedTuple):
    """A rollout of a group, or a sequence of it, and the scales of its table."""

    group: GroupView
    member: RolloutView
    most_reward: float
    """Of a whole bar: 1, or more where one of the group has more, so that bars of two groups can be compared."""
    most_advantage: float
    answer: str = ""
    """Of a sequence behind what it shares with an earlier one."""
    is_match: bool = False
    """The filter's terms about rollouts hold."""
    under: MemberRow | None = None
    """The row of its rollout, where it is a sequence."""
    is_last: bool = False
    """Of the sequences."""

    @property
    def title(self) -> Text:
        """The rollout's id, or the number of its sequence."""
        name = printable(self.member.rollout_id)
        if self.member.sequence is None:
            return Text.assemble(("* " * self.is_match, "accent"), name)
        return Text.assemble(("└─ " if self.is_last else "├─ ", "line"), name.rpartition("/")[2])

    @property
    def text(self) -> Text:
        """The sequence's name, what it shares with an earlier one, and what was answered."""
        name = cut(printable(self.member.name), SHOWN_NAME)
        return Text.assemble(name, " · " if name and self.answer else "", (self.answer, "label"))

    @property
    def reward(self) -> float | None:
        """None of a sequence: it is the rollout's."""
        return self.member.reward if self.member.sequence is None else None

    @property
    def advantage(self) -> float | None:
        """None of a sequence: it is the rollout's."""
        return self.member.advantage if self.member.sequence is None else None

    @property
    def age(self) -> int | None:
        return age_of(self.group, self.member)

    @property
    def stop(self) -> Text:
        """Why it ended."""
        member = self.member
        if member.sequence is not None:
            return Text()
        if member.failure:
            return Text(f"failed: {printable(member.failure.kind)}", "dropped")
        if member.underway is not None:
            return standing(member.underway.rollout)
        if member.rollout is None:
            return Text("payload gone", "faint")
        if not member.is_truncated:
            return Text(printable(member.finish_reason))
        more = "" if member.finish_reason == "length" else " (truncated)"
        return Text(f"✂ {printable(member.finish_reason)}{more}", "dropped")


def member_rows(
    detail: GroupDetail,
    answer: Callable[[RolloutView], str] = lambda member: "",
    matches: Callable[[RolloutView], bool] = lambda member: False,
) -> list[MemberRow]:
    """The rollouts of a group from the best to the worst, each followed by its sequences where it has several."""
    rewards = [abs(m.reward) for m in detail.members if m.reward is not None]
    advantages = [abs(m.advantage) for m in detail.members if m.advantage is not None]
    most = max([1.0, *rewards]), max([1.0, *advantages])
    rows = []
    for member in sorted(detail.members, key=_from_best):
        sequences = member.sequences()
        words = member.failure.message if member.failure else "" if sequences else answer(member)
        top = MemberRow(detail.view, member, *most, cut(printable(words), SHOWN_ANSWER), matches(member))
        rows.append(top)
        for one in sequences:
            parts = (calls_words(one), shared_words(one), answer(one))
            words = cut(printable(" · ".join(filter(None, parts))), SHOWN_ANSWER)
            rows.append(MemberRow(detail.view, one, *most, words, under=top, is_last=one is sequences[-1]))
    return rows


def _from_best(member: RolloutView) -> tuple[bool, float]:
    """Those of one reward stay in their order; what has none comes last."""
    return member.reward is None, -(member.reward or 0.0)


MEMBERS = View(
    name="rollouts",
    key=lambda row: row.member.rollout_id,
    opens=lambda row: Target("rollout", row.member.rollout_id, group=row.group.group_id),
    whole=lambda row: row.under or row,
    empty="its rollouts are no longer kept",
    legend=lambda rows: (
        f"bar: reward, full at {rows[0].most_reward:.4g}   bar: advantage, full at ±{rows[0].most_advantage:.3g}"
    ),
    columns=(
        Column("rollout", lambda row: row.title, lambda row: row.member.rollout_id),
        figure("reward", lambda row: row.reward),
        bar("0 to full", lambda row: row.reward, lambda row: look.meter(row.reward / row.most_reward), 1),
        figure("advantage", lambda row: row.advantage, "+.3f"),
        bar(
            f"{MINUS}   0   +",
            lambda row: row.advantage,
            lambda row: look.signed(row.advantage, row.most_advantage),
            WIDE,
        ),
        figure("tokens", lambda row: row.member.length, ","),
        Column("stop", lambda row: row.stop),
        figure("trained", lambda row: row.member.loss_tokens, ",", 2),
        figure("age", lambda row: row.age, "d", WIDE),
        Column("version", lambda row: version_range(row.member), lambda row: row.member.min_version, at=WIDE),
        figure("logprob", lambda row: row.member.logprob_mean, ".2f", WIDE),
        Column("text", lambda row: row.text),
    ),
)


# -- steps -------------------------------------------------------------------------------------------------------------
class StepRow(NamedTuple):
    """A committed step."""

    header: StepHeader
    is_trained: bool

    @property
    def state(self) -> State:
        return State.TRAINED if self.is_trained else State.PACKED


def _read_steps(run: Any, where: str, most: int) -> Sequence[StepRow]:
    trained = run.trained()
    return [StepRow(header, header.step <= trained) for header in reversed(run.headers())][:most]


def _trends(run: Any, items: Sequence[StepRow], width: int) -> Sequence[RenderableType]:
    headers = sorted((row.header for row in items), key=lambda header: header.step)
    curves = trends(run.measured(), headers)
    return [Text(line, "accent", no_wrap=True) for line in small_charts(curves, width=width)]


def step_record(header: StepHeader) -> dict[str, Any]:
    """``rlbuffer.step/1``: the fields of a header, by name."""
    return {"schema": "rlbuffer.step/1", **{field.name: getattr(header, field.name) for field in fields(header)}}


STEPS = View(
    name="steps",
    press="t",
    answers="What did a step train on, on which rank, and why was it closed?",
    read=_read_steps,
    key=lambda row: str(row.header.step),
    record=lambda row: step_record(row.header),
    opens=lambda row: Target("step", str(row.header.step)),
    above=_trends,
    fields={
        "step": lambda row: row.header.step,
        "state": lambda row: row.state,
        "age": lambda row: row.header.age,
        "reward": lambda row: row.header.reward,
        "tokens": lambda row: row.header.tokens,
    },
    filter_help="step>=40 reward<0.1",
    empty="no committed step can still be read",
    columns=(
        figure("step", lambda row: row.header.step, "d"),
        Column("state", lambda row: look.state(row.state)),
        figure("groups", lambda row: len(row.header.group_ids), "d", 1),
        figure("rollouts", lambda row: row.header.rollouts, ","),
        figure("tokens", lambda row: row.header.tokens, amount),
        figure("fill", lambda row: row.header.capacity_share, percent),
        bar("of capacity", lambda row: row.header.capacity_share, lambda row: look.meter(row.header.capacity_share), 2),
        figure("reward", lambda row: row.header.reward),
        Column("age", lambda row: f"{row.header.age:.1f} max {row.header.max_age}", lambda row: row.header.age, True),
        Column("closed by", lambda row: str(row.header.closed_by), at=WIDE),
        Column(
            "committed (UTC)",
            lambda row: time_of(row.header.committed_ms / 1000),
            lambda row: row.header.committed_ms,
            at=WIDE,
        ),
    ),
)


# -- a step's rollouts -------------------------------------------------------------------------------------------------
class WorstRow(NamedTuple):
    """A rollout of a step."""

    member: PartRollout
    """Its first sequence, with the numbers of all."""
    rank: int


def worst_rows(step: StepView) -> list[WorstRow]:
    """The scored rollouts of the step by their reward, then by their advantage."""
    ranks = {(member.payload_key, member.index): rank for rank, member in step.rollouts}
    rollouts = [
        WorstRow(
            replace(sequences[0], info=folded([one.info for one in sequences])),
            ranks[sequences[0].payload_key, sequences[0].index],
        )
        for sequences in by_rollout(member for _, member in step.rollouts)
    ]
    scored = [row for row in rollouts if row.member.info.reward is not None]
    return sorted(
        scored, key=lambda r: (r.member.info.reward or 0.0, r.member.advantage, r.member.group_id, r.member.index)
    )


WORST = View(
    name="rollouts of the step",
    key=lambda row: row.member.info.rollout_id,
    opens=lambda row: Target("rollout", row.member.info.rollout_id, group=row.member.group_id),
    empty="no rollout of it is scored",
    columns=(
        Column("rollout", lambda row: row.member.info.rollout_id),
        figure("reward", lambda row: row.member.info.reward),
        figure("advantage", lambda row: row.member.advantage, "+.3f"),
        figure("tokens", lambda row: row.member.info.length, ","),
        figure("rank", lambda row: row.rank, "d"),
        Column("env", lambda row: row.member.env),
        Column("worker", lambda row: row.member.worker, at=WIDE),
        Column("prompt", lambda row: row.member.prompt_id, at=WIDE),
    ),
)
VIEWS = {view.name: view for view in (GROUPS, STEPS, PROCESSES, ENVS, PROBLEMS, OPEN, DRIFT)}
"""Those that can be listed, by name."""
