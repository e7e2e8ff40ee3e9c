"""The worker's heartbeat, which keeps its tickets."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from rlbuffer.config.settings import WorkerSettings
from rlbuffer.errors import ConfigError, RlbufferError
from rlbuffer.process.heartbeat import Heartbeats
from rlbuffer.process.identity import may_live
from rlbuffer.records.group import Ticket
from rlbuffer.records.waiting import Problem, Trouble
from rlbuffer.state.heartbeats import failing
from rlbuffer.worker.failures import Failures, RunningCalls

if TYPE_CHECKING:
    from rlbuffer.client.buffer import Buffer
    from rlbuffer.client.writer import Writer

WORKER_TICKET_SECONDS = 12.0
"""Seconds that a ticket stays out when its worker has died: five beats missed, and a reconnect."""


@contextmanager
def telling_why(buffer: Buffer, name: str, settings: WorkerSettings) -> Iterator[None]:
    """A worker that cannot begin says why to a run that is there: its heartbeat is the last one."""
    try:
        yield
    except ConfigError as error:
        pulse = Pulse(buffer, name, str(settings.env_options.get("name") or settings.env))
        pulse.ended = str(error)
        with suppress(RlbufferError):
            buffer.store.meta()  # RunGone where there is none: this begins none
            other = buffer.store.heartbeats("worker").get(name)
            if other is None or not may_live(other):  # one that works has not ended
                buffer.heartbeat("worker", name, pulse.record())
        raise


class Pulse(Heartbeats):
    """Says what a worker samples with and has pushed; renews its tickets."""

    def __init__(self, buffer: Buffer, name: str, env: str, calls: RunningCalls | None = None) -> None:
        super().__init__("rlbuffer-pulse", Trouble.WORKER_STUCK)
        self.version = -1
        """Policy version that samples."""
        self.skipped = 0
        """Tickets closed because nothing was to be sampled for them."""
        self.failures = Failures()
        """Groups given up, by kind."""
        self.failed_rollouts: Counter[str] = Counter()
        """Rollouts that failed in groups that were made, by kind."""
        self.ended = ""
        """Why the worker ends, where that is no order."""
        self._calls = calls or RunningCalls()
        self._buffer, self._name, self._env = buffer, name, env
        self._writer: Writer | None = None
        self._held: dict[int, Ticket] = {}
        self._listing = threading.Lock()  # never held while the server is asked: the worker's event loop takes it

    def hold(self, writer: Writer) -> None:
        """Renews tickets through this writer from now on."""
        with self._listing:
            self._writer, self._held = writer, {}

    def add(self, tickets: Iterable[Ticket]) -> None:
        """Renews these tickets, too, from now on."""
        with self._listing:
            self._held |= {ticket.number: ticket for ticket in tickets}
            self._carried_until = float("-inf")

    def remove(self, tickets: Iterable[Ticket]) -> None:
        """Ends the renewal of these tickets, from the next one on."""
        with self._listing:
            for ticket in tickets:
                self._held.pop(ticket.number, None)

    def let_go(self) -> list[Ticket]:
        """Ends the renewal of all tickets, from the next one on. -> those that were held."""
        with self._listing:
            tickets, self._held = list(self._held.values()), {}
            return tickets

    def settle(self) -> None:
        """Waits for the renewal that is under way, which may take as long as the server is away: not for an event loop.
        Before removed tickets are given back: a renewal behind that would take them out again."""
        with self._holding:
            return

    def record(self) -> dict[str, Any]:
        """The content of a heartbeat; msgpack types."""
        own = {"env": self._env, "version": self.version, "skipped": self.skipped}
        failed: dict[str, Any] = {"failures": self.failures.record()}
        if self.failed_rollouts:
            failed["failed_rollouts"] = dict(self.failed_rollouts.copy())
        if self.failures.traceback:
            failed["traceback"] = self.failures.traceback
        return own | failed | super().record()

    def _problems(self) -> list[Problem]:
        failed = failing(self.failures.record(), self.failures.last)
        problems = super()._problems() if failed is None else [failed]
        if busy := self._calls.sentence():
            problems.append(Problem(kind=Trouble.ENV_HANGS, detail=busy))
        if self.ended:
            problems.append(Problem(kind=Trouble.WORKER_ENDED, detail=self.ended))
        return problems

    def _renew(self) -> None:
        with self._listing:
            writer, tickets = self._writer, tuple(self._held.values())
        if writer is not None and tickets:
            writer.renew(tickets)

    def _tell(self, record: dict[str, Any]) -> Mapping[str, Any] | None:
        return self._buffer.heartbeat("worker", self._name, record)
