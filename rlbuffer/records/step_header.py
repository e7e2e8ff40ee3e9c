"""The header of a committed step: what it holds in all, for every rank and for everybody who looks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlbuffer.records.info import RolloutInfo
from rlbuffer.records.states import ClosedBy
from rlbuffer.records.step_plan import AdapterProgress


@dataclass(frozen=True, slots=True, kw_only=True)
class StepHeader:
    """A committed step: what it holds in all, over all ranks and envs. Entry ``<s>-0`` of the stream of steps."""

    step: int
    """Number of the step, from 1."""
    epoch: int
    """Epoch of the run in which it was committed."""
    digest: str
    """SHA-256 of the step, chained on `previous_digest`."""
    previous_digest: str
    """Digest of the step before; empty before the first."""
    world_size: int
    """Ranks that it was planned for."""
    normalizers: Mapping[str, int]
    """Counts over all ranks: loss_tokens, rollouts, groups."""
    rollouts: int
    """Rollouts of all ranks."""
    sequences: int
    """Their sequences."""
    tokens: int
    """Tokens of all rollouts."""
    group_ids: tuple[str, ...]
    """Groups in the order of the plan."""
    closed_by: ClosedBy
    """Rule that ended its selection."""
    fill: float
    """Tokens over capacity, 0-1; 0 of a stream's, which has none."""
    envs: Mapping[str, Mapping[str, Any]]
    """env -> rollouts, tokens, groups, reward (mean or None), age (mean), max_age."""
    reward: float | None
    """Mean over rollouts."""
    age: float
    """Mean over rollouts."""
    max_age: int
    """Largest age of a rollout in it."""
    committed_ms: int
    """Server time of the commit, in milliseconds."""
    columns: Mapping[str, tuple[str, tuple[int, ...]]]
    """Further column -> dtype and trailing shape: the same in all micro-batches of all ranks."""
    waiting_for_version: int | None = None
    """The trainer publishes after this step, also where `trainer.publish.every` would not, unless this version or a
    newer one is published by then."""
    checkpoint_now: bool = False
    """The trainer writes a checkpoint when it has trained this step."""
    uses: Mapping[str, int] = field(default_factory=dict)
    """group id -> steps that trained it before this one, of the groups that were."""
    max_uses: int = 1
    """The rule that held at the commit."""
    revision: int = 0
    """Revision of the config that made the step."""
    bytes: int = 0
    """Size of its rollouts' payloads."""
    adapters: Mapping[str, AdapterProgress] = field(default_factory=dict)
    """Adapter ("" is all weights) -> how far it is with this step, of all that were trained so far."""
    masks_truncated: bool = False
    """No token of a truncated rollout is trained, whatever its payload says."""
    left_out: Mapping[str, Sequence[tuple[int, str]]] = field(default_factory=dict)
    """Payload key without the run's prefix -> (payload field, reason) of what that push holds that its group's step
    leaves out."""

    @property
    def capacity_share(self) -> float | None:
        """`fill` where rows close a step; None where it closed at a number of groups or rollouts, with rows that nobody
        waits for, and of a stream's step."""
        return None if self.closed_by in (ClosedBy.GROUPS, ClosedBy.ROLLOUTS) or not self.fill else self.fill

    def masks(self, info: RolloutInfo) -> bool:
        """True when this rollout of the step is there, and not trained."""
        return self.masks_truncated and info.is_truncated
