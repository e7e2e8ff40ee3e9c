"""The leader's guard against those who may only push: payloads that are nobody's.

The server's users (deploy/users.acl) bound commands and keys, and no bytes. A payload is written before its push is
counted, so a worker may write payloads that it never announces. The leader finds them by their names and removes them:

    waits under the name before PUSH        its writer stores it again where it was about to push it
    has the name after PUSH, and no entry   nothing in the pool, in a step or in the list of garbage names it; in a
                                            cluster its writer, too, stores it again behind the script

Both must have been seen for :data:`STRAY_SECONDS`, or :data:`PRESSED_STRAY_SECONDS` while memory is short. So whoever
writes faster than that fills the server up to its `maxmemory` for so long, and no longer.
"""

from __future__ import annotations

import time

from rlbuffer.daemon.memory_rules import payloads_swept
from rlbuffer.daemon.pending import Pending
from rlbuffer.daemon.teller import Teller
from rlbuffer.events.batcher import StraysSwept
from rlbuffer.store.protocol import Store

ROUND_SECONDS, STRAY_SECONDS = 60.0, 60.0
"""Seconds between two rounds through the server's keys, and for which a payload must have been seen to be nobody's."""
PRESSED_ROUND_SECONDS, PRESSED_STRAY_SECONDS = 1.0, 5.0
"""The same while memory is short."""
PRESSED_SHARE = 0.6
"""Share of the server's memory from which it is short: below the mark from which steps retire early."""


class Guard:
    """Keeps what workers may write within bounds, for one leadership.

    Args:
        store: the run.
        pending: the pool.
        teller: hears of what is removed.
        since: the connection's losses when the leadership began.
    """

    def __init__(self, store: Store, pending: Pending, teller: Teller, *, since: int) -> None:
        self._store, self._pending, self._teller = store, pending, teller
        self._since = since
        self._cursor = 0
        self._next_round = time.monotonic() + ROUND_SECONDS
        self._in_use: set[str] = set()
        """Payloads of the pool as this round began."""
        self._seen: dict[str, float] = {}
        """Payload of nobody -> when it was first seen so."""
        self._again: dict[str, float] = {}
        """Those of this round."""
        self.strays: int | None = None
        """Bytes of payloads of nobody that a round has left while memory is short; None before there was one."""

    def turn(self, memory_share: float) -> None:
        """Looks at some of the server's payloads."""
        self._look(memory_share >= PRESSED_SHARE)

    def _look(self, is_pressed: bool) -> None:
        """One page of a round, once a round is due."""
        now = time.monotonic()
        self.strays = self.strays if is_pressed else None
        pause = PRESSED_ROUND_SECONDS if is_pressed else ROUND_SECONDS
        if not self._cursor:
            if now < min(self._next_round, self._next_round - ROUND_SECONDS + pause):
                return
            self._in_use = {entry.payload_key for entry in self._pending.entries()}
        self._cursor, keys = self._store.payload_page(self._cursor)
        prefix = len(f"rlb:{self._store.run}:g:")
        named = [key for key in keys if not key.startswith("{", prefix)]
        strays = [key for key in keys if key.startswith("{", prefix)]
        strays += self._store.not_garbage([key for key in named if key not in self._in_use])
        self._again.update((key, self._seen.get(key, now)) for key in strays)
        if not self._cursor:
            self._seen, self._again = self._again, {}
            self._next_round = now + ROUND_SECONDS
            self._sweep(now - (PRESSED_STRAY_SECONDS if is_pressed else STRAY_SECONDS))
            self.strays = sum(self._store.weights(list(self._seen))) if is_pressed else None

    def _sweep(self, before: float) -> None:
        """Removes what was first seen before then, and is still nobody's.

        Only what was seen before the leader last read the pool to its end: a payload that was seen later may belong to
        a push that the leader has not read.
        """
        old = [key for key, at in self._seen.items() if at <= min(before, self._pending.read_until)]
        if not old:
            return
        in_use = {entry.payload_key for entry in self._pending.entries()}
        old = self._store.not_garbage([key for key in old if key not in in_use])
        size = sum(self._store.weights(old))
        swept = self._store.unlink_payloads(old, since=self._since)
        for key in old:
            del self._seen[key]
        self._teller.figures.swept(swept, size)
        if swept:
            self._teller.emit(StraysSwept(payloads=swept, bytes=size, sentence=payloads_swept(swept, size)))
