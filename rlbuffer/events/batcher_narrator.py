"""One line of plain text per event of `serve`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, assert_never

from rlbuffer.events.batcher import (
    ArchiveStuck,
    ArchiveWritten,
    BatcherEvent,
    CheckpointAsked,
    CheckpointsNeeded,
    CureNeeded,
    EnvBack,
    EnvPaused,
    EnvResumed,
    EnvSilent,
    GroupDropped,
    LeaderReady,
    LeadLost,
    MemoryTight,
    MemoryUnlimited,
    PayloadsDamaged,
    ReadAgain,
    RunBeginsAgain,
    RunEnded,
    RunRecovered,
    SettingsAsked,
    SettingsEvent,
    SettingsRefused,
    SettingsTaken,
    StandingBy,
    StepCommitted,
    StepsRetiredEarly,
    StepWaits,
)
from rlbuffer.events.event import MetricsServed, MetricsUnavailable
from rlbuffer.process.lasting import Lasting
from rlbuffer.records.states import SettingsState
from rlbuffer.records.waiting import Waiting
from rlbuffer.state.text import amount, percent, plural

WAITING_SECONDS = 5.0
"""Sentences about waiting come at most this often."""
QUIET_SECONDS = 1.0
"""Waiting shorter than this is normal and not worth a line."""


def shares(envs: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """env -> its fraction of the tokens."""
    total = sum(e["tokens"] for e in envs.values()) or 1
    return {name: e["tokens"] / total for name, e in sorted(envs.items())}


def drops_text(drops: Mapping[str, Any]) -> str:
    """``dropped 5: 3 stale 2 flat (31k tok)``; "" when nothing was dropped. `drops` is reason -> (rollouts, tokens)."""
    if not drops:
        return ""
    rollouts = sum(d[0] for d in drops.values())
    parts = " ".join(f"{d[0]} {reason}" for reason, d in sorted(drops.items(), key=lambda item: -item[1][0]))
    return f"dropped {rollouts}: {parts} ({amount(sum(d[1] for d in drops.values()))} tok)"


def step_line(event: StepCommitted) -> str:
    """A committed step."""
    header = event.header
    parts = [
        f"step {header.step}",
        f"{amount(header.tokens)} tok",
        f"fill {percent(header.fill)}",
        f"groups {len(header.group_ids)}",
        f"reward {header.reward:.2f}" if header.reward is not None else "",
        f"age {header.age:.1f} max {header.max_age}",
        " ".join(f"{env} {percent(share)}" for env, share in shares(header.envs).items()),
        drops_text(event.drops),
        _flat_text(event),
        f"{event.build_ms:.0f} ms",
    ]
    return "  ".join(part for part in parts if part)


def _flat_text(event: StepCommitted) -> str:
    """``2 of 8 groups teach nothing``; "" where all teach."""
    groups, header = len(event.header.group_ids), event.header
    if event.flat < groups or not groups:
        return f"{event.flat} of {groups} groups teach nothing" if event.flat else ""
    alone = header.rollouts == groups
    why = "each group is one rollout, with nothing to compare it with" if alone else "no rollout has an advantage"
    return f"! it teaches nothing: {why}"


class ServeNarrator:
    """Tells a daemon's events line by line; what is waited for only when it lasts, and again each minute.

    Args:
        say: takes a line.
        show: takes every reason at once, "" when there is none, for a place where it stands until the next one. `say`
            does not get it then.
    """

    def __init__(self, say: Callable[[str], None], show: Callable[[str], None] | None = None) -> None:
        self._say = say
        self._show = show
        self._lock = threading.Lock()
        self._pending: Waiting | None = None
        self._timer: threading.Timer | None = None
        self._last = -WAITING_SECONDS
        self._lasting = Lasting()

    def __call__(self, event: BatcherEvent) -> None:
        match event:
            case LeaderReady() | ReadAgain() | GroupDropped():
                pass  # who starts the batcher says that it is ready; drops stand in the next step's line
            case StepWaits():
                self._waiting(event.waiting)
            case CureNeeded():
                self._say(f"! {event.problem}")
            case (
                PayloadsDamaged()
                | EnvSilent()
                | MemoryUnlimited()
                | MemoryTight()
                | CheckpointsNeeded()
                | StepsRetiredEarly()
                | CheckpointAsked()
                | ArchiveStuck()
                | MetricsUnavailable()
            ):
                self._say(f"! {event.sentence}")
            case MetricsServed(url=url):
                self._say(f"metrics: {url}")
            case EnvPaused() | EnvResumed() | EnvBack():
                self._say(_env(event))
            case SettingsAsked() | SettingsTaken() | SettingsRefused():
                self._say(_settings(event))
            case ArchiveWritten():
                self._say(f"the archive is written again: {plural(event.steps, 'step')}, up to step {event.step}")
            case StepCommitted():
                self._waiting(None)
                self._say(step_line(event))
            case RunRecovered():
                self._waiting(None)
                self._say(_recovery(event))
            case RunEnded():
                self._waiting(None)
                self._say("  ".join(part for part in (event.sentence, drops_text(event.drops)) if part))
            case StandingBy():
                self._waiting(None)
                self._say(f"standing by: another batcher leads this run ({event.owner}); takes over when it stops")
            case LeadLost():
                self._waiting(None)
                self._say(f"! lost the lead: {event.reason}. Trying again.")
            case RunBeginsAgain():
                self._waiting(None)
                self._say(f"! {event.sentence}")
            case _:
                assert_never(event)

    def close(self) -> None:
        """Forgets what it was about to say."""
        self._waiting(None)

    def _waiting(self, waiting: Waiting | None) -> None:
        if self._show is not None:
            self._show("" if waiting is None else str(waiting))
            return
        with self._lock:
            self._pending = waiting
            if waiting is None:
                if self._timer is not None:
                    self._timer.cancel()
                self._timer = None
            elif self._timer is None:
                delay = max(QUIET_SECONDS, self._last + WAITING_SECONDS - time.monotonic())
                self._timer = threading.Timer(delay, self._flush)
                self._timer.daemon = True
                self._timer.start()

    def _flush(self) -> None:
        with self._lock:
            waiting, self._pending, self._timer = self._pending, None, None
            if waiting is not None and self._lasting.is_due(waiting.key, time.monotonic()):
                self._last = time.monotonic()
                self._say(f"waiting: {waiting}")


def _recovery(event: RunRecovered) -> str:
    return (
        f"! the server had lost {plural(event.forgotten, 'step')} that the trainer has trained: the run goes on after "
        f"step {event.step} in epoch {event.epoch}; {plural(event.groups, 'group')} will not be trained again"
    )


def _settings(event: SettingsEvent) -> str:
    match event:
        case SettingsTaken():
            return f"settings: revision {event.revision} from step {event.step} on: {'; '.join(event.changes)}"
        case SettingsRefused():
            return f"! settings: the old ones go on: {event.reason}"
        case SettingsAsked():
            is_asked = event.state == SettingsState.ASKED
            return f"settings: {'asked for, taken between two steps' if is_asked else 'nothing is new'}"
        case _:
            assert_never(event)


def _env(event: EnvPaused | EnvResumed | EnvBack) -> str:
    match event:
        case EnvPaused():
            return f"{event.env} is paused: steps go on without it"
        case EnvResumed():
            return f"{event.env} takes part again"
        case EnvBack():
            return f"{event.env} is back"
        case _:
            assert_never(event)
