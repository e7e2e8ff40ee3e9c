"""Fields of hashes received straight into memory that the caller names, where their sizes are known before.

redis-py's parser copies every value twice, into memory that is new each time. Here the reply's layout follows from the
sizes, so the bytes land where they stay, a field in as many pieces as the caller likes, and only the bytes between
fields are compared. A reply of another layout is left to the parser, with what has arrived of it.
"""

from __future__ import annotations

import ssl
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, islice, pairwise
from typing import Any

import redis

from rlbuffer.store.received import Checksum, FieldRequest, InPlace
from rlbuffer.store.server.cluster import Routed
from rlbuffer.store.server.gathering import connections

PIECES_AT_ONCE = 64
"""Pieces that one system call gets. It fills some 200 KB of them; the others go to the next call."""


def receive_fields(client: redis.Redis, request: FieldRequest, further: str, checksum: Checksum) -> list[Any]:
    """Reads fields of several hashes, and one `further` field of each, in one round trip.

    Of a cluster all shards are asked before the first answers.

    Args:
        request: key -> its fields. Their memory holds anything where a reply is not what the sizes say.
        checksum: computed of a field's memory as soon as it is filled: it is still in the cache then.

    Returns:
        As of a pipeline that raises nothing: for every key the values of its fields, or that they are in place, then
        for every key that of the further field. Values are bytes; None where there is none.

    Raises:
        redis.RedisError: the connection broke, or nothing came for its timeout.
    """
    parts = client.split(request) if isinstance(client, Routed) else [(client, request)]
    with connections([node.connection_pool for node, _ in parts]) as opened:
        try:
            for connection, (_, its) in zip(opened, parts, strict=True):
                connection.send_packed_command([_commands(its, further)])
            answers = [
                (its, _received(connection, its, checksum)) for connection, (_, its) in zip(opened, parts, strict=True)
            ]
        except OSError as error:
            kind = redis.TimeoutError if isinstance(error, TimeoutError) else redis.ConnectionError
            raise kind(f"while fields were received: {error}") from error
    values = {key: reply for its, replies in answers for key, reply in zip(its, replies, strict=False)}
    furthers = {key: reply for its, replies in answers for key, reply in zip(its, replies[len(its) :], strict=True)}
    return [*map(values.__getitem__, request), *map(furthers.__getitem__, request)]


def _received(connection: Any, request: FieldRequest, checksum: Checksum) -> list[Any]:
    """The replies to :func:`_commands`."""
    begun, checksums = _receive(connection._sock, request, checksum)
    reply = connection._parser.read_response  # the connection's own raises what the server refuses, and is slower
    if begun is not None:
        connection._parser._reader.feed(begun)
        return [reply() for _ in range(2 * len(request))]
    of_fields = iter(checksums)
    in_place = [InPlace([*islice(of_fields, len(fields))]) for fields in request.values()]
    return [*in_place, *[reply() for _ in request]]


def _commands(request: FieldRequest, further: str) -> bytes:
    """An HMGET for every key, then an HGET for every key."""
    last, keys = _bulk(further), [_bulk(key) for key in request]
    commands = [
        b"*%d\r\n$5\r\nHMGET\r\n%b%b" % (2 + len(fields), key, b"".join([_bulk(field) for field, _, _ in fields]))
        for key, fields in zip(keys, request.values(), strict=True)
    ]
    return b"".join([*commands, *[b"*3\r\n$4\r\nHGET\r\n%b%b" % (key, last) for key in keys]])


@lru_cache(4096)
def _bulk(text: str) -> bytes:
    data = text.encode()
    return b"$%d\r\n%b\r\n" % (len(data), data)


def _receive(sock: Any, request: FieldRequest, checksum: Checksum) -> tuple[bytes | None, list[int]]:
    """Fills the memory for the fields. -> None, and the checksum of each; as soon as another byte than expected stands
    between fields, what has arrived: more need not come."""
    marks = _marks(request)
    expected, arrived = b"".join(marks), memoryview(bytearray(sum(map(len, marks))))
    begins = [0, *accumulate(map(len, marks))]
    memories = [memory for fields in request.values() for _, _, memory in fields]
    pieces, places = list[memoryview](), list[int]()  # places of the marks among the pieces
    for (begin, end), memory in zip(pairwise(begins), [*memories, ()], strict=True):
        places.append(len(pieces))
        pieces += (arrived[begin:end], *memory)
    ends = [*accumulate(map(len, pieces))]
    checksums: list[int] = []
    total = checked = number = begun = 0
    while number < len(pieces):
        total += _take(sock, [pieces[number][begun:], *pieces[number + 1 : number + PIECES_AT_ONCE]])
        number = bisect_right(ends, total)
        begun = total - (ends[number - 1] if number else 0)
        mark = bisect_left(places, number)  # the next that is not there as a whole
        seen = begins[mark] + (begun if places[mark : mark + 1] == [number] else 0)
        if arrived[checked:seen] != expected[checked:seen]:
            return b"".join([*pieces[:number], *[piece[:begun] for piece in pieces[number : number + 1]]]), []
        checked = seen
        whole = mark if places[mark : mark + 1] == [number] else mark - 1
        checksums += map(checksum, memories[len(checksums) : whole])
    return None, checksums


def _marks(request: FieldRequest) -> list[bytes]:
    """The bytes of the reply before each field, and behind the last one."""
    marks, end = [], b""
    for fields in request.values():
        end += b"*%d\r\n" % len(fields)
        for _, size, _ in fields:
            marks.append(b"%b$%d\r\n" % (end, size))
            end = b"\r\n"
    return [*marks, end]


def _take(sock: Any, pieces: Sequence[memoryview]) -> int:
    """Bytes that one call has put into the pieces. A TLS socket fills one at a time."""
    size: int = sock.recv_into(pieces[0]) if isinstance(sock, ssl.SSLSocket) else sock.recvmsg_into(pieces)[0]
    if not size:
        raise ConnectionResetError("the server closed the connection")
    return size
