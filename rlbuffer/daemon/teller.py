"""The leader's messages while it runs: events for its own output, the waiting sentence for everybody."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rlbuffer.daemon.figures import Figures
from rlbuffer.events.batcher import BatcherEvent, CureNeeded, GroupDropped, StepCommitted, StepWaits
from rlbuffer.events.lessons import LAST_STEPS, last_steps, nothing_to_learn
from rlbuffer.narration.waiting import not_normal
from rlbuffer.process.identity import identity
from rlbuffer.records.step_header import StepHeader
from rlbuffer.records.step_plan import Drop
from rlbuffer.records.waiting import Wait
from rlbuffer.store.protocol import Store

TELEMETRY_SECONDS = 1.0
"""Seconds between heartbeats, and after which a waiting sentence is written again although it is the same."""

READ_RECORDS = 1000
"""Records of the history in which a new leader looks for the last steps."""

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
        self._steps: deque[Mapping[str, Any]] = deque(maxlen=LAST_STEPS)
        """Records of the newest steps, the newest first."""
        self._trained: deque[Mapping[str, Any]] = deque(maxlen=LAST_STEPS)
        """What the trainer measured in its newest steps, the newest first."""
        self._lesson = ""
        """Nothing is to be learned from them."""

    def emit(self, event: BatcherEvent) -> None:
        """Something happened."""
        self.figures.heard(event)
        self._emit(event)

    def forget(self) -> None:
        """A new leadership: says the sentence again, and counts drops from 0."""
        self._told, self._beat_at = ("", float("-inf")), float("-inf")
        self._drops, self._record = {}, {}
        self._steps.clear()
        self._steps.extend(last_steps(self._store.history(READ_RECORDS)))
        self._trained.clear()
        self._trained.extend(self._store.history(LAST_STEPS, of="records"))
        self._lesson = nothing_to_learn(self._steps, [*self._trained])

    def say(self, sentence: str, beat: Mapping[str, Any], trouble: str = "", why: Wait | None = None) -> None:
        """The waiting sentence, "" when nothing is waited for; and when it is due the leader's heartbeat, which is
        `beat` and the figures.

        `trouble` is what somebody must cure, in the sentence or beside it; `why` is the kind of reason that it gives.
        """
        if sentence and self._lesson:
            sentence = f"{not_normal(sentence)} {self._lesson}"
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
        figures = {"groups": len(header.group_ids), "rollouts": header.rollouts, "reward": header.reward, "flat": flat}
        self._steps.appendleft(figures)
        newest = self._store.history(1, of="records")  # a step or two behind, one for each that is committed
        if newest != [*self._trained][:1]:
            self._trained.extendleft(newest)
        was_said, self._lesson = bool(self._lesson), nothing_to_learn(self._steps, [*self._trained])
        if self._lesson and not was_said:
            self.emit(CureNeeded(sentence=self._lesson))
        self._has_stepped = True
        self.settled()

    def settled(self) -> None:
        """The drops since the last step have been reported."""
        self._drops = {}
