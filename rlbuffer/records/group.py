"""A group of rollouts, the ticket it is sampled for, and the receipt of its push."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from rlbuffer.errors import InvalidRollout
from rlbuffer.records.checks import (
    as_mapping,
    plain,
    shown,
)
from rlbuffer.records.info import (
    GroupInfo,
    RolloutInfo,
    group_fields,
)
from rlbuffer.records.rollout import (
    Rollout,
    field_values,
    rebuilt,
    with_id,
)
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
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The user's own; msgpack types only; part of the payload."""
    needs: tuple[str, ...] = ()
    """Names of the columns or rewards that must still be added before the group is ready."""
    worker: str = ""
    """Name of the worker that pushed it."""
    created: float | None = None
    """Unix seconds at the worker."""

    def __post_init__(self) -> None:
        put = object.__setattr__
        for name, value in group_fields(self).items():
            put(self, name, value)
        rollouts = tuple(self.rollouts)
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
        metadata = plain("metadata", as_mapping("metadata", self.metadata))
        put(self, "metadata", MappingProxyType(metadata))

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuilt, (type(self), field_values(self))

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
            columns=tuple(sorted({(n, a.dtype.str, a.shape[1:]) for r in self.rollouts for n, a in r.columns.items()})),
            rollouts=tuple(
                RolloutInfo(
                    rollout_id=r.rollout_id,
                    length=r.length,
                    prompt_tokens=r.prompt_tokens,
                    loss_tokens=r.loss_tokens,
                    reward=r.reward,
                    rewards=dict(r.rewards),
                    min_version=r.min_policy_version,
                    max_version=r.max_policy_version,
                    turns=len(r.turns),
                    is_truncated=r.is_truncated,
                )
                for r in self.rollouts
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """Leave to sample one group now: number ``n`` of an env is its n-th prompt."""

    env: str
    """The env whose prompt it is."""
    number: int
    """Number of the ticket, from 0; the group samples prompt ``number`` of the env's order."""
    group_id: str
    """``<env>.<number>``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushed:
    """The outcome of a push."""

    entry_id: str
    """Id of its entry in the pool."""
    status: PushStatus
    """Outcome of the push; ``duplicate`` without an entry where the group that it was to replace is gone."""
