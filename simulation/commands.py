"""The commands on keys, strings, hashes and sorted sets that the store and its Lua files use, with RESP2 replies, as a
script sees them."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from redis.exceptions import ResponseError

from simulation.command_table import Args, command
from simulation.keyspace import Keyspace
from simulation.values import SortedSet, Stream, bound, number_text

TYPE_NAMES = {bytes: "string", dict: "hash", SortedSet: "zset", Stream: "stream"}


# -- keys --------------------------------------------------------------------------------------------------------------
@command("TIME")
def time(server: Keyspace, args: Args) -> Any:
    now = round(server.clock() * 1e6)
    return [b"%d" % (now // 1_000_000), b"%d" % (now % 1_000_000)]


@command("INFO")
def info(server: Keyspace, args: Args) -> Any:
    facts = b"redis_version:7.2.4\r\nused_memory:%d\r\nmaxmemory:%d\r\n" % (server.used, server.limit)
    return facts + b"maxmemory_policy:noeviction\r\nrun_id:%d\r\n" % server.starts


@command("EXISTS")
def exists(server: Keyspace, args: Args) -> Any:
    return sum(server.find(key) is not None for key in args[1:])


@command("DEL")
@command("UNLINK")
def delete(server: Keyspace, args: Args) -> Any:
    return sum(server.find(key) is not None and server.delete(key) for key in args[1:])


@command("PEXPIRE")
def pexpire(server: Keyspace, args: Args) -> Any:
    if server.find(args[1]) is None:
        return 0
    until = server.now_ms() + int(args[2])
    if b"LT" in args[3:] and server.expiry.get(args[1], until + 1) <= until:
        return 0
    if b"XX" in args[3:] and args[1] not in server.expiry:
        return 0
    server.expiry[args[1]] = until
    server.changes.append(("ttl", args[1], None))
    return 1


@command("PERSIST")
def persist(server: Keyspace, args: Args) -> Any:
    if server.find(args[1]) is None or server.expiry.pop(args[1], None) is None:
        return 0
    server.expired.discard(args[1])
    server.changes.append(("ttl", args[1], None))
    return 1


@command("TYPE")
def type_(server: Keyspace, args: Args) -> Any:
    value = server.find(args[1])
    return "none" if value is None else TYPE_NAMES[type(value)]


@command("RENAME")
def rename(server: Keyspace, args: Args) -> Any:
    value = server.find(args[1])
    if value is None:
        raise ResponseError("no such key")
    expiry = server.expiry.get(args[1])
    server.delete(args[1])
    server.data[args[2]] = value
    server.expiry.pop(args[2], None)
    if expiry is not None:
        server.expiry[args[2]] = expiry
    server.changes.append(("ttl", args[2], None))
    return "OK"


@command("RENAMENX")
def renamenx(server: Keyspace, args: Args) -> Any:
    if server.find(args[2]) is not None:
        return 0
    expiry = server.expiry.get(args[1])
    rename(server, args)
    server.changes.append(("ttl", args[2], expiry))
    return 1


@command("PTTL")
def pttl(server: Keyspace, args: Args) -> Any:
    if server.find(args[1]) is None:
        return -2
    return server.expiry[args[1]] - server.now_ms() if args[1] in server.expiry else -1


@command("SCAN")
def scan(server: Keyspace, args: Args) -> Any:
    options = dict(zip(args[2::2], args[3::2], strict=True))
    pattern = options.get(b"MATCH", b"*").decode()
    return [
        b"0",
        [key for key in list(server.data) if server.find(key) is not None and fnmatchcase(key.decode(), pattern)],
    ]


# -- strings -----------------------------------------------------------------------------------------------------------
@command("GET")
def get(server: Keyspace, args: Args) -> Any:
    return server.find(args[1], bytes)


@command("MGET")
def mget(server: Keyspace, args: Args) -> Any:
    return [server.find(key, bytes) for key in args[1:]]


@command("SET", grows=True)
def set_(server: Keyspace, args: Args) -> Any:
    options = [a.upper() for a in args[3:]]
    if b"NX" in options and server.find(args[1]) is not None:
        return None
    server.data[args[1]] = args[2]
    server.expiry.pop(args[1], None)
    if b"PX" in options:
        server.expiry[args[1]] = server.now_ms() + int(options[options.index(b"PX") + 1])
    server.changes.append(("string", args[1], None))
    return "OK"


# -- hashes ------------------------------------------------------------------------------------------------------------
@command("HSET", grows=True)
def hset(server: Keyspace, args: Args) -> Any:
    if len(args) < 4 or len(args) % 2:
        raise ResponseError("wrong number of arguments for 'hset' command")
    fields = server.make(args[1], dict)
    before = len(fields)
    for i in range(2, len(args), 2):
        fields[args[i]] = args[i + 1]
        server.changes.append(("hash", args[1], args[i]))
    return len(fields) - before


@command("HINCRBY", grows=True)
def hincrby(server: Keyspace, args: Args) -> Any:
    fields = server.make(args[1], dict)
    try:
        value = int(fields.get(args[2], b"0")) + int(args[3])
    except ValueError:
        raise ResponseError("hash value is not an integer") from None
    fields[args[2]] = b"%d" % value
    server.changes.append(("hash", args[1], args[2]))
    return value


@command("HDEL")
def hdel(server: Keyspace, args: Args) -> Any:
    fields = server.find(args[1], dict) or {}
    count = 0
    for name in args[2:]:
        if fields.pop(name, None) is not None:
            count += 1
            server.changes.append(("hash", args[1], name))
    server.tidy(args[1])
    return count


@command("HGET")
def hget(server: Keyspace, args: Args) -> Any:
    return (server.find(args[1], dict) or {}).get(args[2])


@command("HMGET")
def hmget(server: Keyspace, args: Args) -> Any:
    fields = server.find(args[1], dict) or {}
    return [fields.get(name) for name in args[2:]]


@command("HGETALL")
def hgetall(server: Keyspace, args: Args) -> Any:
    return [x for item in (server.find(args[1], dict) or {}).items() for x in item]


@command("HLEN")
def hlen(server: Keyspace, args: Args) -> Any:
    return len(server.find(args[1], dict) or {})


@command("HKEYS")
def hkeys(server: Keyspace, args: Args) -> Any:
    return list(server.find(args[1], dict) or {})


@command("HRANDFIELD")
def hrandfield(server: Keyspace, args: Args) -> Any:
    """Any of them will do: the first."""
    return list(server.find(args[1], dict) or {})[: int(args[2])]


@command("HEXISTS")
def hexists(server: Keyspace, args: Args) -> Any:
    return int(args[2] in (server.find(args[1], dict) or {}))


@command("HSTRLEN")
def hstrlen(server: Keyspace, args: Args) -> Any:
    return len((server.find(args[1], dict) or {}).get(args[2], b""))


# -- sorted sets -------------------------------------------------------------------------------------------------------
@command("ZADD", grows=True)
def zadd(server: Keyspace, args: Args) -> Any:
    at, flags = 2, set()
    while args[at].upper() in (b"XX", b"NX", b"GT", b"LT", b"CH"):
        flags.add(args[at].upper())
        at += 1
    if flags - {b"XX", b"NX"}:
        raise ResponseError(f"the simulation does not model ZADD {flags}")
    members = server.make(args[1], SortedSet)
    added = 0
    for score, member in zip(args[at::2], args[at + 1 :: 2], strict=True):
        is_there = member in members.scores
        if (b"XX" in flags and not is_there) or (b"NX" in flags and is_there):
            continue
        added += members.set(member, bound(score)[0])
        server.changes.append(("zset", args[1], member))
    server.tidy(args[1])
    return added


@command("ZREM")
def zrem(server: Keyspace, args: Args) -> Any:
    members = server.find(args[1], SortedSet)
    return _removed(server, args[1], members, args[2:]) if members else 0


@command("ZREMRANGEBYSCORE")
def zremrangebyscore(server: Keyspace, args: Args) -> Any:
    members = server.find(args[1], SortedSet)
    return _removed(server, args[1], members, [m for _, m in members.within(args[2], args[3])]) if members else 0


def _removed(server: Keyspace, key: bytes, members: SortedSet, names: Sequence[bytes]) -> int:
    count = 0
    for name in names:
        if members.remove(name):
            count += 1
            server.changes.append(("zset", key, name))
    server.tidy(key)
    return count


@command("ZSCORE")
def zscore(server: Keyspace, args: Args) -> Any:
    members = server.find(args[1], SortedSet)
    score = members.scores.get(args[2]) if members else None
    return None if score is None else number_text(score)


@command("ZCARD")
def zcard(server: Keyspace, args: Args) -> Any:
    members = server.find(args[1], SortedSet)
    return len(members.order) if members else 0


@command("ZCOUNT")
def zcount(server: Keyspace, args: Args) -> Any:
    members = server.find(args[1], SortedSet)
    return len(members.within(args[2], args[3])) if members else 0


@command("ZRANGE")
@command("ZREVRANGE")
def zrange(server: Keyspace, args: Args) -> Any:
    members = server.find(args[1], SortedSet)
    items = list(members.order) if members else []
    options = [a.upper() for a in args[4:]]
    if args[0] == b"ZREVRANGE":
        items.reverse()
    start, stop = int(args[2]), int(args[3])
    return _members(items[start:] if stop == -1 else items[start : stop + 1 or None], options)


@command("ZRANGEBYSCORE")
def zrangebyscore(server: Keyspace, args: Args) -> Any:
    members = server.find(args[1], SortedSet)
    items = members.within(args[2], args[3]) if members else []
    options = [a.upper() for a in args[4:]]
    if b"LIMIT" in options:
        at = options.index(b"LIMIT")
        start, count = int(options[at + 1]), int(options[at + 2])
        items = items[start : None if count < 0 else start + count]
    return _members(items, options)


def _members(items: list[tuple[float, bytes]], options: Sequence[bytes]) -> list[bytes]:
    if b"WITHSCORES" not in options:
        return [member for _, member in items]
    return [x for score, member in items for x in (member, number_text(score))]
