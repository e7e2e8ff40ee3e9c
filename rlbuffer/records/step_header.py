"""The header of a committed step: what it holds in all, for every rank and for everybody who looks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlbuffer.records.info import RolloutInfo
from rlbuffer.records.states import ClosedBy
from rlbuffer.records.step_plan import AdapterProgress


@dataclass(frozen=True, slots=True, kw_only=True)
class StepHeader:
    """`<s>-0` of the steps stream."""

    step: int
    epoch: int
    digest: str
    previous_digest: str
    world_size: int
    normalizers: Mapping[str, int]
    rollouts: int
    tokens: int
    group_ids: tuple[str, ...]
    closed_by: ClosedBy
    fill: float
    """Tokens over capacity, 0-1."""
    envs: Mapping[str, Mapping[str, Any]]
    """env -> rollouts, tokens, groups, reward (mean or None), age (mean), max_age."""
    reward: float | None
    """Mean over rollouts."""
    age: float
    """Mean over rollouts."""
    max_age: int
    committed_ms: int
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

    def masks(self, info: RolloutInfo) -> bool:
        """True when this rollout of the step is there, and not trained."""
        return self.masks_truncated and info.is_truncated
