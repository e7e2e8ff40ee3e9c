"""Payloads that no push has announced. They expire after seven days; where memory is short they go before any step.

A payload is there before its push, and whoever may push may store payloads and never push them. Nobody can tell such a
stray from a payload whose push is under way. So a sweep removes nothing. It looks twice, and what both looks have found
gets a few seconds to live. PUSH makes its payload permanent, or finds it gone, and the writer sends it again; in a
cluster the writer and the leader make it permanent.

    first look -> pause -> second look -> short lives -> expired -> over
       |                      | none is found again              ^
       +----------------------+----------------------------------+
         none is found
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from rlbuffer.daemon.pending import Pending
from rlbuffer.process.logs import fields
from rlbuffer.state.text import plural
from rlbuffer.store.leader import LeaderStore
from rlbuffer.store.records import LeaderRead

_log = logging.getLogger(__name__)
PAUSE_SECONDS = 0.5
"""Seconds between the two looks: most pushes that are under way at the first are pending by the second."""
LIFE_SECONDS = 5.0
"""Seconds that a stray has left: the time between the halves of a push, without a resend of its payload."""
MARGIN_SECONDS = 0.1
"""Seconds after which even a clock that ticks a little more slowly has them expired."""
HOLD_SECONDS = 10.0
"""Longest that steps wait for a sweep: on a server with millions of keys a look takes longer."""
REST_SECONDS = 5.0
"""Seconds from the end of a sweep to the next, unless steps retire sooner: that one begins at once."""


class Strays:
    """The sweeps of one leadership.

    Args:
        store: the run.
        pending: the pool.
        freed: is told when strays are gone.
    """

    def __init__(self, store: LeaderStore, pending: Pending, freed: Callable[[], object]) -> None:
        self._store, self._pending, self._freed = store, pending, freed
        self.begin()

    def begin(self) -> None:
        """The next turn begins a sweep; one that is under way is given up."""
        self._began: float | None = None
        """Monotonic seconds of its first turn."""
        self._place = self._store.FIRST_PAGE
        self._first: set[str] | None = None
        """Found by the first look, once that is at its end."""
        self._found: set[str] = set()
        """Found by the look under way."""
        self._next = float("-inf")
        """Monotonic seconds before which there is nothing to do."""
        self._short_lived: list[str] | None = None
        """Those that were given a short life."""
        self._is_over = False

    @property
    def are_expiring(self) -> bool:
        """Some were given a short life, and it is not told yet what has become of them."""
        return self._short_lived is not None and not self._is_over

    def sweep(self, look: LeaderRead) -> bool:
        """Does a part of the sweep. -> True when it is over, or takes too long for steps to wait."""
        now = time.monotonic()
        if self._is_over and now >= self._next:
            self.begin()
        if self._began is None:
            self._began = now
        # The second look relies on the pool: it must have been read to its end since the first.
        is_behind = self._first is not None and look.sources is None
        if now >= self._next and not is_behind:
            if self._short_lived is None:
                self._read_page(now)
            else:
                self._end(self._short_lived, now)
        return self._is_over or now - self._began > HOLD_SECONDS

    def _read_page(self, now: float) -> None:
        """Looks at a page of the payloads."""
        self._place, keys = self._store.payload_page(self._place)
        in_use = {entry.payload_key for entry in self._pending.entries()}
        self._found.update(self._store.not_garbage([key for key in keys if key not in in_use]))
        if self._place != self._store.FIRST_PAGE:
            return
        strays = sorted(self._found if self._first is None else self._found & self._first)
        if not strays:
            self._is_over, self._next = True, now + REST_SECONDS
        elif self._first is None:
            self._first, self._found, self._next = self._found, set(), now + PAUSE_SECONDS
        else:
            self._store.shorten_lives(strays, round(1000 * LIFE_SECONDS))
            self._short_lived, self._next = strays, time.monotonic() + LIFE_SECONDS + MARGIN_SECONDS

    def _end(self, strays: list[str], now: float) -> None:
        gone = self._store.expired(strays)
        self._is_over, self._next = True, now + REST_SECONDS
        if gone:
            self._freed()
            _log.warning(
                "The server's memory was short: %s that no push had announced %s removed.",
                plural(gone, "payload"),
                "was" if gone == 1 else "were",
                extra=fields("memory", state="swept", payloads=gone),
            )
