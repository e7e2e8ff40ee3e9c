"""Pools of connections: how they pack commands, and which connections they keep."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from sys import getsizeof
from typing import Any

import redis
from redis.connection import ConnectionPool, HiredisRespSerializer, PythonRespSerializer
from redis.sentinel import SentinelConnectionPool

PACK_CUTOFF_BYTES = 6000
"""Arguments above this are sent uncopied."""


class Packer(PythonRespSerializer):
    """Packs a command with a large argument in Python, which copies none, and any other one in C.

    hiredis copies large arguments (1.14 CPU-seconds a GB; in Python 0.26); Python takes a microsecond or two for every
    small one.
    """

    def __init__(self) -> None:
        super().__init__(PACK_CUTOFF_BYTES, ConnectionPool().get_encoder().encode)
        self._small: Any = HiredisRespSerializer()

    def pack(self, *args: Any) -> Any:
        """The command in pieces. Raises redis.DataError for an argument that no command can have."""
        # An object is a little larger than the bytes that it holds.
        if max(map(getsizeof, args)) <= PACK_CUTOFF_BYTES:
            with suppress(redis.DataError):  # the other packer says which argument it is
                return self._small.pack(*args)
        return super().pack(*args)  # type: ignore[no-untyped-call]


class FreshPool(ConnectionPool):
    """Keeps no connection that was made before a loss: it may lead to a server that is not the primary any more."""

    is_stale: Callable[[Any], bool] = staticmethod(lambda connection: False)

    def release(self, connection: Any) -> None:
        if self.is_stale(connection):
            connection.disconnect()
        super().release(connection)


class FollowingPool(FreshPool, SentinelConnectionPool):
    """The same, of connections to the primary that sentinels name when each is made."""
