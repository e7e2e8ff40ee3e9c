"""The in-process server gives the store's commands the replies that a real one gives, shapes and types included."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from rlbuffer.config.settings import ServerSettings
from rlbuffer.store.server.connection import Connection

pytestmark = pytest.mark.server

COMMANDS: list[tuple[str, Callable[[Any, str], Any]]] = [
    ("xadd with an id", lambda c, k: c.xadd(f"{k}s", {"a": b"\x00\xff"}, id="1-0")),
    ("xadd second", lambda c, k: c.xadd(f"{k}s", {"a": 1, "b": "x"}, id="1-1")),
    ("xadd with a used id", lambda c, k: c.xadd(f"{k}s", {"a": 1}, id="1-1")),
    ("xadd 0-0", lambda c, k: c.xadd(f"{k}s", {"a": 1}, id="0-0")),
    ("xread", lambda c, k: [*c.xread({f"{k}s": "0-0"}).values()]),
    ("xread nothing", lambda c, k: c.xread({f"{k}s": "9-0"})),
    ("xread blocking, nothing", lambda c, k: c.xread({f"{k}s": "9-0"}, block=20)),
    ("xrange", lambda c, k: c.xrange(f"{k}s", "-", "+", count=1)),
    ("xrevrange", lambda c, k: c.xrevrange(f"{k}s", count=1)),
    ("xdel", lambda c, k: (c.xdel(f"{k}s", "1-1"), c.xdel(f"{k}s", "1-1"))),
    ("xtrim", lambda c, k: (c.xtrim(f"{k}s", minid="1-1", approximate=False), c.xlen(f"{k}s"))),
    ("hset", lambda c, k: c.hset(f"{k}h", mapping={"0": b"abc", "1": b""})),
    ("hmget", lambda c, k: c.hmget(f"{k}h", ["0", "1", "2"])),
    ("hmget of nothing", lambda c, k: c.hmget(f"{k}none", ["0"])),
    ("hgetall", lambda c, k: (c.hgetall(f"{k}h"), c.hgetall(f"{k}none"))),
    ("hstrlen", lambda c, k: (c.hstrlen(f"{k}h", "0"), c.hstrlen(f"{k}h", "2"), c.hlen(f"{k}h"))),
    ("hincrby", lambda c, k: c.hincrby(f"{k}h", "n", 2**40)),
    ("pexpire, persist", lambda c, k: (c.pexpire(f"{k}h", 60_000), c.persist(f"{k}h"), c.pttl(f"{k}h"))),
    ("pexpire of nothing", lambda c, k: (c.pexpire(f"{k}none", 60_000), c.pttl(f"{k}none"))),
    ("zadd", lambda c, k: (c.zadd(f"{k}z", {"a": 1, "b": 2.5}), c.zadd(f"{k}z", {"c": 1}, xx=True))),
    ("zrange", lambda c, k: (c.zrange(f"{k}z", 0, -1), c.zrange(f"{k}z", 0, -1, withscores=True))),
    ("zrangebyscore", lambda c, k: c.zrangebyscore(f"{k}z", "-inf", 2, start=0, num=5)),
    ("unlink", lambda c, k: c.unlink(f"{k}z", f"{k}none")),
    ("set nx", lambda c, k: (c.set(f"{k}x", 1, nx=True, px=60_000), c.set(f"{k}x", 2, nx=True))),
    ("wrong type", lambda c, k: c.hget(f"{k}x", "f")),
    ("transaction", lambda c, k: c.pipeline(transaction=True).hset(f"{k}t", "a", 1).pexpire(f"{k}t", 9999).execute()),
    ("script: types", lambda c, k: c.eval("return {1, 'a', {2, false}, 3.7, {}}", 0)),
    ("script: hgetall", lambda c, k: c.eval("return redis.call('HGETALL', KEYS[1])", 1, f"{k}h")),
    ("script: missing", lambda c, k: c.eval("return redis.call('HGET', KEYS[1], 'zz') == false", 1, f"{k}h")),
    ("script: stream", lambda c, k: c.eval("return redis.call('XADD', KEYS[1], ARGV[1], 'a', 1)", 1, f"{k}s", "2-3")),
    ("script: nothing", lambda c, k: c.eval("return nil", 0)),
    ("script: json", lambda c, k: c.eval("return cjson.decode(ARGV[1])[2]", 0, '["a", "b"]')),
    ("evalsha unknown", lambda c, k: c.evalsha("0" * 40, 0)),
]


def outcome(command: Callable[[Any, str], Any], client: redis.Redis, key: str) -> object:
    try:
        return command(client, key)
    except redis.RedisError as error:
        return type(error)


def test_both_servers_give_the_same_replies(redis_url: str, run_name: str, tmp_path: Path) -> None:
    connections = [
        Connection(url, home=tmp_path, server=ServerSettings(), name="parity") for url in (redis_url, "memory://")
    ]
    key = f"{{{run_name}}}:"  # one slot of a cluster
    try:
        replies = [{name: outcome(command, c.client, key) for name, command in COMMANDS} for c in connections]
    finally:
        connections[0].client.unlink(*(f"{key}{suffix}" for suffix in "shtzx"))
        for c in connections:
            c.close()
    assert replies[1] == replies[0]
    types = [{name: repr(reply) for name, reply in each.items()} for each in replies]
    assert types[1] == types[0], "1 and True, or 1 and 1.0, are equal but not the same"
