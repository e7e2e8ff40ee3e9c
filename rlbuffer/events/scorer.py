"""The events of a scorer."""

from __future__ import annotations

from dataclasses import dataclass

from rlbuffer.events.event import Event, MetricsServed, MetricsUnavailable, RunChanged, Trouble


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerReady(Event):
    """The scorer looks for groups."""

    event = "ready"
    gives: tuple[str, ...]
    """The columns and rewards that it adds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupScored(Event):
    """A group has what it needed of this scorer."""

    event = "scored"
    group_id: str
    env: str
    rollouts: int
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredLate(Event):
    """Another scorer was faster, or the group was dropped meanwhile: nothing has changed."""

    event = "late"
    group_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerStopped(Event):
    """The scorer has ended; counts since its start."""

    event = "stopped"
    groups: int
    rollouts: int
    late: int
    failed_groups: int


ScorerEvent = (
    ScorerReady | GroupScored | ScoredLate | Trouble | RunChanged | MetricsServed | MetricsUnavailable | ScorerStopped
)
