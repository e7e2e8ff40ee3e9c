"""The events of a trainer's rank 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlbuffer.events.event import IF_ANY, Event, MetricsServed, MetricsUnavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStarted(Event):
    """Training is about to begin, or to go on."""

    event = "start"
    step: int
    """The one of the checkpoint that it goes on from; 0: none."""
    steps: int
    """Planned."""
    world_size: int
    device: str
    attention: str
    parameters: int
    output: str
    """Folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrained(Event):
    """A step was trained, published and acknowledged: a line of ``metrics.jsonl``.

    Units: nats, seconds, bytes, policy versions (ages), fractions from 0 to 1.
    """

    event = "step"
    step: int
    epoch: int
    digest: str
    time: float
    """Since 1970."""
    reward: float | None
    """Mean over the rollouts that have one."""
    rewards: Mapping[str, float | None]
    """env -> the same of its own."""
    loss: float
    """Mean over the updates."""
    entropy: float
    kl: float
    ratio: Mapping[str, Any]
    clip_fraction: float
    reward_parts: Mapping[str, Mapping[str, float]]
    """env -> name -> mean."""
    reward_std: Mapping[str, float]
    """env -> standard deviation of its rewards, with n - 1; envs with two rollouts or more."""
    on_policy: float
    """Share of the rollouts of age 0."""
    on_policy_by_env: Mapping[str, float]
    response_tokens: Mapping[str, float]
    """env -> mean tokens behind the prompt."""
    fill: float
    """Tokens over the step's capacity."""
    padding: float
    """Share of what went through the model that was padding."""
    closed_by: str
    """Rule that ended the step's selection."""
    truncated: float
    truncated_by_env: Mapping[str, float]
    memory_bytes: int
    """Most of any rank."""
    ranks: Sequence[Mapping[str, float]]
    """Each rank's tokens and seconds."""
    grad_norm: float
    learning_rate: float
    age: float
    max_age: int
    ages: Mapping[str, float]
    tokens: int
    tokens_by_env: Mapping[str, int]
    tokens_per_second: float
    loss_tokens: int
    damaged_tokens: int
    rollouts: int
    groups: int
    world_size: int
    wait: float
    """Share of the step's time that went into waiting for data."""
    seconds: Mapping[str, float]
    """Part of the step -> its seconds, and ``total``."""
    mfu: float | None = field(default=None, metadata=IF_ANY)
    """Share of the hardware's peak, where that is known."""
    buffer: Mapping[str, Any] | None = field(default=None, metadata=IF_ANY)
    """The leader's figures of the pool after the step that it calls `step`: those of the registry with ``buffer/``.
    None before it has said any."""
    slow_side: str = ""
    """The sentence, when the trainer waits too long for data."""
    resumed_from: int = 0
    """Step of the checkpoint that this attempt began with."""
    parameters_sha256: Sequence[str] | None = field(default=None, metadata=IF_ANY)
    """Digest of every rank, where the settings ask for it."""
    batch_sha256: Sequence[str] | None = field(default=None, metadata=IF_ANY)
    """Digest of every rank, where the settings ask for it."""
    examples: Sequence[Mapping[str, Any]] | None = field(default=None, metadata=IF_ANY)
    """Rollouts to look at, every few steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerWarning(Event):
    """Something that a person should know, and that stops nothing."""

    event = "warning"
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingNoticed(Event):
    """The trainer has waited for data for a large part of its time."""

    event = "notice"
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointWritten(Event):
    """A checkpoint is on the disk."""

    event = "checkpoint"
    step: int
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingEnded(Event):
    """Training is over."""

    event = "end"
    step: int
    finished: bool
    """The planned steps are made, or all that the run had to train is trained."""
    reason: str
    """The sentence, when the run has ended; else ""."""


TrainerEvent = (
    TrainingStarted
    | StepTrained
    | TrainerWarning
    | WaitingNoticed
    | CheckpointWritten
    | TrainingEnded
    | MetricsServed
    | MetricsUnavailable
)
