"""The worker's heartbeat, which keeps its tickets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from rlbuffer.heartbeats import Heartbeats
from rlbuffer.records import Ticket
from rlbuffer.worker.failures import Failures, UserWork

TICKET_SECONDS = 12.0
"""How long a ticket stays out when its worker has died: five beats missed, and a reconnect."""


class Renewer(Protocol):
    """What a pulse needs of a Writer."""

    def renew(self, tickets: Iterable[Ticket], /) -> None: ...


class Heart(Protocol):
    """What a pulse needs of a Buffer."""

    def heartbeat(self, kind: str, name: str, record: Mapping[str, Any], /) -> None: ...


class Pulse(Heartbeats):
    """Says what a worker samples with and has pushed; renews its tickets."""

    def __init__(self, buffer: Heart, name: str, env: str, work: UserWork | None = None) -> None:
        super().__init__("rlbuffer-pulse")
        self.version = -1
        """Policy version that samples."""
        self.skipped = 0
        """Tickets closed because nothing was to be sampled for them."""
        self.failures = Failures()
        """Groups given up, by kind."""
        self._work = work or UserWork()
        self._buffer, self._name, self._env = buffer, name, env
        self._writer: Renewer | None = None
        self._held: dict[int, Ticket] = {}

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
        own = {"env": self._env, "version": self.version, "skipped": self.skipped}
        failed = {"failures": self.failures.record(), "failure": self.failures.last, "busy": self._work.sentence()}
        return own | failed | super().record()

    def _renew(self) -> None:
        if self._writer is not None and self._held:
            self._writer.renew(tuple(self._held.values()))

    def _tell(self, record: dict[str, Any]) -> None:
        self._buffer.heartbeat("worker", self._name, record)
