"""The leader's messages while it runs: events for its own output, the waiting sentence for everybody."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rlbuffer.daemon.figures import Figures
from rlbuffer.events.batcher import BatcherEvent, CureNeeded, GroupDropped, StepCommitted, StepWaits
from rlbuffer.process.identity import identity
from rlbuffer.records.step_header import StepHeader
from rlbuffer.records.step_plan import Drop
from rlbuffer.records.waiting import Wait
from rlbuffer.store.protocol import Store

TELEMETRY_SECONDS = 1.0
"""Seconds between heartbeats, and after which a waiting sentence is written again although it is the same."""

Emit = Callable[[BatcherEvent], None]


class Teller:
    """Tells the same from one place: `inspect`, `train` and this process's own output carry one sentence.

    Args:
        store: where the sentence is written.
        emit: takes events.
    """

    def __init__(self, store: Store, emit: Emit) -> None:
        self._store = store
        self._emit = emit
        self.figures = Figures()
        """What metrics are made of."""
        self._told = ("", float("-inf"))
        self._beat_at = float("-inf")
        """Monotonic. Heartbeats have a pace of their own: numbers in the sentence change with every push."""
        self._trouble = ""
        self._record: Mapping[str, Any] = {}
        """The figures as the heartbeat has them."""
        self._beat: Mapping[str, Any] = {}
        """The rest of the last heartbeat."""
        self._has_stepped = False
        """A step was committed since they were made."""
        self._drops: dict[str, list[int]] = {}

    def emit(self, event: BatcherEvent) -> None:
        """Something happened."""
        self.figures.heard(event)
        self._emit(event)

    def forget(self) -> None:
        """A new leadership: says the sentence again, and counts drops from 0."""
        self._told, self._beat_at = ("", float("-inf")), float("-inf")
        self._drops, self._record = {}, {}

    def say(self, sentence: str, beat: Mapping[str, Any], trouble: str = "", why: Wait | None = None) -> None:
        """The waiting sentence, "" when nothing is waited for; and when it is due the leader's heartbeat, which is
        `beat` and the figures.

        `trouble` is what somebody must cure, in the sentence or beside it; `why` is the kind of reason that it gives.
        """
        before, at = self._told
        now = time.monotonic()
        if sentence != before and sentence:
            self.emit(StepWaits(kind=why, sentence=sentence))
        if trouble and trouble != self._trouble:
            self._trouble = trouble
            self.emit(CureNeeded(sentence=trouble))
        if sentence != before or now - at > TELEMETRY_SECONDS:
            self._told = (sentence, now)
            self._store.set_waiting("batcher", sentence)
        if now - self._beat_at > TELEMETRY_SECONDS:
            self._beat_at = now
            if self._has_stepped:  # sums over 256 pushes of every env
                self._record, self._has_stepped = self.figures.record(), False
            self._beat = beat
            self._store.heartbeat("batcher", "leader", {**beat, **identity(), "figures": self._record})

    def say_goodbye(self) -> None:
        """The last heartbeat: whoever asks whether the batcher is alive need not wait until it has been silent."""
        self._store.heartbeat("batcher", "leader", {**self._beat, "figures": self._record, "stopped": True})

    def dropped(self, drops: Iterable[Drop]) -> None:
        """Groups were dropped: an event each, and counted for the next step's line."""
        for drop in drops:
            self.count(drop.reason, drop.rollouts, drop.tokens)
            self.emit(GroupDropped(drop=drop))

    def count(self, reason: str, rollouts: int, tokens: int) -> None:
        """Adds to what was dropped since the last step."""
        totals = self._drops.setdefault(reason, [0, 0])
        totals[0] += rollouts
        totals[1] += tokens

    @property
    def drops(self) -> Mapping[str, Sequence[int]]:
        """reason -> (rollouts, tokens) that were dropped since the last step."""
        return self._drops

    def step(self, header: StepHeader, build_ms: float, flat: int) -> None:
        """A step was committed: one event with all that was dropped since the last one. `flat` of its groups teach
        nothing."""
        self.emit(StepCommitted(header=header, build_ms=build_ms, drops=self._drops, flat=flat))
        self._has_stepped = True
        self.settled()

    def settled(self) -> None:
        """The drops since the last step have been reported."""
        self._drops = {}
