"""The server: one keyspace, one command at a time, the clock of the simulation.

It knows exactly the commands that the Lua files and the store use; any other is an error, so that a gap is seen and not
guessed. Beside replies it keeps a log of what every execution changed: the invariants are checked from that.
tests/simulation/test_model.py compares it with a real server.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from redis._parsers.base import BaseParser
from redis.exceptions import ResponseError

from simulation.commands import COMMANDS, GROWING
from simulation.lua import Engine
from simulation.values import SortedSet, Stream

Command = Sequence[bytes]
Change = tuple[str, bytes, Any]
"""What kind (``hash``, ``xadd``, ``xdel``, ``zset``, ``string``, ``ttl``, ``gone``), key, and field, id or member."""

WRITES = GROWING | {b"DEL", b"UNLINK", b"RENAME", b"PEXPIRE", b"PERSIST", b"HDEL", b"XDEL", b"XTRIM", b"ZREM"}
WRITES |= {b"ZREMRANGEBYSCORE"}
OOM = "OOM command not allowed when used memory > 'maxmemory'."


class Server:
    """The modelled server.

    `clock` gives Unix seconds. `on_event(commands, replies)` is called after each execution: a command, a script, or a
    whole MULTI.
    """

    def __init__(self, clock: Callable[[], float], engine: Engine) -> None:
        self.clock = clock
        self.data: dict[bytes, Any] = {}
        self.expiry: dict[bytes, int] = {}
        """key -> Unix milliseconds."""
        self.scripts: dict[bytes, tuple[str, Any, bool]] = {}
        """sha -> text, compiled function, whether it may run at the memory limit."""
        self.starts = 1
        """Times that it was started: who it is."""
        self.is_full = False
        """At the memory limit."""
        self.refusal = ""
        """The error that every write gets; LOADING and CLUSTERDOWN are for everything."""
        self.used, self.limit = 1_000_000, 0
        """Memory, and its limit: 0 for none. Of what is in use only this number is modelled."""
        self.changes: list[Change] = []
        self.waiting: dict[bytes, list[Callable[[], None]]] = {}
        """Stream -> who wants to know of its next entry, once."""
        self.on_event: Callable[[Sequence[Command], list[Any]], None] = lambda commands, replies: None
        self.before_event: Callable[[Sequence[Command]], None] = lambda commands: None
        """Called before a script runs."""
        self._engine = engine

    # -- running commands ------------------------------------------------------------------------------------------
    def execute(self, commands: Sequence[Command], *, is_transaction: bool = False) -> list[Any]:
        """Runs commands as one event. -> their replies; an error is a reply, too."""
        if commands[0][0] == b"EVALSHA":
            self.before_event(commands)
        if self.refusal and self._is_refused(commands):
            return [error(self.refusal)] * len(commands)
        if is_transaction and self.is_full and any(c[0] in GROWING for c in commands):
            return [error(OOM)] * len(commands)
        replies: list[Any] = []
        for command in commands:
            try:
                replies.append(self._run(command))
            except ResponseError as problem:
                replies.append(problem)
        self.on_event(commands, replies)
        self.changes.clear()
        return replies

    def _is_refused(self, commands: Sequence[Command]) -> bool:
        """A pipeline that is no transaction counts as one here: what comes after a refused write is refused, too."""
        if self.refusal.startswith(("LOADING", "CLUSTERDOWN")):
            return True
        return any(command[0] == b"EVALSHA" or command[0] in WRITES for command in commands)

    def _run(self, command: Command) -> Any:
        name = command[0]
        if name == b"EVALSHA":
            return self._evaluate(command)
        if name == b"SCRIPT":
            return self.load(command[2].decode())
        if self.is_full and name in GROWING:
            raise error(OOM)
        return self.call(name, command)

    def call(self, name: bytes, command: Command) -> Any:
        """A single command, also from a script."""
        run = COMMANDS.get(name)
        if run is None:
            raise ResponseError(f"the simulation does not model the command {name.decode()}")
        return run(self, command)

    def load(self, text: str) -> bytes:
        """SCRIPT LOAD"""
        sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest().encode()
        first = text.partition("\n")[0]
        may_grow = not first.startswith("#!") or "allow-oom" in first
        self.scripts[sha] = text, self._engine.compiled(text), may_grow
        return sha

    def _evaluate(self, command: Command) -> Any:
        found = self.scripts.get(command[1])
        if found is None:
            raise error("NOSCRIPT No matching script. Please use EVAL.")
        _, function, may_grow = found
        if self.is_full and not may_grow:
            raise error("OOM allow-oom flag is not set on the script, can not run it when used memory > 'maxmemory'")
        keys = int(command[2])
        return self._engine.run(self, function, command[3 : 3 + keys], command[3 + keys :])

    # -- keyspace --------------------------------------------------------------------------------------------------
    def now_ms(self) -> int:
        return int(self.clock() * 1000)

    def find(self, key: bytes, kind: type | None = None) -> Any:
        """The value of a key, None when there is none."""
        expiry = self.expiry.get(key)
        if expiry is not None and expiry <= self.now_ms():
            self.delete(key)
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

    # -- what happens to servers -----------------------------------------------------------------------------------
    def restart(self) -> None:
        """Comes back with its data, without its scripts."""
        self.scripts.clear()
        self.starts += 1

    def snapshot(self) -> tuple[dict[bytes, Any], dict[bytes, int]]:
        """What is on the disk now."""
        return {k: v if isinstance(v, bytes) else v.copy() for k, v in self.data.items()}, dict(self.expiry)

    def roll_back(self, saved: tuple[dict[bytes, Any], dict[bytes, int]]) -> None:
        """Comes back with what was on the disk: acknowledged writes since then are lost."""
        data, expiry = saved
        self.data = {k: v if isinstance(v, bytes) else v.copy() for k, v in data.items()}
        self.expiry = dict(expiry)
        self.restart()


def error(text: str) -> ResponseError:
    """An error reply as redis-py raises it."""
    made: ResponseError = BaseParser.parse_error(text)
    return made
