"""One group as a row: what every list, page and line of JSON shows of it, wherever it lies.

:func:`numbers_of` makes the numbers of its rollouts from rows, one of each sequence; :func:`group_view` adds where it
stands::

    pool      rows of its pushes     forming, ready     its age and its wait are counted up to now
    step      rows of its sequences  packed, trained    up to the commit
    history   numbers_of_record      dropped            up to the drop

A further number of a group is a field of :class:`GroupNumbers`, and a line of :func:`numbers_of`. No rows are left of
what was dropped: its record in the history has what :class:`~rlbuffer.store.history.Dropped` has, and
:func:`with_rollouts` more while payloads are kept.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from statistics import fmean
from typing import Any

import numpy as np

from rlbuffer.records.info import FURTHER, HAS_REWARD, ROW_DTYPE, GroupInfo, RolloutInfo, row_of_info, rows_of
from rlbuffer.records.states import State
from rlbuffer.records.step_header import StepHeader
from rlbuffer.records.step_plan import version_trained
from rlbuffer.state.text import counted
from rlbuffer.store.records import PartRollout, PoolEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupNumbers:
    """What is known of a group's rollouts."""

    group_id: str
    env: str
    rollouts: int
    tokens: int
    min_version: int
    max_version: int
    prompt_id: str = ""
    planned_size: int = 0
    """0 when no longer known."""
    reward: float | None = None
    """Mean over the scored rollouts."""
    rewards: tuple[float, ...] = ()
    """Every scored rollout's, in the order of the rollouts."""
    created: float | None = None
    """Unix seconds of its first push."""
    worker: str = ""
    adapter: str = ""
    """LoRA adapter that it trains; "" is all weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView(GroupNumbers):
    """One group as a table row."""

    state: State
    reason: str = ""
    """Reason of its drop, a :class:`~rlbuffer.records.states.Reason` as the history has it; "" otherwise."""
    age: int | None = None
    """Policy versions, at the step that consumed it or was open when it was dropped, or now while it is pending."""
    waited_seconds: float | None = None
    """Seconds from the first push until now, or until it was packed or dropped."""
    step: int | None = None
    """The step that consumed it; of what was unused the one in which the trainer was given it."""
    detail: str = ""
    """The rule that dropped it, with value and limit."""
    uses: int = 0
    """Steps that trained it, up to this one."""


_NUMBERS = tuple(part.name for part in fields(GroupNumbers))
_ABOUT = ("prompt_id", "planned_size", "worker", "adapter")
"""Those that a push says by the same names, and so does a step of each of its sequences."""


def group_view(
    numbers: GroupNumbers, *, state: State, version: int | None, until: float | None, **standing: Any
) -> GroupView:
    """The row of a group.

    Args:
        version: the policy version from which its age is counted; None: not known.
        until: Unix seconds at which its wait ended, or now; None: not known.
        standing: the other fields of :class:`GroupView` that say where it stands.
    """
    waited = None if until is None or numbers.created is None else max(0.0, round(until - numbers.created, 3))
    return GroupView(
        **{name: getattr(numbers, name) for name in _NUMBERS},
        state=state,
        age=None if version is None else max(0, version - numbers.min_version),
        waited_seconds=waited,
        **standing,
    )


def numbers_of(rows: bytes, **about: Any) -> GroupNumbers:
    """What is known of the rollouts of a group.

    Args:
        rows: a :data:`~rlbuffer.records.info.ROW` for each sequence, rollout by rollout; none where nobody knows.
        about: fields that no row tells, and those that stand in the place of what the rows do.
    """
    table = np.frombuffer(rows, ROW_DTYPE)
    flags = table["flags"].tolist()  # of a group's few rows lists are faster than arrays
    rewards = tuple([reward for reward, flag in zip(table["reward"].tolist(), flags, strict=True) if flag & HAS_REWARD])
    numbers = {
        "rollouts": sum([not flag & FURTHER for flag in flags]),
        "tokens": sum(table["length"].tolist()),
        "min_version": min(table["min_version"].tolist(), default=0),
        "max_version": max(table["max_version"].tolist(), default=0),
        "reward": fmean(rewards) if rewards else None,
        "rewards": rewards,
    }
    return GroupNumbers(**numbers | about)


def rows_of_rollouts(rollouts: Iterable[RolloutInfo]) -> bytes:
    """The rows of some rollouts."""
    return b"".join([row for rollout in rollouts for row in rows_of(rollout)])


# -- in the pool -------------------------------------------------------------------------------------------------------
def pending_view(pushes: Sequence[PoolEntry], *, versions: Mapping[str, int], now: float) -> GroupView:
    """A group that is forming or ready, of its pushes in their order; `versions`: adapter -> its newest one."""
    numbers = _numbers_of_pushes(pushes)
    infos = [push.info for push in pushes if push.info is not None]
    failed = {r.rollout_id: r.failure for info in infos if info.totals.failed for r in info.rollouts if r.failure}
    needs = sorted({need for info in infos for need in info.needs})
    is_complete = len(numbers.rewards) + len(failed) >= numbers.planned_size > 0 and not needs
    lacking = [f"needs {', '.join(needs)}"] if needs else []
    lacking += [f"failed: {counted(Counter(failed.values()))}"] if failed else []
    return group_view(
        numbers,
        state=State.READY if is_complete else State.FORMING,
        version=versions.get(numbers.adapter, 0),
        until=now,
        detail="; ".join([*(push.error for push in pushes if push.error), *lacking]),
    )


def _numbers_of_pushes(pushes: Sequence[PoolEntry]) -> GroupNumbers:
    """Of a rollout that came twice the last push counts, but for its tokens; of a push that cannot be read what the
    ledger counted."""
    first, infos = pushes[0], [push.info for push in pushes if push.info is not None]
    unread = {"rollouts": sum(push.rollouts for push in pushes)}
    about = {name: getattr(infos[0], name) for name in _ABOUT} if infos else unread
    return numbers_of(
        _rows_of_pushes(infos),
        group_id=first.group_id,
        env=first.env,
        tokens=sum(push.tokens for push in pushes),
        created=first.pushed_ms / 1000,
        **about,
    )


def _rows_of_pushes(infos: Sequence[GroupInfo]) -> bytes:
    if len(infos) == 1 and infos[0].totals.is_distinct:  # nearly every one: nothing of it is unpacked
        return infos[0].rows
    return rows_of_rollouts({rollout.rollout_id: rollout for info in infos for rollout in info.rollouts}.values())


# -- in a step ---------------------------------------------------------------------------------------------------------
def consumed_view(sequences: Iterable[PartRollout], header: StepHeader, *, trained: int) -> GroupView:
    """A group that a step consumed, of its sequences there; `trained`: the last step that was trained."""
    numbers = _numbers_in_step(sequences)
    return group_view(
        numbers,
        state=State.TRAINED if header.step <= trained else State.PACKED,
        version=version_trained(header.adapters, numbers.adapter, header.step),
        until=header.committed_ms / 1000,
        step=header.step,
        uses=header.uses.get(numbers.group_id, 0) + 1,
    )


def _numbers_in_step(sequences: Iterable[PartRollout]) -> GroupNumbers:
    """At least one sequence, in any order: a step holds them in that of its rows."""
    refs = sorted(sequences, key=lambda ref: (ref.pushed_ms, ref.payload_key, ref.index))
    first = refs[0]
    return numbers_of(
        b"".join([row_of_info(ref.info, is_further=ref.sequence > 0) for ref in refs]),
        group_id=first.group_id,
        env=first.env,
        created=first.pushed_ms / 1000,
        **{name: getattr(first, name) for name in _ABOUT},
    )


# -- dropped -----------------------------------------------------------------------------------------------------------
def dropped_view(
    record: Mapping[str, Any], committed: int | None = None, rollouts: Sequence[RolloutInfo] = ()
) -> GroupView:
    """A dropped group.

    Args:
        record: of its drop, as the history has it.
        committed: the last step then; None where that is not known.
        rollouts: those that are still kept.
    """
    # Of metadata that cannot be read no version is known, and the versions of an adapter are not those of the steps.
    has_version = record.get("prompt_id") is not None and not record.get("adapter")
    view = group_view(
        numbers_of_record(record),
        state=State.DROPPED,
        version=committed if has_version else None,
        until=float(record["at"]) if "at" in record else None,
        reason=str(record.get("reason") or ""),
        step=step if isinstance(step := record.get("step"), int) else None,
        detail=str(record.get("detail", "")),
    )
    return with_rollouts(view, rollouts)


def with_rollouts(view: GroupView, rollouts: Sequence[RolloutInfo]) -> GroupView:
    """The row of a dropped group with what its rollouts say that are still kept, which is more than its record has."""
    if not rollouts:
        return view
    kept = numbers_of(rows_of_rollouts(rollouts), group_id=view.group_id, env=view.env)
    values = {name: getattr(kept, name) for name in _NUMBERS if getattr(view, name) is None}
    values |= {"rewards": kept.rewards, "max_version": kept.max_version}
    if kept.reward is not None:
        values["reward"] = kept.reward
    return replace(view, **values)


def numbers_of_record(record: Mapping[str, Any]) -> GroupNumbers:
    """Anybody may have written it: a field of another type counts as one that is not there."""
    pushed_ms, oldest = record.get("pushed_ms"), _whole(record.get("min_version"))
    return GroupNumbers(
        group_id=str(record.get("group_id") or ""),
        env=str(record.get("env") or ""),
        rollouts=_whole(record.get("rollouts")),
        tokens=_whole(record.get("tokens")),
        min_version=oldest,
        max_version=oldest,
        prompt_id=str(record.get("prompt_id") or ""),
        planned_size=_whole(record.get("planned_size")),
        reward=_finite(record.get("reward")),
        created=pushed_ms / 1000 if isinstance(pushed_ms, int) else None,
        worker=str(record.get("worker") or ""),
        adapter=str(record.get("adapter") or ""),
    )


def _finite(value: Any) -> float | None:
    """A number, which Lua writes as text."""
    try:
        number = float(str(value))
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _whole(value: Any) -> int:
    return int(_finite(value) or 0)
