"""LEASE: who leads the run, and what only the leader may say about it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from importlib import resources
from types import MappingProxyType
from typing import Any

from rlbuffer.config.batcher import remembered_steps
from rlbuffer.errors import RunGone
from rlbuffer.records.checks import MAX_COUNT
from rlbuffer.store.records import Lease
from rlbuffer.store.server.script import Script
from rlbuffer.store.session import MINIMUM_TOMBSTONE_MS, Session, text
from rlbuffer.wire import payload


def tombstone_ms(config: Mapping[str, Any]) -> int:
    """The time that tombstones are kept: late parts of a group can come for as long as the group could have waited."""
    timeout = config.get("group_timeout_seconds")
    milliseconds = 2000 * timeout if isinstance(timeout, int | float) else 0
    return max(MINIMUM_TOMBSTONE_MS, round(min(milliseconds, MAX_COUNT)))


def tombstone_steps(config: Mapping[str, Any]) -> int:
    """Number of steps that tombstones are kept for: as many as could train what was sampled before."""
    ages = [config.get("max_age"), *(env.get("max_age") for env in dict(config.get("envs") or {}).values())]
    return remembered_steps(max((age for age in ages if isinstance(age, int)), default=0))


class LeaseMoves(Session):
    """The leader's fence and its announcements."""

    _tokens: dict[str, int]
    """owner -> the token that this process last heard of."""
    _allowances_sent: int = 0

    def lease(self, owner: str, *, ttl_seconds: float) -> Lease:
        status, token, holder, remaining = self._say("acquire", owner, round(1000 * ttl_seconds))
        number = int(token)
        is_held = text(status) != "HELD"
        # An acquisition whose reply was lost is answered as a renewal when it is repeated. To this process it is new.
        renewed = text(status) == "RENEWED" and self._tokens.get(owner) == number
        if is_held:
            self._tokens[owner] = number
        return Lease(
            token=number, held=is_held, owner=text(holder), remaining_seconds=int(remaining) / 1000, renewed=renewed
        )

    def release_lease(self, owner: str) -> None:
        self._say("release", owner)
        self._tokens.pop(owner, None)

    def load_scripts(self) -> None:
        folder = resources.files("rlbuffer.store") / "scripts"
        names = sorted(file.name.removesuffix(".lua") for file in folder.iterdir() if file.name.endswith(".lua"))
        digests = [self.script(name).sha for name in names]
        known = self.look(lambda client: client.script_exists(*digests))
        for name, is_known in zip(names, known, strict=True):
            if not is_known:
                self.look(partial(_load, script=self.script(name)))

    def set_config(self, token: int, config: Mapping[str, Any], digest: str, *, settles: str = "") -> int:
        reply = self._as_leader("config", token, payload.dumps(dict(config)), digest, settles)
        self.tombstone_ms, self.tombstone_steps = tombstone_ms(config), tombstone_steps(config)
        return int(reply[1])

    def refuse_config(self, token: int, digest: str, reason: str) -> None:
        self._as_leader("refuse", token, digest, reason)

    def set_error(self, token: int, message: str) -> None:
        self._as_leader("error", token, message)

    def set_allowances(self, token: int, allowances: Mapping[str, int]) -> None:
        # Counted: one from a connection that was given up may arrive behind a newer one.
        self._allowances_sent += 1
        words = (word for env, n in allowances.items() for word in (env, max(0, int(n))))
        self._as_leader("allow", token, self._allowances_sent, *words)

    def set_ended(self, token: int, step: int | None, written: Mapping[bytes, bytes] = MappingProxyType({})) -> bool:
        seen = (word for pair in written.items() for word in pair)
        return text(self._as_leader("end", token, "" if step is None else step, *seen)[0]) == "OK"

    def _as_leader(self, action: str, token: int, *args: Any) -> list[Any]:
        reply = self._say(action, token, *args)
        if text(reply[0]) == "FENCED":
            raise self.lost(reply[1])
        return reply

    def _say(self, action: str, *args: Any) -> list[Any]:
        keys = self.keys
        where = (keys.lease, keys.meta, keys.allowance, keys.pool, keys.ends)
        reply = self.move("lease", where, (action, *args))
        if text(reply[0]) == "GONE":
            raise RunGone(f"run {self.run!r} is not on the server ({keys.meta})")
        return reply


def _load(client: Any, script: Script) -> None:
    client.script_load(script.text)
