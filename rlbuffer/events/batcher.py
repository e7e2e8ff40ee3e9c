"""The events of a batcher (``rlbuffer serve``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlbuffer.events.event import SPREAD, Event, MetricsServed, MetricsUnavailable
from rlbuffer.records.states import SettingsState
from rlbuffer.records.step_header import StepHeader
from rlbuffer.records.step_plan import Drop
from rlbuffer.records.waiting import Problem, Waiting


# -- leading -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class TakenOver(Event):
    """State that a leader has read at its takeover."""

    run: str
    step: int
    """Last committed."""
    epoch: int
    pending: int
    """Groups."""
    server: Mapping[str, Any]
    """The server's own facts: name, version, address, memory."""
    forecast: Mapping[str, int]
    """``step_bytes``, ``steps``, ``limit``, ``measured``, ``kept_steps``; empty where the server's memory has no
    limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderReady(TakenOver):
    """This process leads the run, for the first time or after another one did."""

    event = "ready"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadAgain(TakenOver):
    """The leader has forgotten everything and read it again, without a pause."""

    event = "read again"


@dataclass(frozen=True, slots=True, kw_only=True)
class StandingBy(Event):
    """Another batcher leads this run."""

    event = "leader"
    state: str = field(default="standby", init=False)
    owner: str
    """The one that leads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeadLost(Event):
    """The lease or the server is lost; tried again."""

    event = "leader"
    state: str = field(default="lost", init=False)
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunBeginsAgain(Event):
    """The run that this batcher was at work for is not on the server any more, and begins at step 0."""

    event = "begins again"
    run: str
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecovered(Event):
    """The server had lost steps that the trainer has trained: the run goes on after them."""

    event = "recovery"
    epoch: int
    """The new one."""
    step: int
    """The last step that the trainer has trained."""
    forgotten: int
    """Steps that the server had lost."""
    void: int
    """Steps that stood there with other content."""
    groups: int
    """Groups that will not be trained again."""
    entries: int
    """Pool entries of theirs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnded(Event):
    """Nothing more comes, and what came is trained."""

    event = "ended"
    step: int
    sentence: str
    drops: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """reason -> (rollouts, tokens) that were dropped since the last step."""


# -- steps -------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class StepWaits(Event):
    """The step waits, for another reason than before."""

    event = "waiting"
    waiting: Waiting = field(metadata=SPREAD)


@dataclass(frozen=True, slots=True, kw_only=True)
class CureNeeded(Event):
    """Something that somebody must cure: an env that fails, say."""

    event = "trouble"
    problem: Problem = field(metadata=SPREAD)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDropped(Event):
    """A group, or rollouts of one, will not be trained."""

    event = "drop"
    drop: Drop = field(metadata=SPREAD)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCommitted(Event):
    """A step can be pulled."""

    event = "step"
    header: StepHeader = field(metadata=SPREAD)
    build_ms: float
    """Milliseconds from the first look at the pool to the commit."""
    drops: Mapping[str, Sequence[int]]
    """reason -> (rollouts, tokens) that were dropped since the last step."""
    flat: int = 0
    """Groups of it that teach nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadsDamaged(Event):
    """Ranks could not read some rollouts of a step."""

    event = "damaged"
    step: int
    rollouts: int
    sentence: str


# -- settings ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsAsked(Event):
    """The config file was read again."""

    event = "config"
    state: SettingsState
    """``asked`` or ``same``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsTaken(Event):
    """The run has new settings."""

    event = "config"
    state: SettingsState = field(default=SettingsState.TAKEN, init=False)
    revision: int
    step: int
    """The first one that is made by them."""
    changes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsRefused(Event):
    """The old settings go on."""

    event = "config"
    state: SettingsState = field(default=SettingsState.REFUSED, init=False)
    reason: str


# -- envs --------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class EnvPaused(Event):
    """An operator has paused an env: steps go on without it."""

    event = "env"
    env: str
    state: str = field(default="paused", init=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvResumed(Event):
    """The env takes part again."""

    event = "env"
    env: str
    state: str = field(default="resumed", init=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvSilent(Event):
    """Steps need something of an env that has sent nothing for too long."""

    event = "env"
    env: str
    state: str = field(default="dead", init=False)
    seconds: float
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvBack(Event):
    """An env that was silent has sent something."""

    event = "env"
    env: str
    state: str = field(default="back", init=False)


# -- memory ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUnlimited(Event):
    """The server has no maxmemory."""

    event = "memory"
    state: str = field(default="unlimited", init=False)
    limit: int
    """Bytes that are taken for it: a share of the machine's memory."""
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTight(Event):
    """The steps that must be there at once do not fit the server's memory."""

    event = "memory"
    state: str = field(default="tight", init=False)
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointsNeeded(Event):
    """Steps up to the next checkpoint do not fit the server's memory: more checkpoints than the settings say will be
    asked for."""

    event = "memory"
    state: str = field(default="often", init=False)
    steps: int
    """That fit."""
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsRetiredEarly(Event):
    """Trained steps are gone before a checkpoint holds them, because memory is short."""

    event = "memory"
    state: str = field(default="retired early", init=False)
    first: int
    last: int
    used: int
    """Bytes."""
    limit: int
    """Bytes."""
    checkpoint: int
    """The trainer's newest."""
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointAsked(Event):
    """The header of a step asks the trainer for a checkpoint, because memory is short."""

    event = "memory"
    state: str = field(default="checkpoint", init=False)
    step: int
    sentence: str


# -- archive -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveStuck(Event):
    """The archive cannot be written."""

    event = "archive"
    state: str = field(default="stuck", init=False)
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveWritten(Event):
    """The archive is written again after it could not be."""

    event = "archive"
    state: str = field(default="written", init=False)
    step: int
    """Everything up to it is archived."""
    steps: int
    """Written now."""
    records: int
    """Records of the history, written now."""


ArchiveEvent = ArchiveStuck | ArchiveWritten
MemoryEvent = MemoryUnlimited | MemoryTight | CheckpointsNeeded | StepsRetiredEarly | CheckpointAsked
EnvEvent = EnvPaused | EnvResumed | EnvSilent | EnvBack
SettingsEvent = SettingsAsked | SettingsTaken | SettingsRefused
BatcherEvent = (
    LeaderReady
    | ReadAgain
    | StandingBy
    | LeadLost
    | RunBeginsAgain
    | RunRecovered
    | RunEnded
    | StepWaits
    | CureNeeded
    | GroupDropped
    | StepCommitted
    | PayloadsDamaged
    | SettingsEvent
    | EnvEvent
    | MemoryEvent
    | ArchiveEvent
    | MetricsServed
    | MetricsUnavailable
)
