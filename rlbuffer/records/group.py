"""A group of rollouts, the ticket it is sampled for, and the receipt of its push."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlbuffer.errors import InvalidRollout
from rlbuffer.records.checks import NOT_GIVEN, as_integer, as_items, as_number, as_text, plain, read_only, shown
from rlbuffer.records.info import ENV_NAME, GROUP_ID, ColumnKind, GroupInfo, RolloutInfo, records_of, row_of
from rlbuffer.records.rollout import Rollout, TokenSequence, field_values, rebuilt, with_id
from rlbuffer.records.states import PushStatus


@dataclass(frozen=True, slots=True)
class Group:
    """The rollouts of one prompt, or a part of them (parts share ``group_id`` and ``planned_size``).

    The order of the fields is public: a group can be made by position, too.

    Example:
        >>> rollouts = [
        ...     Rollout.from_completion(
        ...         prompt_ids=[1, 5], token_ids=[token, 2], logprobs=[-0.7, -0.2], reward=reward, policy_version=3
        ...     )
        ...     for token, reward in ((7, 0.0), (8, 1.0))
        ... ]
        >>> group = Group("math.0", env="math", prompt_id="3 + 5", rollouts=rollouts, planned_size=2, answer="8")
        >>> [rollout.rollout_id for rollout in group.rollouts]
        ['math.0/0', 'math.0/1']
    """

    group_id: str
    """`[A-Za-z0-9_.:-]{1,128}`, unique in the run."""
    env: str
    """`[A-Za-z0-9_.-]{1,64}`; named source of tasks."""
    prompt_id: str
    """Name of the prompt that the rollouts share."""
    rollouts: tuple[Rollout, ...]
    """At least one; ids are filled in as ``<group_id>/<index>`` where empty."""
    planned_size: int
    """Rollouts planned for the whole group."""
    adapter: str = ""
    """LoRA adapter that sampled them; "" is all weights."""
    answer: Any = None
    """Reference answer; msgpack types only; part of the payload."""
    metadata: Mapping[str, Any] = field(default_factory=lambda: NOT_GIVEN)
    """The user's own; msgpack types only; part of the payload."""
    needs: tuple[str, ...] = ()
    """Names of the columns or rewards that must still be added before the group is ready."""
    worker: str = ""
    """Name of the worker that pushed it."""
    created: float | None = None
    """Unix seconds at the worker."""
    seconds: float | None = None
    """Seconds from its ticket to its push, by the worker's monotonic clock; the writer fills it in."""

    def __post_init__(self) -> None:
        put = object.__setattr__
        for name, pattern in (("group_id", GROUP_ID), ("env", ENV_NAME)):
            value = getattr(self, name)
            if not isinstance(value, str) or not pattern.match(value):
                raise InvalidRollout(f"{name}: expected {pattern.pattern[:-2]}, got {shown(value)}")
            put(self, name, str.__str__(value))
        needs: object = self.needs
        if not isinstance(needs, list | tuple):
            raise InvalidRollout(f"needs: expected a list of names, got {shown(needs)}")
        put(self, "prompt_id", as_text("prompt_id", self.prompt_id, limit=256))
        put(self, "adapter", as_text("adapter", self.adapter, limit=128))
        put(self, "worker", as_text("worker", self.worker, limit=128))
        put(self, "planned_size", as_integer("planned_size", self.planned_size, low=1, high=2**31 - 1))
        put(self, "needs", tuple(as_text(f"needs[{i}]", n, limit=64) for i, n in enumerate(needs)))
        for name in ("created", "seconds"):
            value = getattr(self, name)
            put(self, name, None if value is None else as_number(name, value))
        rollouts = tuple(as_items("rollouts", self.rollouts))
        if not rollouts:
            raise InvalidRollout("rollouts: empty")
        for i, rollout in enumerate(rollouts):
            if not isinstance(rollout, Rollout):
                raise InvalidRollout(f"rollouts[{i}]: expected a Rollout, got {shown(rollout)}")
        if len(rollouts) > self.planned_size:
            raise InvalidRollout(f"rollouts: {len(rollouts)} are more than planned_size = {self.planned_size}")
        rollouts = tuple(with_id(r, f"{self.group_id}/{i}") for i, r in enumerate(rollouts))
        ids = [r.rollout_id for r in rollouts]
        if len(set(ids)) != len(ids):
            twice = next(i for i in ids if ids.count(i) > 1)
            raise InvalidRollout(f"rollouts: id {twice!r} occurs twice in group {self.group_id}")
        put(self, "rollouts", rollouts)
        put(self, "answer", plain("answer", self.answer))
        put(self, "metadata", read_only("metadata", self.metadata))

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuilt, (type(self), field_values(self))

    def sequences(self) -> list[TokenSequence]:
        """The sequences of all rollouts, in payload order."""
        return [sequence for rollout in self.rollouts for sequence in rollout.sequences]

    def columns(self) -> tuple[ColumnKind, ...]:
        """Every kind of further column that a rollout has, in order."""
        kinds = {(name, a.dtype.str, a.shape[1:]) for s in self.sequences() for name, a in s.columns.items()}
        return tuple(sorted(kinds))

    def info(self) -> GroupInfo:
        """The group as the batcher sees it: no payloads."""
        return GroupInfo(
            group_id=self.group_id,
            env=self.env,
            prompt_id=self.prompt_id,
            adapter=self.adapter,
            planned_size=self.planned_size,
            needs=self.needs,
            worker=self.worker,
            created=self.created,
            seconds=self.seconds,
            columns=self.columns(),
            rollouts=infos_of(self.rollouts),
        )


def infos_of(rollouts: Sequence[Rollout]) -> tuple[RolloutInfo, ...]:
    """Rollouts as the batcher sees them, before they are encoded."""
    return records_of(
        b"".join([row_of(rollout, sequence) for rollout in rollouts for sequence in rollout.sequences]),
        [rollout.rollout_id for rollout in rollouts],
        [dict(rollout.rewards) for rollout in rollouts],
        [rollout.failure.kind if rollout.failure else "" for rollout in rollouts],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """Leave to sample one group now: number ``n`` of an env is its n-th prompt.

    Raises:
        InvalidRollout: a field is of another kind.
    """

    env: str
    """The env whose prompt it is."""
    number: int
    """Number of the ticket, from 0; the group samples prompt ``number`` of the env's order."""
    group_id: str
    """``<env>.<number>``."""

    def __post_init__(self) -> None:
        for name, pattern in (("env", ENV_NAME), ("group_id", GROUP_ID)):
            value = getattr(self, name)
            if not isinstance(value, str) or not pattern.match(value):
                raise InvalidRollout(f"ticket: {name}: expected {pattern.pattern[:-2]}, got {shown(value)}")
        object.__setattr__(self, "number", as_integer("ticket: number", self.number))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushed:
    """The outcome of a push."""

    entry_id: str
    """Id of its entry in the pool."""
    status: PushStatus
    """Outcome of the push; ``duplicate`` without an entry where the group that it was to replace is gone."""
    stale_by: int = 0
    """Policy versions by which its oldest token is beyond the run's ``max_age`` at the next step, so that it will be
    dropped as stale; 0 when it is young enough, or where that is not known (of an adapter, or a stream)."""
