"""The numbers of a group are the same wherever it lies: in its pushes, in a step, and in what is kept of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from rlbuffer.client.group_view import GroupView, consumed_view, dropped_view, pending_view
from rlbuffer.records.group import Group
from rlbuffer.records.states import ClosedBy, State
from rlbuffer.records.step_header import StepHeader
from rlbuffer.store.records import PartRollout, PoolEntry
from rlbuffer.testing import make_group
from rlbuffer.wire.encoding import encode_push

RECORD = {"group_id": "g", "env": "math", "reason": "stale", "rollouts": 3, "tokens": 29, "min_version": 4}
"""Of a drop."""
MADE = make_group(env="math", rewards=[0.0, 1.0, 0.5], lengths=[8, 12, 9], group_id="g", version=4)


def entry(group: Group, entry_id: str = "5000-0") -> PoolEntry:
    info = encode_push(group).info
    return PoolEntry(
        entry_id=entry_id,
        info=info,
        payload_key=f"key:{entry_id}",
        env=info.env,
        group_id=info.group_id,
        rollouts=len(info.rollouts),
        tokens=info.tokens,
    )


def in_step(entries: Sequence[PoolEntry]) -> list[PartRollout]:
    """The rollouts of these pushes as a step names them, in another order."""
    return [
        PartRollout(
            payload_key=entry.payload_key,
            index=index,
            info=info,
            group_id=entry.group_id,
            env=entry.env,
            adapter="",
            advantage=0.0,
            prompt_id=entry.info.prompt_id,
            planned_size=entry.info.planned_size,
            pushed_ms=entry.pushed_ms,
        )
        for entry in reversed(entries)
        if entry.info is not None
        for index, info in reversed([*enumerate(entry.info.rollouts)])
    ]


def numbers(view: GroupView) -> dict[str, object]:
    names = ("rollouts", "planned_size", "tokens", "min_version", "max_version", "reward", "rewards", "created")
    return {name: getattr(view, name) for name in names}


EXPECTED = {
    "rollouts": 3,
    "planned_size": 3,
    "tokens": 29,
    "min_version": 4,
    "max_version": 4,
    "reward": 0.5,
    "rewards": (0.0, 1.0, 0.5),
    "created": 5.0,
}
HEADER = StepHeader(
    step=6,
    epoch=1,
    digest="",
    previous_digest="",
    world_size=1,
    normalizers={},
    rollouts=3,
    sequences=3,
    tokens=29,
    bytes=0,
    group_ids=("g",),
    closed_by=ClosedBy.GROUPS,
    fill=1.0,
    envs={},
    reward=0.5,
    age=0.0,
    max_age=0,
    waiting_for_version=None,
    checkpoint_now=False,
    uses={},
    max_uses=1,
    revision=1,
    columns={},
    committed_ms=7000,
)


def parts(sizes: Sequence[int]) -> list[PoolEntry]:
    """The group in pushes of so many rollouts."""
    rollouts, entries = list(MADE.rollouts), []
    for number, size in enumerate(sizes):
        some, rollouts = rollouts[:size], rollouts[size:]
        entries.append(entry(replace(MADE, rollouts=tuple(some)), f"500{number}-0" if number else "5000-0"))
    return entries


@pytest.mark.parametrize("sizes", [[3], [1, 2]])
def test_pool_and_step_tell_the_same_of_a_group(sizes: list[int]) -> None:
    entries = parts(sizes)
    pending = pending_view(entries, versions={"": 5}, now=6.0)
    assert numbers(pending) == EXPECTED
    assert (pending.state, pending.age, pending.waited_seconds) == (State.READY, 1, 1.0)
    consumed = consumed_view(in_step(entries), HEADER, trained=5)
    assert numbers(consumed) == EXPECTED
    assert (consumed.state, consumed.age, consumed.waited_seconds) == (State.PACKED, 1, 2.0)


def test_a_rollout_that_came_twice_counts_once_but_for_its_tokens() -> None:
    entries = [*parts([3]), entry(replace(MADE, rollouts=MADE.rollouts[1:2]), "5003-0")]
    view = pending_view(entries, versions={}, now=6.0)
    assert numbers(view) == EXPECTED | {"tokens": 29 + 12}


def test_of_a_push_that_cannot_be_read_only_the_ledgers_counts_are_known() -> None:
    unread = PoolEntry(
        entry_id="5000-0", info=None, payload_key="k", env="math", group_id="g", rollouts=3, tokens=29, error="damaged"
    )
    view = pending_view([unread], versions={}, now=6.0)
    assert (view.rollouts, view.tokens, view.reward, view.rewards, view.planned_size) == (3, 29, None, (), 0)
    assert (view.state, view.detail) == (State.FORMING, "damaged")


def test_what_is_kept_of_a_dropped_group_tells_more_than_its_record() -> None:
    alone = dropped_view(RECORD)
    assert (alone.rollouts, alone.tokens, alone.reward, alone.rewards) == (3, 29, None, ())
    some = replace(MADE, rollouts=MADE.rollouts[:2])
    kept = dropped_view(RECORD, rollouts=encode_push(some).info.rollouts)
    assert (kept.rollouts, kept.tokens, kept.reward, kept.rewards) == (3, 29, 0.5, (0.0, 1.0))


@pytest.mark.parametrize("value", ["q", None, -1.5, float("nan"), 2**64 - 1, b"\xff", [1], {"a": 1}], ids=repr)
@pytest.mark.parametrize("field", [*RECORD, "reward", "pushed_ms", "planned_size", "worker", "adapter", "step"])
def test_a_field_of_a_drops_record_that_is_something_else_ends_nothing(field: str, value: object) -> None:
    view = dropped_view(RECORD | {field: value})
    others = {name: getattr(view, name) for name in RECORD if name != field}
    assert others == {name: RECORD[name] for name in others}
