"""The worker's pulse: a thread that tells that the worker lives and keeps its tickets, however long sampling takes."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from rlbuffer.errors import RlbufferError
from rlbuffer.records import Ticket

BEAT_SECONDS = 2.0
"""Between two heartbeats, and between two renewals: a small part of a ticket's life."""
TICKET_SECONDS = 12.0
"""How long a ticket stays out when its worker has died: five beats missed, and a reconnect."""
CLOSE_SECONDS = 5.0
"""How long closing waits for a beat that is under way."""
RATE_BEATS = 10
"""Beats that the rate is averaged over: long enough to hold several batches, short enough to follow a change."""


class Renewer(Protocol):
    """What a pulse needs of a Writer."""

    def renew(self, tickets: Iterable[Ticket], /) -> None: ...


class Heart(Protocol):
    """What a pulse needs of a Buffer."""

    def heartbeat(self, kind: str, name: str, record: Mapping[str, Any], /) -> None: ...


class Pulse:
    """Beats from `start` until `close`. The loop writes its state into the attributes; the thread only reads them.

    A beat that fails decides nothing and stops nothing: the loop meets the same trouble by itself.
    """

    def __init__(self, buffer: Heart, name: str, env: str) -> None:
        self.version = -1
        """Policy version that samples."""
        self.groups = 0
        """Groups pushed."""
        self.rollouts = 0
        """Rollouts pushed."""
        self.failed_groups = 0
        """Groups given up because they could not be prepared, scored or stored."""
        self.skipped = 0
        """Tickets closed because nothing was to be sampled for them."""
        self.error = ""
        """The last trouble, "" when the last batch had none."""
        self.waiting = ""
        """What the worker waits for, "" while it works."""
        self._buffer, self._name, self._env = buffer, name, env
        self._holding = threading.Lock()
        self._writer: Renewer | None = None
        self._held: dict[int, Ticket] = {}
        self._seen: deque[tuple[float, int]] = deque([(time.monotonic(), 0)], maxlen=RATE_BEATS)
        self._started = time.time()
        self._is_heard = True
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rlbuffer-pulse", daemon=True)

    def start(self) -> None:
        """The first beat comes at once."""
        self._thread.start()

    def hold(self, writer: Renewer) -> None:
        """From now on tickets are renewed through this writer."""
        with self._holding:
            self._writer, self._held = writer, {}

    def add(self, tickets: Iterable[Ticket]) -> None:
        """From now on these tickets are renewed, too."""
        with self._holding:
            self._held |= {ticket.number: ticket for ticket in tickets}

    def remove(self, ticket: Ticket) -> None:
        """It is renewed no more: a renewal after a ticket was given back would take it out again."""
        with self._holding:
            self._held.pop(ticket.number, None)

    def let_go(self) -> list[Ticket]:
        """From now on no ticket is renewed. -> those that were held."""
        with self._holding:
            held, self._held = list(self._held.values()), {}
            return held

    def record(self) -> dict[str, Any]:
        """What a heartbeat says; msgpack types."""
        first_time, first_rollouts = self._seen[0]
        elapsed = time.monotonic() - first_time
        return {
            "env": self._env,
            "version": self.version,
            "groups": self.groups,
            "rollouts": self.rollouts,
            "rollouts_per_second": (self.rollouts - first_rollouts) / elapsed if elapsed > 0 else 0.0,
            "failed_groups": self.failed_groups,
            "skipped": self.skipped,
            "error": self.error,
            "waiting": self.waiting,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "started": self._started,
        }

    def close(self) -> None:
        """Stops the thread and says goodbye with a last heartbeat, unless the server is away: leaving must not wait."""
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
                if self._writer is not None and self._held:
                    self._writer.renew(tuple(self._held.values()))
            self._buffer.heartbeat("worker", self._name, self.record())
            self._is_heard = True
        except RlbufferError as error:
            self._is_heard = False
            self.error = str(error)
        self._seen.append((time.monotonic(), self.rollouts))
