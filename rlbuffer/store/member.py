"""What every process that takes part in a run may do: open it, and say that it is alive."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from rlbuffer.errors import RunDamaged, RunGone, ServerRefused, ServerUnsuitable, WrongAnswer, WrongType
from rlbuffer.store.keys import HEARTBEATS, RUNS, SCHEMA, check_new_run
from rlbuffer.store.records import Meta
from rlbuffer.store.server.connection import Connection
from rlbuffer.store.session import DEFAULT_PATIENCE_SECONDS, text
from rlbuffer.store.viewer import Viewer, heartbeat_of
from rlbuffer.wire import payload

FORGOTTEN_AFTER_MS = 3_600_000
"""Silence after which a process is no longer shown."""
_log = logging.getLogger(__name__)


class Member(Viewer):
    """The base of the roles that change a run. Heartbeats and counters are shown to people and decide nothing."""

    def __init__(self, connection: Connection, run: str, *, patience_seconds: float = DEFAULT_PATIENCE_SECONDS) -> None:
        super().__init__(connection, run, patience_seconds=patience_seconds)
        self._refused: set[str] = set()
        """Keys that the server does not let this process write."""

    def open_run(self) -> Meta:
        """OPEN: creates the run's meta if there is none, and notes that the run was opened. Safe to repeat.

        The first epoch is the server's clock in milliseconds, so that a run that was deleted and made again is in
        another epoch: whoever still works for the old one hears it (RunGone). Raises SchemaMismatch, RunDamaged,
        ConfigError for a name that no new run may have.
        """
        try:
            meta = self.meta()  # who may not write, or on a server that takes no writes, goes on with a run
        except RunDamaged:
            raise
        except RunGone:
            check_new_run(self.run)
            reply = self.move("open", (self.keys.meta, *self._content()), (SCHEMA,))
            if text(reply[0]) == "LEFT":
                raise self._damaged([text(key) for key in reply[1:]]) from None
            meta = self.meta()
        now = self.now()
        # The list is for people: at the memory limit, and for who may not write it, it keeps the older time.
        with suppress(ServerRefused, ServerUnsuitable):
            self.look(lambda client: client.zadd(RUNS, {self.run: now}))
        return meta

    def heartbeat(self, kind: str, name: str, record: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Telemetry: kind ``worker`` | ``scorer`` | ``rank`` | ``batcher``; decides nothing. -> the record that stood
        under the name before."""
        if kind not in HEARTBEATS:
            raise ValueError(f"heartbeat kind {kind!r} must be one of {', '.join(HEARTBEATS)}")
        reply = self._tell((self.keys.heartbeats(kind),), beat_args(name, record))
        before = heartbeat_of(reply[1]) if len(reply) > 1 else None
        return None if before is None else before[1]

    def _tell(self, keys: Sequence[str], args: Sequence[Any]) -> list[Any]:
        """One move of telemetry. A server that does not allow it is reported once: nobody stops working for it."""
        try:
            return self.move("telemetry", keys, args)
        except (ServerUnsuitable, WrongType, WrongAnswer) as error:
            if keys[0] not in self._refused:
                self._refused.add(keys[0])
                _log.warning("not written to %s, now and later: %s", keys[0], error)
        return []


class TicketStore(Member):
    """What leader, worker and operator do about tickets; scorers and trainers may not."""

    def close_tickets(self, env: str, numbers: Sequence[int]) -> None:
        """Deletes the tickets of ingested groups, and of numbers that no group is wanted of."""
        if numbers:
            # Plain commands, because they pass at the memory limit where TICKET is refused.
            tickets, taken = self.keys.tickets(env), self.keys.taken(env)
            self.piped(lambda pipe: pipe.zrem(tickets, *numbers).hdel(taken, *map(str, numbers)), at_once=True)

    def say_done(self, env: str, *, epoch: int) -> None:
        """DONE: no number is given beyond those that were. Raises RunGone; EpochChanged where it may go on."""
        reply = self._say_done("done", epoch, env)
        if text(reply[0]) == "GONE":
            raise self.gone(reply, epoch)

    def _say_done(self, action: str, *args: Any) -> list[Any]:
        return self.move("done", (self.keys.ends, self.keys.numbers, self.keys.meta), (action, *args))


def beat_args(name: str, record: Mapping[str, Any]) -> tuple[Any, ...]:
    """The arguments of TELEMETRY with which a heartbeat is noted."""
    return "note", name, payload.dumps(dict(record)), FORGOTTEN_AFTER_MS
