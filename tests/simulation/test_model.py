"""The modelled server answers as a real one: the same random commands, through redis-py and through Lua."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import redis

from rlbuffer.config.settings import ServerSettings
from rlbuffer.errors import ServerUnreachable
from rlbuffer.store.server import embedded
from rlbuffer.store.server.connection import Connection
from simulation.client import SimulatedClient
from simulation.lua import Engine
from simulation.server import Server

pytestmark = pytest.mark.server

COMMANDS_PER_RUN = 400
LUA = """#!lua
local out = {}
local reply = redis.call(unpack(ARGV))
if type(reply) == 'table' and reply.ok then return {'status', reply.ok} end
if reply == false then return {'false'} end
if type(reply) == 'number' then return {'number', reply, tostring(reply)} end
return {type(reply), reply}
"""


class Direct:
    """The shortest wire: no network."""

    def __init__(self, model: Server) -> None:
        self.model = model

    def round_trip(self, commands: Sequence[Sequence[bytes]], *, is_transaction: bool) -> list[Any]:
        return self.model.execute(commands, is_transaction=is_transaction)

    def round_trip_blocking(self, command: Sequence[bytes], key: bytes, seconds: float) -> Any:
        return self.model.execute((command,))[0]


def random_command(dice: random.Random, tag: str) -> list[Any]:
    """A command of the kinds that the store and its Lua files send."""
    key = tag + dice.choice(("h", "h", "s", "s", "z", "z", "t", "none"))
    field = dice.choice("abc")
    number = dice.choice((0, 1, 2, 7, -3))
    entry = f"{dice.randint(0, 6)}-{dice.randint(0, 3)}"
    score = dice.choice(("0", "1", "2", "3.5", "-1", "1700000000123"))
    low, high = dice.choice(("-inf", "0", "(1", "1")), dice.choice(("+inf", "2", "(3.5", "3.5"))
    makers: list[Callable[[], list[Any]]] = [
        lambda: ["HSET", key, field, number, dice.choice("abc"), "x"],
        lambda: ["HINCRBY", key, field, number],
        lambda: ["HDEL", key, field, dice.choice("abc")],
        lambda: ["HGET", key, field],
        lambda: ["HMGET", key, "a", "b", "zz"],
        lambda: ["HGETALL", key],
        lambda: ["HLEN", key],
        lambda: ["HRANDFIELD", key, 9],  # more than there are: all
        lambda: ["HEXISTS", key, field],
        lambda: ["HSTRLEN", key, field],
        lambda: ["XADD", key, entry, "f", number, "g", ""],
        lambda: ["XADD", key, entry, "f", number],
        lambda: ["XADD", key, "MAXLEN", dice.choice((2, 100)), entry, "f", number],
        lambda: ["XDEL", key, entry, f"{number}-0"],
        lambda: ["XTRIM", key, "MINID", entry],
        lambda: ["XLEN", key],
        lambda: ["XRANGE", key, dice.choice(("-", entry, "2")), dice.choice(("+", entry, "4"))],
        lambda: ["XRANGE", key, "-", "+", "COUNT", 2],
        lambda: ["XREVRANGE", key, "+", "-", "COUNT", dice.choice((1, 3))],
        lambda: ["XREAD", "COUNT", dice.choice((1, 9)), "STREAMS", key, entry],
        lambda: ["ZADD", key, score, field],
        lambda: ["ZADD", key, score, field, number, dice.choice("xyz")],
        lambda: ["ZADD", key, "XX", score, field],
        lambda: ["ZREM", key, field, "x"],
        lambda: ["ZSCORE", key, field],
        lambda: ["ZCARD", key],
        lambda: ["ZCOUNT", key, low, high],
        lambda: ["ZRANGE", key, 0, -1],
        lambda: ["ZRANGE", key, 0, dice.choice((-1, 0, 2)), "WITHSCORES"],
        lambda: ["ZREVRANGE", key, 0, -1, "WITHSCORES"],
        lambda: ["ZRANGEBYSCORE", key, low, high],
        lambda: ["ZRANGEBYSCORE", key, low, high, "LIMIT", 1, 2],
        lambda: ["ZREMRANGEBYSCORE", key, low, dice.choice(("0", "(1"))],
        lambda: ["SET", key, number],
        lambda: ["SET", key, number, "NX"],
        lambda: ["GET", key],
        lambda: ["EXISTS", key, tag + "h"],
        lambda: ["DEL", key] if dice.random() < 0.3 else ["EXISTS", key],
        lambda: ["UNLINK", key, tag + "z"] if dice.random() < 0.2 else ["EXISTS", key],
        lambda: ["PERSIST", key],
        lambda: ["PEXPIRE", key, 10**9],
        lambda: ["RENAME", key, key] if dice.random() < 0.5 else ["RENAME", f"{tag}none", key],
        lambda: ["RENAME", key, f"{tag}renamed"] if dice.random() < 0.5 else ["PTTL", f"{tag}other"],
        lambda: ["RENAME", f"{tag}renamed", key] if dice.random() < 0.5 else ["EXISTS", f"{tag}renamed"],
    ]
    return dice.choice(makers)()


def answer(call: Callable[[], Any]) -> Any:
    """A reply, or an error by its code: messages differ from version to version."""
    try:
        return plain(call())
    except redis.ResponseError as error:
        return "error", error.status_code or "ERR"


def plain(reply: Any) -> Any:
    """Lists and tuples are one, as for the store."""
    if isinstance(reply, list | tuple):
        return [plain(item) for item in reply]
    if isinstance(reply, dict):
        return {key: plain(value) for key, value in reply.items()}
    return reply


@pytest.fixture(scope="module")
def real() -> Iterator[redis.Redis]:
    home = Path(tempfile.mkdtemp(prefix="rlb-"))
    try:
        running = embedded.ensure(home, ServerSettings(appendfsync="no"))
    except ServerUnreachable as error:
        if os.environ.get("CI") == "true":
            pytest.fail(str(error))
        pytest.skip(str(error))
    with Connection(running.address, home=home, server=ServerSettings(), name="test") as connection:
        yield connection.client
    running.release()
    shutil.rmtree(home, ignore_errors=True)


def model() -> SimulatedClient:
    return SimulatedClient(Direct(Server(lambda: 1_000_000.0, Engine())))


@pytest.mark.parametrize("seed", range(10))
def test_commands_are_answered_alike(real: redis.Redis, seed: int) -> None:
    dice, tag, modelled = random.Random(seed), f"{{{uuid.uuid4().hex}}}", model()
    for _ in range(COMMANDS_PER_RUN):
        command = random_command(dice, tag)
        there = answer(lambda command=command: real.execute_command(*command))
        assert answer(lambda command=command: modelled.execute_command(*command)) == there, command


@pytest.mark.parametrize("seed", range(100, 106))
def test_commands_of_scripts_are_answered_alike(real: redis.Redis, seed: int) -> None:
    dice, tag, modelled = random.Random(seed), f"{{{uuid.uuid4().hex}}}", model()
    here, there = modelled.script_load(LUA), real.script_load(LUA)
    assert here == there
    for _ in range(COMMANDS_PER_RUN):
        command = random_command(dice, tag)
        expected = answer(lambda command=command: real.evalsha(there, 1, tag, *command))
        found = answer(lambda command=command: modelled.evalsha(here, 1, tag, *command))
        if expected[0] == "error":
            assert found[0] == "error", command
        else:
            assert found == expected, command


@pytest.mark.parametrize("seed", range(200, 204))
def test_pipelines_are_answered_alike(real: redis.Redis, seed: int) -> None:
    dice, tag, modelled = random.Random(seed), f"{{{uuid.uuid4().hex}}}", model()
    for _ in range(60):
        commands = [random_command(dice, tag) for _ in range(dice.randint(1, 5))]
        is_transaction = dice.random() < 0.5

        def piped(client: Any, commands: list[list[Any]] = commands, is_transaction: bool = is_transaction) -> Any:
            with client.pipeline(transaction=is_transaction) as pipe:
                for command in commands:
                    pipe.execute_command(*command)
                return pipe.execute()

        there = answer(lambda: piped(real))
        here = answer(lambda: piped(modelled))
        if there and there[0] == "error":
            assert here[0] == "error", commands
        else:
            assert here == there, commands


def test_keys_expire_on_the_virtual_clock() -> None:
    now = [1000.0]
    client = SimulatedClient(Direct(Server(lambda: now[0], Engine())))
    client.hset("h", "f", "v")
    client.pexpire("h", 1500)
    assert client.pttl("h") == 1500
    now[0] += 1.4999
    assert client.hget("h", "f") == b"v"
    now[0] += 0.0001
    assert (client.hget("h", "f"), client.pttl("h")) == (None, -2)


def test_at_the_memory_limit_growing_commands_are_refused_and_allow_oom_scripts_pass() -> None:
    modelled = Server(lambda: 1000.0, Engine())
    client = SimulatedClient(Direct(modelled))
    add = "redis.call('HSET', KEYS[1], 'f', 'v') return 1"
    plain_sha, allowed_sha = client.script_load(f"#!lua\n{add}"), client.script_load(f"#!lua flags=allow-oom\n{add}")
    modelled.is_full = True
    for refused in (
        lambda: client.hset("h", "f", "v"),
        lambda: client.evalsha(plain_sha, 1, "h"),
    ):
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            refused()
    assert client.evalsha(allowed_sha, 1, "h") == 1
    assert client.unlink("h") == 1
    with client.pipeline(transaction=True) as pipe:
        pipe.unlink("h")
        pipe.hset("h", "f", "v")
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            pipe.execute()
    assert client.exists("h") == 0


def test_restarted_server_has_its_data_and_no_scripts() -> None:
    modelled = Server(lambda: 1000.0, Engine())
    client = SimulatedClient(Direct(modelled))
    sha = client.script_load("return 1")
    client.set("k", "v")
    modelled.restart()
    assert client.get("k") == b"v"
    with pytest.raises(redis.exceptions.NoScriptError):
        client.evalsha(sha, 0)


def test_rolled_back_server_has_what_was_on_its_disk() -> None:
    modelled = Server(lambda: 1000.0, Engine())
    client = SimulatedClient(Direct(modelled))
    client.xadd("s", {"f": "1"}, id="1-0")
    saved = modelled.snapshot()
    client.xadd("s", {"f": "2"}, id="2-0")
    client.zadd("z", {"m": 1})
    modelled.roll_back(saved)
    assert client.xrange("s") == [(b"1-0", {b"f": b"1"})]
    assert client.exists("z") == 0
    client.xadd("s", {"f": "3"}, id="2-0")
    modelled.roll_back(saved)
    assert client.xlen("s") == 1


def test_unknown_command_is_an_error_not_a_guess() -> None:
    with pytest.raises(redis.ResponseError, match="the simulation does not model the command GEOADD"):
        model().execute_command("GEOADD", "k", 1, 2, "m")
