"""Refusals and long waits of a client, told to its user.

A server refuses writes for a time: its disk is full, replicas are missing, a failover is under way. A write that the
next heartbeat repeats is not repeated here. A write that is needed at once is repeated as long as its caller allows.
The reason is logged at once, then every minute.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from rlbuffer.client.run_state import read_run_state
from rlbuffer.errors import BatchTimeout, RlbufferError, ServerRefused
from rlbuffer.process.logs import RateLimited
from rlbuffer.records.waiting import Wait, Waiting
from rlbuffer.store.viewer import Viewer

PATIENCE_SECONDS = 300.0
"""Longest that what a worker or a trainer asks for waits for a server that is away: a failover by sentinels takes a
minute with their defaults, and a person may have to start the server again."""
LONG_WAIT_SECONDS, AGAIN_SECONDS = 10.0, 60.0
"""Seconds until a waiting loop hears what it waits for, and until it hears it again."""
REFUSAL_PAUSE_SECONDS = 0.5
"""Seconds before a refused request is made again."""

_log = logging.getLogger(__name__)
T = TypeVar("T")


class Refusals:
    """The refusals that one rank, or a stream, has met: `who` is its name in messages. Safe from several threads."""

    def __init__(self, who: str, stop: threading.Event) -> None:
        self._who, self._stop = who, stop
        self._lasting = RateLimited()
        self.current = ""
        """Why the server takes no writes at this moment, "" while it does."""

    def note(self, error: RlbufferError) -> None:
        """Takes in a refusal, and logs it where that is due."""
        self.current = str(error)
        if self._lasting.is_due(self.current, time.monotonic()):
            _log.warning("%s waits: %s", self._who, error)

    def are_over(self) -> None:
        """Forgets the refusals: the server has taken a write."""
        if self.current:
            self.current = ""
            self._lasting.is_over()

    def told_later(self, report: Callable[[], object]) -> None:
        """Calls `report` once. The next heartbeat reports the same, so a refusal does no harm."""
        try:
            report()
        except ServerRefused as error:
            self.note(error)

    def waited_out(self, work: Callable[[], T], seconds: float) -> T:
        """Repeats `work` until the server takes it. -> its result.

        Raises:
            ServerRefused: it is stopped before.
            BatchTimeout: the server still refuses after `seconds`.
        """
        deadline = time.monotonic() + seconds
        while True:
            try:
                return work()
            except ServerRefused as error:
                self.note(error)
                left = deadline - time.monotonic()
                if left <= 0:
                    raise BatchTimeout(refused_for(seconds, self.current)) from error
                if self._stop.wait(min(REFUSAL_PAUSE_SECONDS, left)):
                    raise


class Away:
    """A hook for :meth:`Session.patient`, called with the failure of each attempt to reach a server that is away. It
    warns after ten seconds, and then every minute, that `who` waits. `hears` is called before; what it raises ends the
    waiting."""

    def __init__(self, who: str, hears: Callable[[RlbufferError], object] | None = None) -> None:
        self._who, self._hears = who, hears
        self._since = self._last = float("-inf")
        self._lasting = RateLimited()

    def __call__(self, error: RlbufferError) -> None:
        if self._hears is not None:
            self._hears(error)
        now = time.monotonic()
        if now - self._last > LONG_WAIT_SECONDS:  # the attempts of one wait follow each other faster
            self._since = now
            self._lasting.is_over()
        self._last = now
        if now - self._since > LONG_WAIT_SECONDS and self._lasting.is_due(str(error), now):
            _log.warning("%s waits for the server, for %.0f s so far: %s", self._who, now - self._since, error)


class LongWait:
    """A long wait of a training loop. It warns after ten seconds, and then every minute: nothing else shows it."""

    def __init__(self, store: Viewer) -> None:
        self._store = store
        self._since = time.monotonic()
        self._next = self._since + LONG_WAIT_SECONDS

    def warn(self, what: str) -> None:
        """`what` is still not there. Never raises, nor waits for a server that is away longer than its patience."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + AGAIN_SECONDS
        try:
            message = str(read_run_state(self._store).waiting or "The batcher is at work.")
        except RlbufferError as error:
            message = str(error).splitlines()[0]
        _log.warning("run %s: waiting for %s for %.0f s. %s", self._store.run, what, now - self._since, message)


def for_trainer(waiting: Waiting | None) -> Waiting | None:
    """`waiting` as a trainer says it of itself: the advice to start a trainer is none there."""
    is_here = waiting is not None and waiting.kind in (Wait.NO_TRAINER, Wait.TRAINER_GONE)
    return Waiting(kind=Wait.UNHEARD) if is_here else waiting


def refused_for(seconds: float, why: str) -> str:
    """What a reader says that has waited `seconds` for a server which refuses."""
    return f"the server has refused for {seconds:g} s, so no step can come: {why}"


def no_batch(store: Viewer, number: int, seconds: float) -> str:
    """The reason why step `number` has not come within `seconds`, as far as the run knows."""
    state = read_run_state(store)
    waiting = for_trainer(state.waiting)
    sentences = [str(waiting)] if waiting is not None else []
    sentences += map(str, state.problems)
    return " ".join([f"no batch for step {number} within {seconds:g} s.", *sentences])
