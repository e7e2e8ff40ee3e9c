"""Heartbeats, waiting sentences and counters: shown to people, decide nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlbuffer import wire
from rlbuffer.store.keys import HEARTBEATS
from rlbuffer.store.session import Session, text

FORGOTTEN_AFTER_MS = 3_600_000
"""Silence after which a process is no longer shown."""
MAX_RECORD_BYTES = 2**20
"""Largest heartbeat that is decoded."""


class Telemetry(Session):
    """What processes say about themselves, stamped with the server's clock."""

    def heartbeat(self, kind: str, name: str, record: Mapping[str, Any]) -> None:
        """Says that `name` lives, with whatever it wants to show. `kind`: a key of HEARTBEATS."""
        if kind not in HEARTBEATS:
            raise ValueError(f"heartbeat kind {kind!r} must be one of {', '.join(HEARTBEATS)}")
        self._note(self.keys.heartbeats(kind), name, wire.dumps(dict(record)))

    def heartbeats(self, kind: str) -> Mapping[str, Mapping[str, Any]]:
        """name -> its last record, with ``seconds_ago`` added, by the server's clock."""
        key = self.keys.heartbeats(kind)

        def read(client: Any) -> list[Any]:
            with client.pipeline(transaction=False) as pipe:
                pipe.hgetall(key)
                pipe.time()
                return list(pipe.execute())

        fields, (seconds, micros) = self.look(read)
        now = int(seconds) + int(micros) / 1e6
        out = {}
        for name, value in sorted(fields.items()):
            at, _, record = value.partition(b" ")
            out[text(name)] = {
                **wire.loads(record, limit=MAX_RECORD_BYTES),
                "seconds_ago": max(0.0, now - int(at) / 1000),
            }
        return out

    def set_waiting(self, who: str, sentence: str) -> None:
        """What `who` waits for, in one sentence; "" when it does not wait."""
        self._note(self.keys.waiting, who, sentence)

    def waiting(self) -> Mapping[str, str]:
        """who -> the sentence that it last said."""
        fields = self.look(lambda client: client.hgetall(self.keys.waiting))
        return {text(who): text(value.partition(b" ")[2]) for who, value in sorted(fields.items())}

    def count_damaged(self, step: int, rollouts: Sequence[str]) -> None:
        """Rollouts of `step`, each as ``<group> <rollout>``, found missing or damaged when they were pulled.

        Each counts once: a replay, a second reader or a repeated call finds it noted already.
        """
        if rollouts:
            keys = self.keys
            self.move("telemetry", (keys.ledger, keys.damaged, keys.meta), ("damaged", step, *rollouts))

    def count_lost(self, pushes: int) -> None:
        """Pushes that a producer knows are missing on the server and cannot send again."""
        # A lost reply may count twice. That is better than a writer that fails because it could not count.
        self.move("telemetry", (self.keys.ledger,), ("count", "lost", pushes))

    def _note(self, key: str, name: str, record: str | bytes) -> None:
        self.move("telemetry", (key,), ("note", name, record, FORGOTTEN_AFTER_MS))
