"""Fields of hashes received straight into one block of memory, where their sizes are known before.

redis-py's parser copies every value twice, into memory that is new each time. Here the reply's layout follows from the
sizes, so the bytes land where they stay, and only the bytes between them are compared. A reply of another layout is
left to the parser, with what has arrived of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import redis

from rlbuffer.packing.arena import Arena
from rlbuffer.store.server.cluster import Routed
from rlbuffer.store.server.gathering import connections


def receive_fields(
    client: redis.Redis, sizes: Mapping[str, Mapping[str, int]], further: str, arena: Arena
) -> list[Any]:
    """Reads fields of several hashes, and one `further` field of each, in one round trip.

    Of a cluster all shards are asked before the first answers.

    Args:
        sizes: key -> field -> bytes, as far as the caller knows.
        arena: memory for the fields, used where all of them have these sizes.

    Returns:
        As of a pipeline that raises nothing: for every key the values of its fields, then for every key that of the
        further field. Values are bytes or read-only views; None where there is none.

    Raises:
        redis.RedisError: the connection broke, or nothing came for its timeout.
    """
    parts = client.split(sizes) if isinstance(client, Routed) else [(client, sizes)]
    with connections([node.connection_pool for node, _ in parts]) as opened:
        try:
            for connection, (_, its) in zip(opened, parts, strict=True):
                connection.send_packed_command([_request(its, further)])
            answers = [
                (its, _received(connection, its, arena)) for connection, (_, its) in zip(opened, parts, strict=True)
            ]
        except OSError as error:
            kind = redis.TimeoutError if isinstance(error, TimeoutError) else redis.ConnectionError
            raise kind(f"while fields were received: {error}") from error
    values = {key: reply for its, replies in answers for key, reply in zip(its, replies, strict=False)}
    furthers = {key: reply for its, replies in answers for key, reply in zip(its, replies[len(its) :], strict=True)}
    return [*map(values.__getitem__, sizes), *map(furthers.__getitem__, sizes)]


def _received(connection: Any, sizes: Mapping[str, Mapping[str, int]], arena: Arena) -> list[Any]:
    """The replies to :func:`_request`."""
    marks, places, total = _layout(sizes)
    block = arena.block(total)((total,), np.uint8).data
    begun = _receive(connection._sock, block, marks)
    reply = connection._parser.read_response  # the connection's own raises what the server refuses, and is slower
    if begun is not None:
        connection._parser._reader.feed(begun)
        return [reply() for _ in range(2 * len(sizes))]
    furthers = [reply() for _ in sizes]
    values = (block[start:end].toreadonly() for start, end in places)
    return [*([next(values) for _ in fields] for fields in sizes.values()), *furthers]


def _layout(sizes: Mapping[str, Mapping[str, int]]) -> tuple[list[tuple[int, bytes]], list[tuple[int, int]], int]:
    """The bytes between fields, each with its offset; start and end of every field; bytes in all."""
    marks, places, at, mark = [], [], 0, b""
    for fields in sizes.values():
        mark += b"*%d\r\n" % len(fields)
        for size in fields.values():
            mark += b"$%d\r\n" % size
            marks.append((at, mark))
            at += len(mark)
            places.append((at, at + size))
            at += size
            mark = b"\r\n"
    marks.append((at, mark))
    return marks, places, at + len(mark)


def _request(sizes: Mapping[str, Mapping[str, int]], further: str) -> bytes:
    """An HMGET for every key, then an HGET for every key."""
    last, keys = _bulk(further), [_bulk(key) for key in sizes]
    commands = [
        b"*%d\r\n$5\r\nHMGET\r\n%b%b" % (2 + len(fields), key, b"".join(map(_bulk, fields)))
        for key, fields in zip(keys, sizes.values(), strict=True)
    ]
    return b"".join([*commands, *[b"*3\r\n$4\r\nHGET\r\n%b%b" % (key, last) for key in keys]])


def _bulk(text: str) -> bytes:
    data = text.encode()
    return b"$%d\r\n%b\r\n" % (len(data), data)


def _receive(sock: Any, block: memoryview, marks: Sequence[tuple[int, bytes]]) -> bytes | None:
    """Fills the block. -> None; as soon as another byte than expected stands at a mark, what has arrived: more need not
    come."""
    at, number = 0, 0
    while at < len(block):
        size = sock.recv_into(block[at:])
        if not size:
            raise ConnectionResetError("the server closed the connection")
        at += size
        while number < len(marks) and marks[number][0] < at:
            start, mark = marks[number]
            arrived = block[start : min(start + len(mark), at)]
            if arrived != mark[: len(arrived)]:
                return bytes(block[:at])
            if len(arrived) < len(mark):
                break
            number += 1
    return None
