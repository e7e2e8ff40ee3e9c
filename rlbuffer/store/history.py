"""The records of a run's history, a stream on the server: what was committed, dropped, taken back or lost.

They are written as mappings in msgpack, and read as such: another version, or anybody, may have written them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar

from rlbuffer.records.states import ClosedBy, Reason
from rlbuffer.records.step_plan import Drop
from rlbuffer.store.records import Decided, PoolEntry

NAMED_PUSHES = 64
"""Pushes of a dropped group that its record names one by one."""
DETAIL_CHARACTERS = 4000
"""Of why a group was dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryRecord:
    """Something that happened to a run."""

    event: ClassVar[str]

    def as_object(self) -> dict[str, Any]:
        """The record with its name, as the stream holds it; without fields that need not be there and are not."""
        values = ((part, getattr(self, part.name)) for part in fields(self))
        values_given = {part.name: value for part, value in values if value is not None or part.default is MISSING}
        return {"event": self.event, **values_given}


@dataclass(frozen=True, slots=True, kw_only=True)
class DecidedRecord(HistoryRecord):
    """What a leader has decided, with what it knew (:class:`~rlbuffer.store.records.Decided`). The fields of what
    operators or older versions did are None."""

    read: str | None = None
    """The last pool entry that the leader had read when it decided: what came later was not in its mind."""
    decided: float | None = None
    """As of when it decided, Unix seconds: it had read all that had come by then. By the server's clock at the leader's
    takeover, and what has passed since."""
    since: float | None = None
    """The leader's takeover, by the same clock: no time before it counts against an env."""
    began: float | None = None
    """When the leader had read everything, by the same clock: at its takeover, or later where settings had changed."""
    published: Mapping[str, int] | None = None
    """Adapter ("" is all weights) -> the policy version that was announced then; -1: none. Of a drop its adapter's
    alone."""
    is_held: bool | None = None
    """It could make no step then, and let go only what was too old."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed(DecidedRecord):
    """A step was committed."""

    event = "step"
    groups: int
    closed_by: ClosedBy
    step: int
    rollouts: int
    tokens: int
    reward: float | None
    age: float
    max_age: int
    fill: float
    envs: Mapping[str, Mapping[str, Any]]
    """Env -> its figures, as in the step's header."""
    flat: int | None = None
    """Groups of it that teach nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped(DecidedRecord):
    """A group was dropped."""

    event = "drop"
    group_id: str
    env: str
    reason: Reason
    rollouts: int
    tokens: int
    detail: str
    min_version: int
    reward: float | None
    prompt_id: str | None = None
    """Prompt id of its push; None where its metadata cannot be read."""
    worker: str | None = None
    """Name of the writer that pushed it."""
    pushed_ms: int | None = None
    """Server time of its first push."""
    adapter: str | None = None
    """Adapter that would have trained it; None for all weights."""
    planned_size: int | None = None
    """Rollouts that it should have had."""
    entry_id: str | None = None
    """Its first push in the pool."""
    seconds: float | None = None
    """From its ticket to that push."""
    pushes: Mapping[str, Sequence[Any]] | None = None
    """Suffix of the payload key -> worker, server time, pool entry, seconds since the ticket, and what scorers had
    still to add, of each push. Archives of before 2026-11-30 lack the last, and have it only of groups of several."""
    step: int | None = None
    """Of what was unused: the step in which it lies."""
    digest: str | None = None
    """That of `step`."""
    rollout_ids: Sequence[str] | None = None
    """Of what was unused: which rollouts of the group."""

    @classmethod
    def of(cls, drop: Drop, pushes: Sequence[PoolEntry], decided: Decided | None = None) -> Dropped:
        """The record of the drop of these pushes, at least one: once they are gone nobody knows more of them."""
        first = pushes[0]
        info = first.info
        if decided is not None:  # of many adapters a record of each drop would be long
            adapters = {"", "" if info is None else info.adapter} & decided.published.keys()
            decided = decided._replace(published={adapter: decided.published[adapter] for adapter in sorted(adapters)})
        return cls(
            group_id=drop.group_id,
            env=drop.env,
            reason=drop.reason,
            rollouts=drop.rollouts,
            tokens=drop.tokens,
            detail=drop.detail[:DETAIL_CHARACTERS],
            min_version=drop.min_version,
            reward=drop.reward,
            prompt_id=info.prompt_id if info is not None else None,
            worker=info.worker if info is not None else None,
            pushed_ms=first.pushed_ms,
            adapter=(info.adapter or None) if info is not None else None,
            planned_size=info.planned_size if info is not None else None,
            entry_id=first.entry_id,
            seconds=info.seconds if info is not None else None,
            pushes={_suffix(push): _named(push) for push in pushes} if len(pushes) <= NAMED_PUSHES else None,
            **({} if decided is None else decided._asdict()),
        )


def _suffix(push: PoolEntry) -> str:
    return push.payload_key.rpartition(":")[2]


def _named(push: PoolEntry) -> list[Any]:
    """A push as the record of its drop names it."""
    info = push.info
    if info is None:
        return ["", push.pushed_ms, push.entry_id, None, []]
    return [info.worker, push.pushed_ms, push.entry_id, info.seconds, [*info.needs]]


VOID_FIELDS = ("group_id", "env", "rollouts", "tokens", "reward", "min_version", "detail")
"""Values of each group in :class:`StepsVoided` and :class:`RunRewound`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered(HistoryRecord):
    """The run went on after steps that the server had lost."""

    event = "recovery"
    step: int
    forgotten: int
    void: int
    groups: int
    entries: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsVoided(HistoryRecord):
    """Steps after `step` were taken back; what was pending stayed."""

    event = "void"
    step: int
    groups: Sequence[Sequence[Any]]
    """Id, env, rollouts, tokens, reward, oldest version and why, of each that left; the first few thousand."""
    unlisted: int
    """The rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRewound(HistoryRecord):
    """The run was taken back to `step`, with all that was pending."""

    event = "rewind"
    step: int
    groups: Sequence[Sequence[Any]]
    """Groups, as those of :class:`StepsVoided`."""
    unlisted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerStarted(HistoryRecord):
    """An attempt of the trainer began."""

    event = "attempt"
    step: int
    """The last step that its state contains."""
    world_size: int
    settings: Mapping[str, Any]
    """What it trains with, as its program says it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetiredEarly(HistoryRecord):
    """Steps up to `step` retired before a checkpoint held them."""

    event = "retired early"
    step: int
    used: int
    """Bytes of the server's memory."""
    limit: int
    """Bytes."""
