"""An operator's wishes for a run: other settings, a drain, pending groups dropped. With or without a leader.

Nobody but the leader changes what steps are made of. An operator leaves a wish in `meta`; the leader looks at `asked`
about twice a second and reads everything again when it has grown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlbuffer.errors import ConfigChanged, RunGone
from rlbuffer.records.states import SettingsState
from rlbuffer.records.step_plan import Drop
from rlbuffer.store.moves.pool import PoolMoves
from rlbuffer.store.records import Meta, PoolEntry
from rlbuffer.store.session import Session, text
from rlbuffer.wire import payload

WISH_FIELDS = ("asked", "draining")
"""Fields of `meta`: how many wishes there were, and since when the run drains."""


class OperatorMoves(PoolMoves, Session):
    """ASK, and DROP without a lease."""

    def ask_config(self, config: Mapping[str, Any], digest: str, *, seen: Meta) -> SettingsState:
        reply = self._ask("config", payload.dumps(dict(config)), digest, seen.revision, seen.wanted_digest)
        status = text(reply[0])
        if status == "CHANGED":
            raise ConfigChanged(
                f"the settings of run {self.run!r} changed in between: they are at revision {text(reply[1])}"
                f"{' and others are asked for' if text(reply[2]) else ''}, not at {seen.revision} as shown. Look again"
            )
        return SettingsState.SAME if status == "SAME" else SettingsState.ASKED

    def ask_drain(self) -> int:
        return int(self._ask_as_seen("drain")[1])

    def ask_undrain(self) -> bool:
        return text(self._ask_as_seen("undrain")[0]) == "OK"

    def _ask_as_seen(self, action: str) -> list[Any]:
        """Asks as long as others ask at the same moment."""
        while True:
            epoch, asked = self.look(lambda client: client.hmget(self.keys.meta, ["epoch", "asked"]))
            reply = self._ask(action, text(epoch or b""), int(asked or 0))
            if text(reply[0]) != "CHANGED":
                return reply

    def wishes(self) -> tuple[int, bool]:
        asked, draining = self.look(lambda client: client.hmget(self.keys.meta, WISH_FIELDS))
        return int(asked or 0), draining is not None

    def is_led(self) -> bool:

        def look(client: Any) -> list[Any]:
            with client.pipeline(transaction=True) as pipe:
                pipe.hget(self.keys.lease, "until")
                pipe.time()
                return list(pipe.execute())

        until, (seconds, micros) = self.look(look)
        return int(until or 0) > int(seconds) * 1000 + int(micros) // 1000

    def tickets_out(self) -> Mapping[str, int]:
        keys = self.keys
        envs = [text(env) for env in self.look(lambda client: client.hkeys(keys.numbers))]

        def count(client: Any) -> list[Any]:
            seconds, micros = client.time()
            now = int(seconds) * 1000 + int(micros) // 1000
            with client.pipeline(transaction=False) as pipe:
                for env in envs:
                    pipe.zcount(keys.tickets(env), f"({now}", "+inf")
                return list(pipe.execute())

        counts = self.look(count) if envs else []
        return {env: int(n) for env, n in sorted(zip(envs, counts, strict=True)) if n}

    def drop_pending(self, drops: Sequence[tuple[Drop, Sequence[PoolEntry]]]) -> int:
        return self._drop("", drops)

    def _ask(self, action: str, *args: Any) -> list[Any]:
        reply = self.move("ask", (self.keys.meta, self.keys.allowance), (action, *args))
        if text(reply[0]) == "GONE":
            raise RunGone(f"run {self.run!r} is not on the server ({self.keys.meta})")
        return reply
