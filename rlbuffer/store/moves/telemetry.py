"""Heartbeats and counters: shown to people, decide nothing."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from rlbuffer.errors import PayloadError, ServerUnsuitable, WrongType
from rlbuffer.store.keys import HEARTBEATS
from rlbuffer.store.session import Session, answers, number, text
from rlbuffer.wire import payload

FORGOTTEN_AFTER_MS = 3_600_000
"""Silence after which a process is no longer shown."""
MAX_HEARTBEAT_BYTES = 2**20
"""Largest heartbeat that is decoded."""
KEPT_RECORDS = 1000
"""Records of trained steps that are kept, about: 2 KB each."""
NAMED_DAMAGED = 10_000
"""Damaged rollouts of a step that are named."""
_log = logging.getLogger(__name__)


class Telemetry(Session):
    """Messages of processes about themselves, stamped with the server's clock."""

    _refused: set[str]
    """Keys that the server does not let this process write."""

    def heartbeat(self, kind: str, name: str, record: Mapping[str, Any]) -> Mapping[str, Any] | None:
        if kind not in HEARTBEATS:
            raise ValueError(f"heartbeat kind {kind!r} must be one of {', '.join(HEARTBEATS)}")
        reply = self._tell((self.keys.heartbeats(kind),), beat_args(name, record))
        before = heartbeat_of(reply[1]) if len(reply) > 1 else None
        return None if before is None else before[1]

    def heartbeats(self, kind: str) -> Mapping[str, Mapping[str, Any]]:
        key = self.keys.heartbeats(kind)

        def read(client: Any) -> list[Any]:
            with client.pipeline(transaction=False) as pipe:
                pipe.hgetall(key)
                pipe.time()
                return answers(pipe)

        fields, (seconds, micros) = self.look(read)
        now = int(seconds) + int(micros) / 1e6
        out = {}
        for name, value in sorted((fields or {}).items()):
            beat = heartbeat_of(value)
            if beat is not None:
                at, record = beat
                out[text(name)] = {**record, "seconds_ago": abs(now - at / 1000)}
        return out

    def add_record(self, record: Mapping[str, Any]) -> None:
        self._tell((self.keys.records,), ("record", payload.dumps(dict(record)), KEPT_RECORDS))

    def count_damaged(self, step: int, rollouts: Sequence[str]) -> None:
        if rollouts:
            keys = self.keys
            self._tell((keys.ledger, keys.damaged, keys.meta), ("damaged", step, *rollouts))

    def damaged_in(self, first: int, last: int) -> dict[int, int]:
        steps = range(first, last + 1)

        def count(client: Any) -> list[Any]:
            with client.pipeline(transaction=False) as pipe:
                for step in steps:
                    pipe.zcount(self.keys.damaged, step, step)
                return answers(pipe)

        counts = self.look(count) if steps else []
        return {step: int(n) for step, n in zip(steps, counts, strict=True) if n}

    def damaged_of(self, step: int) -> list[str]:
        names = self.look(lambda client: client.zrangebyscore(self.keys.damaged, step, step, 0, NAMED_DAMAGED))
        return [text(name).partition(" ")[2] for name in names]

    def count_lost(self, pushes: int) -> None:
        # A lost reply may count twice. That is better than a writer that fails because it could not count.
        self._tell((self.keys.ledger,), ("count", "lost", pushes))

    def _tell(self, keys: Sequence[str], args: Sequence[Any]) -> list[Any]:
        """One move of telemetry. A server that does not allow it is reported once: nobody stops working for it."""
        try:
            return self.move("telemetry", keys, args)
        except (ServerUnsuitable, WrongType) as error:
            if keys[0] not in self._refused:
                self._refused.add(keys[0])
                _log.warning("not written to %s, now and later: %s", keys[0], error)
        return []


def beat_args(name: str, record: Mapping[str, Any]) -> tuple[Any, ...]:
    """The arguments of TELEMETRY with which a heartbeat is noted."""
    return "note", name, payload.dumps(dict(record)), FORGOTTEN_AFTER_MS


def heartbeat_of(value: bytes) -> tuple[int, dict[str, Any]] | None:
    """Server ms and the record of a heartbeat; None when it is none."""
    at, _, data = value.partition(b" ")
    milliseconds = number(at)
    try:
        record = payload.loads(data, limit=MAX_HEARTBEAT_BYTES)
    except PayloadError:
        return None
    if milliseconds is None or not isinstance(record, dict):
        return None
    return milliseconds, record
