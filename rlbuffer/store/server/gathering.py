"""Connections that pack commands as fast as may be, and send the pieces of several of them at once.

redis-py packs in C, where hiredis copies large arguments (1.14 CPU-seconds a GB), or in Python (0.26), where every
small one takes a microsecond or two. It sends one piece after the other: a push has two for each payload, so most of
its time went into system calls. A TLS socket encrypts piece by piece and keeps redis-py's way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from sys import getsizeof
from typing import Any

import redis
import redis.connection
from redis.connection import HiredisRespSerializer, PythonRespSerializer

PACK_CUTOFF_BYTES = 6000
"""Arguments above this are sent uncopied."""
MOST_PIECES = 512
"""Pieces of one system call; systems take 1,024."""


class Packer(PythonRespSerializer):
    """Packs a command with a large argument in Python, which copies none, and any other one in C."""

    def __init__(self, encode: Callable[[Any], Any]) -> None:
        super().__init__(PACK_CUTOFF_BYTES, encode)
        self._small: Any = HiredisRespSerializer()

    def pack(self, *args: Any) -> Any:
        """The command in pieces. Raises redis.DataError for an argument that no command can have."""
        # An object is a little larger than the bytes that it holds.
        if max(map(getsizeof, args)) <= PACK_CUTOFF_BYTES:
            with suppress(redis.DataError):  # the other packer says which argument it is
                return self._small.pack(*args)
        return super().pack(*args)  # type: ignore[no-untyped-call]


class _Gathering:
    """Mixed into a connection of redis-py."""

    _sock: Any

    def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        """Sends a command that is packed already, as a string or as pieces."""
        pieces = command if isinstance(command, str) or len(command) < 2 else self._left(command)
        super().send_packed_command(pieces, check_health=check_health)  # type: ignore[misc]

    def _left(self, pieces: Sequence[Any]) -> Iterator[memoryview]:
        """Sends pieces, and yields the end of each that the socket took in part. redis-py sends that before it goes on,
        and takes every error of both for its own."""
        views = [memoryview(piece).cast("B") for piece in pieces]
        at = 0
        while at < len(views):
            sent = self._sock.sendmsg(views[at : at + MOST_PIECES])
            while at < len(views) and sent >= views[at].nbytes:
                sent -= views[at].nbytes
                at += 1
            if sent:
                yield views[at][sent:]
                at += 1


class Tcp(_Gathering, redis.connection.Connection):
    """A connection over TCP, which gathers."""


class _Unix(_Gathering, redis.connection.UnixDomainSocketConnection):
    pass


GATHERING: dict[type[Any], type[Any]] = {
    redis.connection.Connection: Tcp,
    redis.connection.UnixDomainSocketConnection: _Unix,
}
"""Class of redis-py -> the same, which gathers."""


class FreshPool(redis.connection.ConnectionPool):
    """Keeps no connection that was made before a loss: it may lead to a server that is not the primary any more."""

    is_stale: Callable[[Any], bool] = staticmethod(lambda connection: False)

    def release(self, connection: Any) -> None:
        if self.is_stale(connection):
            connection.disconnect()
        super().release(connection)


@contextmanager
def connections(pools: Sequence[Any]) -> Iterator[list[Any]]:
    """A connection of each pool, all before anything is sent. An error closes them: replies may be on the way."""
    taken: list[Any] = []
    try:
        for pool in pools:
            taken.append(pool.get_connection())
        yield taken
    except BaseException:
        for connection in taken:
            connection.disconnect()
        raise
    finally:
        for pool, connection in zip(pools, taken, strict=False):
            pool.release(connection)
