"""The server: one keyspace, one command at a time, the clock of the simulation.

It knows exactly the commands that the Lua files and the store use; any other is an error, so that a gap is seen and not
guessed. Beside replies it keeps a log of what every execution changed: the invariants are checked from that.
tests/simulation/test_model.py compares it with a real server.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from redis.exceptions import ResponseError

import simulation.commands  # fills the table
import simulation.stream_commands  # noqa: F401
from simulation.command_table import GROWING, MODELLED
from simulation.keyspace import Keyspace, error
from simulation.lua import Engine

Command = Sequence[bytes]

WRITES = GROWING | {
    b"DEL",
    b"UNLINK",
    b"RENAME",
    b"RENAMENX",
    b"PEXPIRE",
    b"PERSIST",
    b"HDEL",
    b"XDEL",
    b"XTRIM",
    b"ZREM",
}
WRITES |= {b"ZREMRANGEBYSCORE"}
OOM = "OOM command not allowed when used memory > 'maxmemory'."


class Server(Keyspace):
    """The modelled server.

    `on_event(commands, replies)` is called after each execution: a command, a script, or a
    whole MULTI.
    """

    def __init__(self, clock: Callable[[], float], engine: Engine) -> None:
        super().__init__(clock)
        self.scripts: dict[bytes, tuple[str, Any, bool]] = {}
        """sha -> text, compiled function, whether it may run at the memory limit."""
        self.is_full = False
        """At the memory limit."""
        self.refusal = ""
        """The error that every write gets; LOADING and CLUSTERDOWN are for everything."""
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
            if command[1].upper() == b"EXISTS":
                return [int(sha in self.scripts) for sha in command[2:]]
            return self.load(command[2].decode())
        if self.is_full and name in GROWING:
            raise error(OOM)
        return self.call(name, command)

    def call(self, name: bytes, command: Command) -> Any:
        """A single command, also from a script."""
        run = MODELLED.get(name)
        if run is None:
            raise ResponseError(f"the simulation does not model the command {name.decode()}")
        return run(self, command)

    def load(self, text: str) -> bytes:
        """The command SCRIPT LOAD."""
        sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest().encode()
        first = text.partition("\n")[0]
        may_grow = not first.startswith("#!") or "allow-oom" in first
        self.scripts[sha] = text, self._engine.compiled(text), may_grow
        return sha

    def _evaluate(self, command: Command) -> Any:
        script = self.scripts.get(command[1])
        if script is None:
            raise error("NOSCRIPT No matching script. Please use EVAL.")
        _, function, may_grow = script
        if self.is_full and not may_grow:
            raise error("OOM allow-oom flag is not set on the script, can not run it when used memory > 'maxmemory'")
        keys = int(command[2])
        return self._engine.run(self.call, function, command[3 : 3 + keys], command[3 + keys :])

    # -- what happens to servers -----------------------------------------------------------------------------------
    def restart(self) -> None:
        """Comes back with its data, without its scripts."""
        self.scripts.clear()
        self.starts += 1

    def snapshot(self) -> tuple[dict[bytes, Any], dict[bytes, int]]:
        """The contents of the disk now."""
        return {k: v if isinstance(v, bytes) else v.copy() for k, v in self.data.items()}, dict(self.expiry)

    def roll_back(self, saved: tuple[dict[bytes, Any], dict[bytes, int]]) -> None:
        """Comes back with what was on the disk: acknowledged writes since then are lost."""
        data, expiry = saved
        self.data = {k: v if isinstance(v, bytes) else v.copy() for k, v in data.items()}
        self.expiry = dict(expiry)
        self.restart()
