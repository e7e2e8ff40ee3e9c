"""The commands on streams that the store and its Lua files use, with RESP2 replies, as a script sees them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redis.exceptions import ResponseError

from simulation.command_table import Args, command
from simulation.keyspace import Keyspace
from simulation.values import LARGEST, Stream, StreamId, stream_id


@command("XADD", grows=True)
def xadd(server: Keyspace, args: Args) -> Any:
    key, at, cap = args[1], 2, -1
    if args[at].upper() == b"MAXLEN":
        at += 2 if args[at + 1] in (b"~", b"=") else 1
        cap, at = int(args[at]), at + 1
    stream = server.find(key, Stream)
    given, fields = args[at], list(args[at + 1 :])
    if not fields or len(fields) % 2:
        raise ResponseError("wrong number of arguments for 'xadd' command")
    last = stream.last if stream else (0, 0)
    if given == b"*":
        if last == (LARGEST, LARGEST):
            raise ResponseError("The stream has exhausted the last possible ID, unable to add more items")
        following = (last[0], last[1] + 1) if last[1] < LARGEST else (last[0] + 1, 0)
        entry_id = max((server.now_ms(), 0), following)
    else:
        entry_id = stream_id(given)
    if stream is None:
        fresh = Stream()
        fresh.add(entry_id, fields)
        server.data[key] = stream = fresh
    else:
        stream.add(entry_id, fields)
    server.changes.append(("xadd", key, entry_id))
    if cap >= 0 and len(stream.ids) > cap:
        _trim(server, key, stream, stream.ids[: len(stream.ids) - cap])
    server.announce(key)
    return _text(entry_id)


@command("XDEL")
def xdel(server: Keyspace, args: Args) -> Any:
    stream = server.find(args[1], Stream)
    if stream is None:
        return 0
    count = 0
    for entry_id in [stream_id(name) for name in args[2:]]:
        if stream.remove(entry_id):
            count += 1
            server.changes.append(("xdel", args[1], entry_id))
    return count


@command("XTRIM")
def xtrim(server: Keyspace, args: Args) -> Any:
    stream = server.find(args[1], Stream)
    limit = args[4] if args[3] in (b"~", b"=") else args[3]
    if stream is None:
        return 0
    if args[2].upper() == b"MINID":
        gone = [entry_id for entry_id in stream.ids if entry_id < stream_id(limit)]
    else:
        gone = stream.ids[: max(0, len(stream.ids) - int(limit))]
    _trim(server, args[1], stream, gone)
    return len(gone)


def _trim(server: Keyspace, key: bytes, stream: Stream, gone: list[StreamId]) -> None:
    for entry_id in gone:
        stream.remove(entry_id)
        server.changes.append(("xdel", key, entry_id))


@command("XINFO")
def xinfo(server: Keyspace, args: Args) -> Any:
    stream = server.find(args[2], Stream)
    if stream is None:
        raise ResponseError("no such key")
    return [b"length", len(stream.ids), b"last-generated-id", _text(stream.last)]


@command("XLEN")
def xlen(server: Keyspace, args: Args) -> Any:
    stream = server.find(args[1], Stream)
    return len(stream.ids) if stream else 0


@command("XRANGE")
def xrange(server: Keyspace, args: Args) -> Any:
    return _ranged(server, args, args[2], args[3], 1)


@command("XREVRANGE")
def xrevrange(server: Keyspace, args: Args) -> Any:
    return _ranged(server, args, args[3], args[2], -1)


def _ranged(server: Keyspace, args: Args, low: bytes, high: bytes, direction: int) -> Any:
    stream = server.find(args[1], Stream)
    if stream is None:
        return []
    ids = stream.between(_exclusive(low, 1), _exclusive(high, -1))[::direction]
    if len(args) > 4:
        ids = ids[: int(args[5])]
    return _entries(stream, ids)


def _exclusive(text: bytes, step: int) -> StreamId:
    missing = 0 if step > 0 else LARGEST
    if not text.startswith(b"("):
        return stream_id(text, missing=missing)
    first, second = stream_id(text[1:], missing=missing)
    return first, second + step


@command("XREAD")
def xread(server: Keyspace, args: Args) -> Any:
    """BLOCK is the client's business here (simulation.client): it asks again when the stream has grown."""
    words = [a.upper() for a in args]
    count = int(args[words.index(b"COUNT") + 1]) if b"COUNT" in words else None
    names = args[words.index(b"STREAMS") + 1 :]
    replies = []
    for key, after in zip(names[: len(names) // 2], names[len(names) // 2 :], strict=True):
        stream = server.find(key, Stream)
        ids = stream.after(stream_id(after))[:count] if stream is not None else []
        if ids:
            replies.append([key, _entries(stream, ids)])
    return replies or None


def _entries(stream: Stream, ids: Sequence[StreamId]) -> list[Any]:
    return [[_text(entry_id), list(stream.entries[entry_id])] for entry_id in ids]


def _text(entry_id: StreamId) -> bytes:
    return b"%d-%d" % entry_id
