"""Contents of the modelled server: keys with values and expiries, a clock, and a log of what changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from redis._parsers.base import BaseParser
from redis.exceptions import ResponseError

from simulation.values import SortedSet, Stream

Change = tuple[str, bytes, Any]
"""Kind (``hash``, ``xadd``, ``xdel``, ``zset``, ``string``, ``ttl``, ``gone``), key, and field, id or member."""


class Keyspace:
    """Keys and their values; `clock` gives Unix seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.data: dict[bytes, Any] = {}
        self.expiry: dict[bytes, int] = {}
        """key -> Unix milliseconds."""
        self.expired: set[bytes] = set()
        """Keys whose time to live ran out, and that nobody has made permanent since."""
        self.starts = 1
        """Times that the server was started: who it is."""
        self.used, self.limit = 1_000_000, 0
        """Memory, and its limit: 0 for none. Of what is in use only this number is modelled."""
        self.changes: list[Change] = []
        self.waiting: dict[bytes, list[Callable[[], None]]] = {}
        """Stream -> who wants to know of its next entry, once."""

    def now_ms(self) -> int:
        return int(self.clock() * 1000)

    def find(self, key: bytes, kind: type | None = None) -> Any:
        """The value of a key, None when there is none."""
        expiry = self.expiry.get(key)
        if expiry is not None and expiry <= self.now_ms():
            self.delete(key)
            self.expired.add(key)
        value = self.data.get(key)
        if value is not None and kind is not None and type(value) is not kind:
            raise error("WRONGTYPE Operation against a key holding the wrong kind of value")
        return value

    def make(self, key: bytes, kind: type) -> Any:
        """The value of a key, a new one when there is none."""
        value = self.find(key, kind)
        if value is None:
            value = self.data[key] = kind()
        return value

    def delete(self, key: bytes) -> bool:
        self.expiry.pop(key, None)
        if self.data.pop(key, None) is None:
            return False
        self.changes.append(("gone", key, None))
        return True

    def tidy(self, key: bytes) -> None:
        """Empty hashes and sorted sets are no keys; empty streams are."""
        value = self.data.get(key)
        if (
            value is not None
            and not isinstance(value, Stream)
            and not (value.scores if isinstance(value, SortedSet) else value)
        ):
            self.delete(key)

    def announce(self, key: bytes) -> None:
        """Wakes who waits for an entry of a stream."""
        for wake in self.waiting.pop(key, ()):
            wake()


def error(text: str) -> ResponseError:
    """An error reply as redis-py raises it."""
    made: ResponseError = BaseParser.parse_error(text)
    return made
