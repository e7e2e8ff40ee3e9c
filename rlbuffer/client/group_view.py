"""One group as a row: what every list, page and line of JSON shows of it, wherever it lies.

Pool, steps, history and archive each tell the numbers of its rollouts; :func:`group_view` adds where it stands::

    pool      numbers_of_pushes    forming, ready     its age and its wait are counted up to now
    step      numbers_in_step      packed, trained    up to the commit
    history   numbers_of_record    dropped            up to the drop

A further number of a group is a field of :class:`GroupNumbers`, and its value in those three. A record of the history
has what :class:`~rlbuffer.store.history.Dropped` has; :func:`with_rollouts` knows more while payloads are kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from statistics import fmean
from typing import Any

from rlbuffer.records.info import RolloutInfo, totals_of
from rlbuffer.records.states import State
from rlbuffer.records.step_header import StepHeader
from rlbuffer.records.step_plan import version_trained
from rlbuffer.state.text import counted
from rlbuffer.store.records import PartRollout, PoolEntry
from rlbuffer.wire.metadata import scored_rewards


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


def mean(rewards: Sequence[float]) -> float | None:
    """Their mean; None of none."""
    return fmean(rewards) if rewards else None


# -- in the pool -------------------------------------------------------------------------------------------------------
def pending_view(pushes: Sequence[PoolEntry], *, versions: Mapping[str, int], now: float) -> GroupView:
    """A group that is forming or ready, of its pushes in their order; `versions`: adapter -> its newest one."""
    numbers = numbers_of_pushes(pushes)
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


def numbers_of_pushes(pushes: Sequence[PoolEntry]) -> GroupNumbers:
    """Of a rollout that came twice the last push counts, but for its tokens."""
    first, infos = pushes[0], [push.info for push in pushes if push.info is not None]
    if len(infos) == 1 and infos[0].totals.is_distinct:  # nearly every one: nothing of it is unpacked
        totals, rewards = infos[0].totals, scored_rewards(infos[0])
    else:
        rollouts = [*{rollout.rollout_id: rollout for info in infos for rollout in info.rollouts}.values()]
        totals, rewards = totals_of(rollouts), _rewards_of(rollouts)
    return GroupNumbers(
        group_id=first.group_id,
        env=first.env,
        rollouts=totals.rollouts or sum(push.rollouts for push in pushes),
        tokens=sum(push.tokens for push in pushes),
        min_version=totals.oldest,
        max_version=totals.newest,
        prompt_id=infos[0].prompt_id if infos else "",
        planned_size=infos[0].planned_size if infos else 0,
        reward=mean(rewards),
        rewards=rewards,
        created=first.pushed_ms / 1000,
        worker=infos[0].worker if infos else "",
        adapter=infos[0].adapter if infos else "",
    )


# -- in a step ---------------------------------------------------------------------------------------------------------
def consumed_view(sequences: Iterable[PartRollout], header: StepHeader, *, trained: int) -> GroupView:
    """A group that a step consumed, of its sequences there; `trained`: the last step that was trained."""
    numbers = numbers_in_step(sequences)
    return group_view(
        numbers,
        state=State.TRAINED if header.step <= trained else State.PACKED,
        version=version_trained(header.adapters, numbers.adapter, header.step),
        until=header.committed_ms / 1000,
        step=header.step,
        uses=header.uses.get(numbers.group_id, 0) + 1,
    )


def numbers_in_step(sequences: Iterable[PartRollout]) -> GroupNumbers:
    """At least one sequence, in any order: a step holds them in that of its rows."""
    refs = sorted(sequences, key=lambda ref: (ref.pushed_ms, ref.payload_key, ref.index))
    first, rewards = refs[0], _rewards_of([ref.info for ref in refs])
    return GroupNumbers(
        group_id=first.group_id,
        env=first.env,
        rollouts=sum(ref.sequence == 0 for ref in refs),
        tokens=sum(ref.info.length for ref in refs),
        min_version=min(ref.info.min_version for ref in refs),
        max_version=max(ref.info.max_version for ref in refs),
        prompt_id=first.prompt_id,
        planned_size=first.planned_size,
        reward=mean(rewards),
        rewards=rewards,
        created=first.pushed_ms / 1000,
        worker=first.worker,
        adapter=first.adapter,
    )


def _rewards_of(rollouts: Iterable[RolloutInfo]) -> tuple[float, ...]:
    return tuple(rollout.reward for rollout in rollouts if rollout.reward is not None)


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
        reason=str(record["reason"]),
        step=step if isinstance(step := record.get("step"), int) else None,
        detail=str(record.get("detail", "")),
    )
    return with_rollouts(view, rollouts)


def with_rollouts(view: GroupView, rollouts: Sequence[RolloutInfo]) -> GroupView:
    """The row of a dropped group with what its rollouts say that are still kept, which is more than its record has."""
    if not rollouts:
        return view
    rewards = _rewards_of(rollouts)
    return replace(
        view,
        reward=fmean(rewards) if rewards else view.reward,
        rewards=rewards,
        max_version=max(rollout.max_version for rollout in rollouts),
    )


def numbers_of_record(record: Mapping[str, Any]) -> GroupNumbers:
    """Anybody may have written it: a field of another type counts as one that is not there."""
    reward, pushed_ms, oldest = record.get("reward"), record.get("pushed_ms"), int(record.get("min_version", 0))
    return GroupNumbers(
        group_id=str(record["group_id"]),
        env=str(record["env"]),
        rollouts=int(record["rollouts"]),
        tokens=int(record["tokens"]),
        min_version=oldest,
        max_version=oldest,
        prompt_id=str(record.get("prompt_id") or ""),
        planned_size=int(record.get("planned_size") or 0),
        reward=None if reward in (None, "") else float(str(reward)),
        created=pushed_ms / 1000 if isinstance(pushed_ms, int) else None,
        worker=str(record.get("worker") or ""),
        adapter=str(record.get("adapter") or ""),
    )
