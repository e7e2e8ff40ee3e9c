"""Heartbeats of a process that samples or scores: a thread says that it lives and renews what it holds, however long
its work takes."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rlbuffer.errors import RlbufferError
from rlbuffer.process.identity import identity, named
from rlbuffer.records.waiting import Problem, Trouble, Wait, Waiting

_log = logging.getLogger(__name__)
BEAT_SECONDS = 2.0
"""Seconds between two heartbeats, and between two renewals: a small part of the life of a ticket or a claim. Where
nothing is held, a request that comes more seldom may carry the heartbeat (:meth:`Heartbeats.carried`)."""
LATE_SECONDS = 1.0
"""Seconds that the next request which carries a heartbeat may be late before the thread beats."""
BEAT_CLOSE_SECONDS = 5.0
"""Seconds that closing waits for a beat that is under way."""
TWIN_SECONDS = 15.0
"""A process of the same name is told of for so long after it was last seen."""
RATE_BEATS = 10
"""Beats that rates are averaged over: long enough to hold several batches, short enough to follow a change."""


class Heartbeats(ABC):
    """Beats from `start` until `close`. The loop writes its state into the attributes; the thread only reads them.

    A beat that fails, for whatever reason, decides nothing and stops nothing: the next one tries again, and the loop
    meets the same trouble by itself.
    """

    def __init__(self, thread: str, stuck: Trouble | None = None) -> None:
        self.groups = self.rollouts = self.tokens = 0
        """Done and stored."""
        self.failed_groups = 0
        """Groups abandoned because they could not be prepared, scored or stored."""
        self.error = ""
        """The last trouble, "" when the last batch had none."""
        self.waiting: Waiting | None = None
        """What the loop waits for, None while it works."""
        self._stuck = stuck
        """The kind of problem that `error` is; None: of nobody's."""
        self._holding = threading.Lock()
        self._seen: deque[tuple[float, int, int]] = deque([(time.monotonic(), 0, 0)], maxlen=RATE_BEATS)
        self._started = time.time()
        self._is_heard = True
        self._has_beaten = False
        self._twin: tuple[float, Mapping[str, Any]] | None = None
        """When (monotonic) another process had beaten under this name between two beats of this one, and its record."""
        self._carried_until = float("-inf")
        """Monotonic: until then requests of the loop carry heartbeats, but none of a new trouble."""
        self._carried_error = ""
        """The trouble in the last of these."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=thread, daemon=True)

    def start(self) -> None:
        """The first beat comes at once."""
        self._thread.start()

    def to_carry(self) -> dict[str, Any] | None:
        """The record for a request of the loop that carries it; None where it cannot be made, or the thread
        has to look who else has this name."""
        if self.twin() is not None:
            return None
        self._carried_error = self.error
        try:
            return self.record()
        except Exception:  # the thread's next beat meets it, too, and tells
            return None

    def carried(self, seconds: float) -> None:
        """A request carried the record, and the next one does so in `seconds`. Unless it is late, or there is a
        new trouble, the thread is silent."""
        self._is_heard, self._carried_until = True, time.monotonic() + seconds + LATE_SECONDS
        self._has_beaten = True
        self._note()

    def twin(self) -> Mapping[str, Any] | None:
        """The last heartbeat of another process that lives under this name."""
        if self._twin is None or time.monotonic() - self._twin[0] > TWIN_SECONDS:
            return None
        return self._twin[1]

    def record(self) -> dict[str, Any]:
        """The content of a heartbeat; msgpack types."""
        since, rollouts, tokens = self._seen[0]
        elapsed = max(time.monotonic() - since, 1e-9)
        waiting = self.waiting
        return {
            "groups": self.groups,
            "rollouts": self.rollouts,
            "tokens": self.tokens,
            "rollouts_per_second": (self.rollouts - rollouts) / elapsed,
            "tokens_per_second": (self.tokens - tokens) / elapsed,
            "failed_groups": self.failed_groups,
            "problems": [problem.record() for problem in self._problems()],
            "started": self._started,
            "left": self._closed.is_set(),
            **({} if waiting is None else {"waiting": waiting.record()}),
        } | identity()

    def _problems(self) -> list[Problem]:
        """What somebody must cure."""
        if self._stuck is None:
            return []
        twin = self.twin()
        two = twin and f"two processes have this name, {named(identity())} and {named(twin)}: each needs one of its own"
        error = self.error or two
        return [Problem(kind=self._stuck, detail=error)] if error else []

    def close(self) -> None:
        """Stops the thread and says goodbye with a last heartbeat, unless the server is away: leaving must not wait."""
        self._closed.set()
        self._thread.join(BEAT_CLOSE_SECONDS)
        if not self._thread.is_alive() and self._is_heard:
            self._beat()

    @abstractmethod
    def _renew(self) -> None:
        """Renews what is held. Called with the lock `_holding`."""

    @abstractmethod
    def _tell(self, record: dict[str, Any]) -> Mapping[str, Any] | None:
        """Sends a heartbeat. -> the one before it under this name."""

    def _run(self) -> None:
        while True:
            silent = self._carried_until - time.monotonic()
            if silent <= 0 or self.error != self._carried_error:
                self._beat()
            if self._closed.wait(min(silent, BEAT_SECONDS) if silent > 0 else BEAT_SECONDS):
                return

    def _beat(self) -> None:
        try:
            with self._holding:
                self._renew()
            self._meet(self._tell(self.record()))
            self._is_heard = self._has_beaten = True
        except Exception as error:
            self._is_heard = False
            message = str(error) if isinstance(error, RlbufferError) else f"{type(error).__name__}: {error}"
            if message != self.error and not isinstance(error, RlbufferError):
                _log.warning("a heartbeat failed, and the next one tries again", exc_info=error)
            self.error = message
        self._note()

    def _meet(self, before: Mapping[str, Any] | None) -> None:
        """`before` this beat the last one under this name was made. Behind one of this process only a living one can
        have put another."""
        ours = {"started": self._started} | identity()
        if before is None or not self._has_beaten or before.get("left") or "pid" not in before:
            return
        if any(before.get(name) != value for name, value in ours.items()):
            if self.twin() is None:
                _log.warning("two processes have one name: %s and %s", named(ours), named(before))
            self._twin = time.monotonic(), before

    def _note(self) -> None:
        self._seen.append((time.monotonic(), self.rollouts, self.tokens))


class Starting(Heartbeats):
    """Those of a process that loads what it works with, until the ones of its work take their place.

    Args:
        tell: sends a heartbeat. -> the one before it under this name.
        what: it loads.
        more: fields of the record.
    """

    def __init__(
        self, tell: Callable[[dict[str, Any]], Mapping[str, Any] | None], what: str, more: Mapping[str, Any]
    ) -> None:
        super().__init__("rlbuffer-starting")
        self._send, self._what, self._more = tell, what, more

    def record(self) -> dict[str, Any]:
        """The content of a heartbeat; msgpack types."""
        seconds = round(time.time() - self._started, 1)
        waiting = Waiting(kind=Wait.STARTING, seconds=seconds, detail=self._what)
        return {**super().record(), **self._more, "waiting": waiting.record()}

    def leave(self) -> None:
        """Ends without a goodbye: the process goes on."""
        self._is_heard = False
        super().close()

    def _renew(self) -> None:
        """Nothing is held yet."""

    def _tell(self, record: dict[str, Any]) -> Mapping[str, Any] | None:
        return self._send({**record, "left": record["left"] and self._is_heard})


@contextmanager
def starting(tell: Callable[[dict[str, Any]], Mapping[str, Any] | None], what: str, **more: Any) -> Iterator[None]:
    """Says by heartbeats that this process starts, while the block loads what it works with; says goodbye where that
    fails. The arguments are those of :class:`Starting`."""
    beats = Starting(tell, what, more)
    beats.start()
    try:
        yield
    except BaseException:
        beats.close()
        raise
    beats.leave()
