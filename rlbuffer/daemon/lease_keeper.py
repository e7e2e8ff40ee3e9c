"""The leader's lease is renewed by a thread of its own, so that a step may take longer to make than the lease lasts.

Planning, pinning and committing a large step on a busy machine takes longer than any lease that is short enough for a
takeover. Renewed between two turns, the lease of such a leader expires in every turn, and no step is ever made.

The thread renews for a leader that works, not for one that hangs: after :data:`LONGEST_TURN_SECONDS` without a word of
the leader it lets the lease expire, and a standby takes over.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

from rlbuffer.errors import LeaseLost, ServerRefused, ServerUnreachable
from rlbuffer.records.waiting import Wait, Waiting
from rlbuffer.store.leader import LeaderStore

LONGEST_TURN_SECONDS = 600.0
"""A leader that has said nothing for this long hangs. The largest step that was tried, 100,000 rollouts for 512 ranks,
takes 10 s of CPU."""
RENEWALS = 3
"""Per time to live: two may fail."""
SLOW_RENEWAL_SECONDS = 5.0
"""Seconds in one turn after which people hear what takes so long; the waiting ranks would else read an old reason."""
KEEPER_CLOSE_SECONDS = 5.0
"""Seconds that closing waits for a renewal that is under way."""


class LeaseKeeper:
    """Renews the lease that `store` has acquired, from `with` until its end.

    Args:
        store: the run.
        lease_seconds: for how long the lease is renewed.
        say: tells why no step comes, while a turn is long.
    """

    def __init__(self, store: LeaderStore, *, lease_seconds: float, say: Callable[[Waiting], None]) -> None:
        self._store = store
        self._token = store.token
        self._lease_seconds = lease_seconds
        self._say = say
        self._lost: Exception | None = None
        self._step = 0
        self._heard = time.monotonic()
        self._leader = threading.get_ident()
        self._told = float("-inf")
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease-keeper", daemon=True)

    def __enter__(self) -> LeaseKeeper:
        self._renew()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A renewal after the release would take the lease again, so the thread ends first. One that waits for a
        # server that is away is left behind: it finds `_closed` set when the server answers, or the lease released.
        self._closed.set()
        self._thread.join(KEEPER_CLOSE_SECONDS)

    def check(self, step: int = 0) -> None:
        """The leader says that it works, and on which step.

        Raises:
            LeaseLost: the lease expired, so another may have led meanwhile.
        """
        self._heard, self._step = time.monotonic(), step
        if self._lost is not None:
            raise self._lost

    def _run(self) -> None:
        while self._lost is None and not self._closed.wait(self._lease_seconds / RENEWALS):
            try:
                self._prolong()
            except (ServerUnreachable, ServerRefused):
                continue  # the leader meets the same trouble; the next renewal says whether the lease has expired
            except Exception as error:
                self._lost = error  # the leader raises it: a thread that dies alone would be a silent takeover

    def _prolong(self) -> None:
        turn = time.monotonic() - self._heard
        if turn > LONGEST_TURN_SECONDS:
            self._lost = LeaseLost(
                f"the leader of run {self._store.run!r} said nothing for {turn:.0f} s, so its lease was let go"
            )
            return
        self._renew()
        if turn > SLOW_RENEWAL_SECONDS and self._step and time.monotonic() - self._told > SLOW_RENEWAL_SECONDS:
            self._told = time.monotonic()
            self._say(self._busy(turn))

    def _busy(self, turn: float) -> Waiting:
        """What takes the leader so long: the server, which has answered this thread just now, or its own work."""
        asked = self._store.connection.asking.get(self._leader)
        silence = 0.0 if asked is None else time.monotonic() - asked
        if silence <= SLOW_RENEWAL_SECONDS:
            return Waiting(kind=Wait.BUILDING, step=self._step, seconds=turn)
        return Waiting(kind=Wait.UNANSWERED, step=self._step, seconds=silence)

    def _renew(self) -> None:
        lease = self._store.renew(ttl_seconds=self._lease_seconds)
        if lease.token == self._token:
            return
        holder = "nobody else took it" if lease.held else f"{lease.owner} holds it now"
        raise LeaseLost(
            f"the lease of run {self._store.run!r} expired after {self._lease_seconds:g} s without a renewal; {holder}"
        )
