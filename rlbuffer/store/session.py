"""The base of the roles: the connection, the run's keys, and the scripts.

A *move* runs one Lua file and is repeated over reconnects unless the caller forbids it: every script answers the
same when it is repeated. A *look* only reads, or writes what may be written twice. Both raise
:class:`~rlbuffer.errors.ServerUnreachable` when the server cannot be reached within the patience. All times are the
server's clock, in seconds unless named otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from functools import cache, partial
from importlib import resources
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import redis

from rlbuffer.config.batcher import remembered_steps
from rlbuffer.config.settings import ServerSettings
from rlbuffer.errors import EpochChanged, LeaseLost, RlbufferError, RunGone
from rlbuffer.store.keys import Keys
from rlbuffer.store.server.connection import Connection
from rlbuffer.store.server.script import Script

T = TypeVar("T")
Role = TypeVar("Role", bound="Session")
"""What a process may do with a run: a user of deploy/users.acl may call all of it."""
Fields = dict[bytes, bytes]
Entry = tuple[str, Fields]
"""Id and fields of a stream entry."""

DEFAULT_PATIENCE_SECONDS = 30.0
"""Seconds that calls are repeated while the server is away: a killed embedded server is back in well under a second."""
BLOCK_SECONDS = 2.0
"""Longest single blocking read: it stays below every socket timeout."""
PAGE = 500
"""Keys asked about in one round trip."""
LAST_IN_STEP = 2**64 - 1
"""Largest second half of a stream id: ``<s>-<LAST_IN_STEP>`` is the end of step s."""
MINIMUM_TOMBSTONE_MS = 3_600_000
"""Tombstones are kept for 2 x ``group_timeout_seconds``, and at least for one hour; and for some steps, whichever is
later (:func:`rlbuffer.config.batcher.remembered_steps`)."""


@cache
def script_text(name: str) -> str:
    """The Lua file `name`, as the server gets it."""
    return (resources.files("rlbuffer.store") / "scripts" / f"{name}.lua").read_text(encoding="utf-8")


class Session:
    """The connection of one process to one run."""

    def __init__(self, connection: Connection, run: str, *, patience_seconds: float = DEFAULT_PATIENCE_SECONDS) -> None:
        self.connection = connection
        self.keys = Keys(run)
        connection.live_at(self.keys.meta)
        self.run = run
        self.patience_seconds = patience_seconds
        """Seconds that calls are repeated while the server is away."""
        self.on_retry: Callable[[RlbufferError], object] | None = None
        """Hears what a call waits for, each time before it is repeated; what this raises ends the waiting."""
        self.tombstone_ms = MINIMUM_TOMBSTONE_MS
        self.tombstone_steps = remembered_steps(0)
        self._scripts: dict[str, Script] = {}
        self._roles: dict[type[Session], Session] = {}
        self._server = (-1, "")
        """The connection's losses when the server was asked who it is, and its answer."""

    def role(self, role: type[Role]) -> Role:
        """The run for a process of that role; all roles share the connection."""
        if isinstance(self, role):
            return self
        if role not in self._roles:
            made = role(self.connection, self.run, patience_seconds=self.patience_seconds)
            made.on_retry = self.on_retry
            self._roles.setdefault(role, made)
        return cast(Role, self._roles[role])

    def patient(self, patience_seconds: float, *, on_retry: Callable[[RlbufferError], object] | None = None) -> Self:
        """The same run on the same connection, with another patience and `on_retry`."""
        other = copy(self)
        other.patience_seconds, other.on_retry, other._roles = patience_seconds, on_retry, {}
        return other

    def close(self) -> None:
        """Closes the connections; the last user of an embedded server stops it."""
        self.connection.close()

    @property
    def client(self) -> Any:
        """The client for commands; asked for at every call, because a reconnect may make another one."""
        return self.connection.client

    def call(self, fn: Callable[[], T], *, repeat: bool = True, op: str = "look") -> T:
        """As :meth:`rlbuffer.store.server.connection.Connection.call`, with the patience of this session."""
        return self.connection.call(
            fn, patience_seconds=self.patience_seconds, repeat=repeat, op=op, on_retry=self.on_retry
        )

    def look(self, command: Callable[[Any], T]) -> T:
        """Runs ``command(client)``, repeated over reconnects: only for what may be done twice."""
        return self.call(lambda: command(self.connection.client))

    def piped(self, ask: Callable[[Any], object], *, at_once: bool = False, lenient: bool = False) -> list[Any]:
        """The replies to the commands that `ask` puts into a pipeline, in one round trip: only for what may be done
        twice. `at_once`: in a transaction. `lenient`: as :func:`sound`."""

        def send(client: Any) -> list[Any]:
            with client.pipeline(transaction=at_once) as pipe:
                ask(pipe)
                return sound(pipe.execute(raise_on_error=False)) if lenient else list(pipe.execute())

        return self.look(send)

    def paged(
        self, items: Sequence[Any], add: Callable[[Any, Any], object], *, size: int = PAGE, lenient: bool = True
    ) -> list[Any]:
        """The reply to the command that ``add(pipe, item)`` makes of each item, `size` of them in a round trip."""

        def commands(pipe: Any, page: Sequence[Any]) -> None:
            for item in page:
                add(pipe, item)

        replies: list[Any] = []
        for start in range(0, len(items), size):
            replies += self.piped(partial(commands, page=items[start : start + size]), lenient=lenient)
        return replies

    def move(
        self,
        script: str,
        keys: Sequence[str],
        args: Sequence[Any],
        *,
        repeat: bool = True,
        since: int | None = None,
    ) -> list[Any]:
        """Runs one Lua file. -> its reply, status first. `since`: as in :meth:`stay`, asked before every sending.
        Raises RunGone where the script found no run."""
        run = self.script(script)

        def send() -> list[Any]:
            self.stay(since)
            return sound(list(run(keys=self.declared(keys), args=list(args))))

        reply = self.call(send, repeat=repeat, op=script)
        if len(reply) == 1 and text(reply[0]) == "GONE":
            raise self.no_run()
        return reply

    def declared(self, keys: Sequence[str]) -> list[str]:
        """The keys that a call of a script names: its own, and behind them one that is never there.

        While the slot of the keys moves to another node of a cluster, a server refuses a script that names a key which
        it lacks, before anything ran. Without one it would begin, and end half done at a key that it had itself
        removed.
        """
        return [*keys, self.keys.absent]

    def no_run(self) -> RunGone:
        """The error of who asks for a run that is not there."""
        return RunGone(f"run {self.run!r} is not on the server ({self.keys.meta})")

    def script(self, name: str) -> Script:
        """The Lua file `name`, to be called."""
        if name not in self._scripts:
            self._scripts[name] = self.connection.script(script_text(name))
        return self._scripts[name]

    def stream(self, key: str, after: str, *, count: int | None = None, block_seconds: float = 0.0) -> list[Entry]:
        """Entries after the id `after`; waits at most `block_seconds` for the first, on a connection of its own."""
        if block_seconds <= 0:
            return entries(self.look(lambda client: client.xread({key: after}, count=count)))
        block_ms = max(1, round(1000 * min(block_seconds, BLOCK_SECONDS)))
        reply = self.call(lambda: self.connection.blocking.xread({key: after}, count=count, block=block_ms))
        return entries(reply)

    def server_id(self) -> str:
        """The server's identity: another one after every restart and failover, when newest writes may be lost."""
        losses, server_id = self._server
        if losses != self.connection.losses or not server_id:
            losses = self.connection.losses
            server_id = self.connection.server_id(self.patience_seconds, on_retry=self.on_retry)
            self._server = losses, server_id
        return server_id

    def stay(self, since: int | None) -> None:
        """Raises LeaseLost when the connection was lost more often than `since` times; None: never mind.

        A server that was away may be back without its newest writes, and what was decided before need not hold there.
        """
        if since is not None and self.connection.losses != since:
            raise LeaseLost(f"the server of run {self.run!r} was away: everything is read from it again")

    def gone(self, reply: Sequence[Any], epoch: int) -> RunGone:
        """The error of a producer whose epoch is not the run's: `reply` is ('GONE', epoch, since)."""
        there = text(reply[1])
        if not there:
            return RunGone(f"run {self.run!r} is not on the server any more ({self.keys.meta})")
        return EpochChanged(
            f"run {self.run!r} is in epoch {there}, this producer works in epoch {epoch}: "
            "it was reset, rewound or recovered",
            epoch=int(there),
            since=int(text(reply[2]) or there),
        )

    def unexpected(self, script: str, reply: Sequence[Any]) -> RlbufferError:
        """A reply that the script's header does not know: the run and this version of rlbuffer do not fit."""
        return RlbufferError(f"script {script} answered {[text(r) for r in reply]} for run {self.run!r}")


def open_store(
    role: type[Role],
    url: str | None,
    *,
    run: str,
    home: Path,
    server: ServerSettings,
    name: str = "",
    origin: str = "",
    password: Callable[[], str] | None = None,
    patience_seconds: float = DEFAULT_PATIENCE_SECONDS,
) -> Role:
    """Connects to the server of a run, for a role; creates nothing there.

    `url` None: the embedded server under `home`, started when it does not run. ``memory://``: in process, the same code
    and Lua files over a model of the server. `name` is what the server shows for the connection, `origin` says in
    messages where the url came from. `password` is asked at every new connection, where the url has none.

    Raises:
        ServerUnreachable, ServerUnsuitable, ConfigError: see :class:`rlbuffer.store.server.connection.Connection`.
    """
    connection = Connection(url, home=home, server=server, name=name, origin=origin, password=password)
    return role(connection, run, patience_seconds=patience_seconds)


def sound(replies: list[Any]) -> list[Any]:
    """These replies; None for a key of another type than the command is for, as if it were not there. Raises what else
    is an error among them."""
    for i, answer in enumerate(replies):
        if isinstance(answer, Exception):
            if not isinstance(answer, redis.ResponseError) or not str(answer).startswith("WRONGTYPE"):
                raise answer
            replies[i] = None
    return replies


def raise_first(replies: Sequence[Any]) -> None:
    """Raises the first error among these replies."""
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply


def number(value: bytes | None) -> int | None:
    """A whole number of the run that anybody may have written: None for what is no number of at most 15 digits."""
    return int(value) if value is not None and value.isdigit() and len(value) <= 15 else None


def text(value: object) -> str:
    """A reply's string, whether the client decodes or not."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def entries(reply: Any) -> list[Entry]:
    """The entries of an XREAD reply for a single stream, in redis-py's RESP3 shape ``{key: [[(id, fields)]]}``."""
    return [entry for pages in (reply or {}).values() for page in pages for entry in ranged(page)]


def ranged(reply: Any) -> list[Entry]:
    """The entries of an XRANGE or XREVRANGE reply."""
    return [(text(entry_id), dict(fields)) for entry_id, fields in reply]
