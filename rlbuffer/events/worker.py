"""The events of a worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rlbuffer.events.event import IF_ANY, SPREAD, Event, MetricsServed, MetricsUnavailable, RunChanged, Trouble
from rlbuffer.records.waiting import Waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerChecked(Event):
    """The sampler's logprobs are those of the published weights."""

    event = "checked"
    version: int
    """Policy version that was compared."""
    difference: float
    """Largest difference, in nats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionLoaded(Event):
    """The sampler serves another policy version."""

    event = "version"
    version: int
    seconds: float
    """That loading took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPushed(Event):
    """A group is on the server."""

    event = "group"
    group_id: str
    version: int
    """Policy version that served when it was pushed."""
    rollouts: int
    tokens: int
    reward: float
    """Mean over those of its rollouts that have one; 0 when none has."""
    seconds: float
    """Seconds from its prompt to its push."""
    lowest: float | None = field(default=None, metadata=IF_ANY)
    """Smallest reward of its rollouts."""
    highest: float | None = field(default=None, metadata=IF_ANY)
    """Largest reward of its rollouts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupGivenUp(Event):
    """A group could not be made."""

    event = "trouble"
    error: str
    """The sentence, with file and line where they are known."""
    kind: str
    """Name of the exception."""
    traceback: str
    """Traceback of the first failure of its kind; "" for the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerWaits(Event):
    """The worker has waited for some seconds."""

    event = "waiting"
    waiting: Waiting = field(metadata=SPREAD)


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionEvaluated(Event):
    """A policy version was measured on an env that nothing is trained on."""

    event = "evaluation"
    env: str
    """Name of the evaluation."""
    version: int
    result: Mapping[str, float] = field(metadata=SPREAD)
    """Figures of :func:`rlbuffer.worker.evaluation.summary`, and `seconds`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvFinished(Event):
    """Every ticket of the env was given."""

    event = "done"
    env: str
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStopped(Event):
    """The worker has ended; counts since its start."""

    event = "stopped"
    groups: int
    rollouts: int
    failed_groups: int


WorkerEvent = (
    SamplerChecked
    | VersionLoaded
    | GroupPushed
    | GroupGivenUp
    | WorkerWaits
    | VersionEvaluated
    | EnvFinished
    | Trouble
    | RunChanged
    | WorkerStopped
    | MetricsServed
    | MetricsUnavailable
)
