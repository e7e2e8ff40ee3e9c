"""The leader's messages while it runs: events for its own output, its heartbeat for everybody."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rlbuffer.daemon.figures import Figures
from rlbuffer.events.batcher import BatcherEvent, CureNeeded, GroupDropped, StepCommitted, StepWaits
from rlbuffer.events.lessons import LAST_STEPS, last_steps, nothing_to_learn
from rlbuffer.process.identity import identity
from rlbuffer.process.lasting import Lasting
from rlbuffer.records.step_header import StepHeader
from rlbuffer.records.step_plan import Drop
from rlbuffer.records.waiting import Problem, Waiting
from rlbuffer.store.member import Member

TELEMETRY_SECONDS = 1.0
"""Seconds between heartbeats while the reason why there is no step is the same."""

READ_RECORDS = 1000
"""Records of the history in which a new leader looks for the last steps."""

Emit = Callable[[BatcherEvent], None]


class Teller:
    """Tells the same from one place: `inspect`, `train` and this process's own output say one reason.

    Args:
        store: where the heartbeat is written.
        emit: takes events.
    """

    def __init__(self, store: Member, emit: Emit) -> None:
        self._store = store
        self._emit = emit
        self.figures = Figures()
        """What metrics are made of."""
        self._waiting: Waiting | None = None
        self._lasting = Lasting()
        self._beat_at = float("-inf")
        """Monotonic. Heartbeats have a pace of their own: numbers in them change with every push."""
        self._key: tuple[str, str, str] | None = None
        """Of what the last one waited for."""
        self._record: Mapping[str, Any] = {}
        """The figures as the heartbeat has them."""
        self._state: dict[str, Any] = {}
        """The rest of the heartbeat, but for what is waited for."""
        self._has_stepped = False
        """A step was committed since they were made."""
        self._drops: dict[str, list[int]] = {}
        self._steps: deque[Mapping[str, Any]] = deque(maxlen=LAST_STEPS)
        """Records of the newest steps, the newest first."""
        self._trained: deque[Mapping[str, Any]] = deque(maxlen=LAST_STEPS)
        """What the trainer measured in its newest steps, the newest first."""
        self._lesson: Problem | None = None
        """Nothing is to be learned from them."""

    def emit(self, event: BatcherEvent) -> None:
        """Something happened."""
        self.figures.heard(event)
        self._emit(event)

    def forget(self) -> None:
        """A new leadership: says again why there is no step, and counts drops from 0."""
        self._waiting, self._beat_at = None, float("-inf")
        self._drops, self._record = {}, {}
        self._steps.clear()
        self._steps.extend(last_steps(self._store.history(READ_RECORDS)))
        self._trained.clear()
        self._trained.extend(self._store.history(LAST_STEPS, of="records"))
        self._lesson = nothing_to_learn(self._steps, [*self._trained])

    def say(
        self,
        waiting: Waiting | None,
        beat: Mapping[str, Any],
        own: Sequence[Problem] = (),
        others: Sequence[Problem] = (),
    ) -> None:
        """Why there is no step, None when nothing is waited for; and when it is due the leader's heartbeat, which is
        `beat`, the figures, and what somebody must cure: `own`. What `others` say of themselves is told here only.
        """
        own = [*own, *([self._lesson] if self._lesson else [])]
        now = time.monotonic()
        if waiting is not None and waiting != self._waiting:
            self.emit(StepWaits(waiting=waiting))
        for problem in [*own, *others]:
            if self._lasting.is_due(problem.key, now):
                self.emit(CureNeeded(problem=problem))
        self._waiting = waiting
        self._state = {**beat, "problems": [problem.record() for problem in own]}
        key = None if waiting is None else waiting.key
        if key != self._key or now - self._beat_at > TELEMETRY_SECONDS:
            self._beat_at, self._key = now, key
            if self._has_stepped:  # sums over 256 pushes of every env
                self._record, self._has_stepped = self.figures.record(), False
            self.beat(waiting)

    def beat(self, waiting: Waiting | None = None, *, has_stopped: bool = False) -> None:
        """Sends the leader's heartbeat. Safe from another thread."""
        said = {} if waiting is None else {"waiting": waiting.record()}
        stopped = {"stopped": True} if has_stopped else {}
        self._store.heartbeat(
            "batcher", "leader", self._state | identity() | {"figures": self._record} | said | stopped
        )

    def say_goodbye(self, last: Waiting | None = None) -> None:
        """The last heartbeat: whoever asks whether the batcher is alive need not wait until it has been silent."""
        self.beat(last, has_stopped=True)

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
        self._lesson = nothing_to_learn(self._steps, [*self._trained])
        self._has_stepped = True
        self.settled()

    def settled(self) -> None:
        """The drops since the last step have been reported."""
        self._drops = {}
