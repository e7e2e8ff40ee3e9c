"""The events of a trainer's rank 0. That of a trained step is its record."""

from __future__ import annotations

from dataclasses import dataclass

from rlbuffer.events.event import Event, MetricsServed, MetricsUnavailable
from rlbuffer.state.step_record import StepRecord


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
    | StepRecord
    | TrainerWarning
    | WaitingNoticed
    | CheckpointWritten
    | TrainingEnded
    | MetricsServed
    | MetricsUnavailable
)
