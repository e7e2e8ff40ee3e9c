"""The scorer's heartbeat: a thread that says that it lives and keeps its claims, however long scoring takes."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from rlbuffer.errors import RlbufferError
from rlbuffer.store.base import Store

BEAT_SECONDS = 2.0
"""Between two heartbeats, and between two renewals of claims."""
CLAIM_SECONDS = 8.0
"""How long a claim outlives its scorer: three beats missed, and a reconnect. Then another takes its groups over."""
CLOSE_SECONDS = 5.0
"""How long closing waits for a beat that is under way."""
RATE_BEATS = 10
"""Beats that the rates are averaged over."""


class Beat:
    """Beats from `start` until `close`. The loop writes its state into the attributes; the thread only reads them.

    A beat that fails decides nothing: the loop meets the same trouble by itself.
    """

    def __init__(self, store: Store, name: str, *, owner: str, gives: Sequence[str], envs: Sequence[str]) -> None:
        self.groups = self.rollouts = self.tokens = 0
        """Scored and stored."""
        self.late = 0
        """Groups that somebody else had scored, or that were dropped, before this scorer was done."""
        self.failed_groups = 0
        """Groups that could not be scored."""
        self.error = ""
        self.waiting = ""
        self._store, self._name, self._owner = store, name, owner
        self._gives, self._envs = list(gives), list(envs)
        self._holding = threading.Lock()
        self._held: set[str] = set()
        self._seen: deque[tuple[float, int, int]] = deque([(time.monotonic(), 0, 0)], maxlen=RATE_BEATS)
        self._started = time.time()
        self._is_heard = True
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rlbuffer-beat", daemon=True)

    def start(self) -> None:
        """The first beat comes at once."""
        self._thread.start()

    def hold(self, entry_ids: Iterable[str]) -> None:
        """From now on these claims are renewed, and no others."""
        with self._holding:
            self._held = set(entry_ids)

    def record(self) -> dict[str, Any]:
        """What a heartbeat says; msgpack types."""
        first, rollouts, tokens = self._seen[0]
        elapsed = max(time.monotonic() - first, 1e-9)
        return {
            "gives": self._gives,
            "envs": self._envs,
            "groups": self.groups,
            "rollouts": self.rollouts,
            "rollouts_per_second": (self.rollouts - rollouts) / elapsed,
            "tokens_per_second": (self.tokens - tokens) / elapsed,
            "late": self.late,
            "failed_groups": self.failed_groups,
            "error": self.error,
            "waiting": self.waiting,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "started": self._started,
        }

    def close(self) -> None:
        """Stops the thread and says goodbye, unless the server is away: leaving must not wait."""
        self._closed.set()
        self._thread.join(CLOSE_SECONDS)
        if not self._thread.is_alive() and self._is_heard:
            self._beat()

    def _run(self) -> None:
        while True:
            self._beat()
            if self._closed.wait(BEAT_SECONDS):
                return

    def _beat(self) -> None:
        try:
            with self._holding:
                self._store.renew_scoring(sorted(self._held), owner=self._owner, ttl_seconds=CLAIM_SECONDS)
            self._store.heartbeat("scorer", self._name, self.record())
            self._is_heard = True
        except RlbufferError as error:
            self._is_heard = False
            self.error = str(error)
        self._seen.append((time.monotonic(), self.rollouts, self.tokens))
