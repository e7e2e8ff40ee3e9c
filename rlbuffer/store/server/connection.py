"""The connection to the server: how commands are sent, what is repeated when it breaks, and what its refusals mean.

redis-py 8 as shipped repeats every command ten times on a lost connection, writes too: one XADD whose replies were lost
three times left four entries. Its own repetition is off here. Callers say through :meth:`Connection.call` what may be
repeated, and only that is. Other defaults that do not fit:

- A blocking read longer than `socket_timeout` is silently issued again: it has a client of its own whose timeout is
  above every block, and blocks are at most two seconds.
- hiredis packs large arguments by copying them (:class:`rlbuffer.store.server.pools.Packer`).
- Maintenance notifications, on by default with RESP3, look up host names; they are for one vendor's cloud. Off.

Replies have redis-py's RESP3 shapes, the same on a server and in memory: an XREAD gives ``{key: [[(id, fields)]]}``.
"""

from __future__ import annotations

import logging
import random
import re
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import redis
from redis.backoff import NoBackoff
from redis.connection import ConnectionPool, SSLConnection
from redis.maint_notifications import MaintNotificationsConfig
from redis.retry import Retry

from rlbuffer.config.settings import ServerSettings
from rlbuffer.errors import BufferClosed, RlbufferError, ServerUnreachable
from rlbuffer.store.limits import PushLimits, read_limits, timeout_seconds
from rlbuffer.store.server.address import (
    SENTINEL_LOGIN,
    check_tls,
    is_sentinel,
    options_of,
    redacted,
    source_of,
)
from rlbuffer.store.server.answers import BrokenUnused, remedy, understand
from rlbuffer.store.server.embedded import EmbeddedServer, ensure
from rlbuffer.store.server.in_process import memory_client, memory_name
from rlbuffer.store.server.login import Login
from rlbuffer.store.server.pools import FollowingPool, FreshPool, Packer
from rlbuffer.store.server.script import Script
from rlbuffer.store.server.sentinels import Watchers, watchers_of
from rlbuffer.store.server.shards import Routed, shards_of, slot_of_key
from rlbuffer.store.server.suitable import check_suitable, figures, fullest

T = TypeVar("T")
_log = logging.getLogger(__name__)

PATIENCE_SECONDS = 10.0
"""Seconds that a call is repeated when the caller names no other patience."""
COMMAND_TIMEOUT_SECONDS = 20.0
"""Seconds until a command times out; those of a large push grow with its size (:mod:`rlbuffer.store.limits`)."""
CONNECT_TIMEOUT_SECONDS = 5.0
BLOCK_SECONDS = 2.0
"""Longest BLOCK of a blocking read."""
BLOCKING_TIMEOUT_SECONDS = BLOCK_SECONDS + 10.0
SOCKET_READ_BYTES = 1 << 20
"""Half the CPU of the default 64 KiB when payloads are read."""
FIRST_PAUSE_SECONDS = 0.02
LONGEST_PAUSE_SECONDS = 1.0
_RANDOM = random.Random()  # the global one is the user's: a checkpoint keeps its state


class Connection:
    """The clients of one process for one server. Thread-safe; usable after a fork.

    Args:
        url: ``redis://`` or ``rediss://``, also with ``+sentinel`` or ``+cluster``, ``unix://`` or ``memory://NAME``;
            None for the embedded server.
        home: where the embedded server lives.
        server: settings of the embedded server.
        name: shown by CLIENT LIST.
        password: reads that of the user in `url`, where that has none; asked again at every new connection.
        origin: where `url` comes from, like ``rlbuffer.toml:1``; error messages say it.

    Raises:
        ServerUnreachable: no server there within `patience_seconds`.
        ServerUnsuitable: :func:`~rlbuffer.store.server.suitable.check_suitable`, or it refuses the login.
        ConfigError: `url` is none of the above.
    """

    def __init__(
        self,
        url: str | None,
        *,
        home: Path,
        server: ServerSettings,
        name: str,
        origin: str = "",
        password: Callable[[], str] | None = None,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        self._home = home
        self._settings = server
        self._name = re.sub(r"[^!-~]", "-", name)
        self._origin = origin
        self._password = password
        self._login: Login | None = None
        self._warned = ""
        self._lock = threading.RLock()
        self._limits: tuple[int, PushLimits] | None = None
        """Losses when they were read, and what the server takes."""
        self._clients: dict[float, redis.Redis] = {}
        """Timeout in seconds -> the client for commands that may take so long; in memory all are one."""
        self._is_closed = False
        self.embedded: EmbeddedServer | None = None
        self.is_memory = False
        """The in-process model instead of a server."""
        self.losses = 0
        """Times that the connection was lost. Writes that the server had acknowledged may be gone with it."""
        self.failures: Counter[str] = Counter()  # kind of call -> attempts that the server did not answer, or refused
        self.asking: dict[int, float] = {}
        """Thread -> since when (monotonic) it has waited for an answer."""
        self._made: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        """The losses when a connection of the pool was last made."""
        self._identities: dict[tuple[str, int] | None, str] = {}
        """Who has answered since the last loss: the server's identity, or that of each node of a cluster."""
        self._is_known = False
        """The server has taken this process's login."""
        if not url:
            self.embedded = ensure(home, server)
            self._url = self.embedded.address
        else:
            self._url = url
            self.is_memory = memory_name(url) is not None
        self._memory = memory_client(memory_name(self._url) or "") if self.is_memory else None
        self._shards = None if self.is_memory else shards_of(self._url_options())  # of a cluster
        try:
            if not self.is_memory:
                self.call(self._check_server, patience_seconds=patience_seconds)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Connection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def client(self) -> redis.Redis:
        """The client for commands. Ask for it at every call: a reconnect may replace it."""
        return self._client(COMMAND_TIMEOUT_SECONDS)

    @property
    def is_cluster(self) -> bool:
        """Payloads lie on several shards, the control keys of a run on one."""
        return self._shards is not None

    def live_at(self, key: str) -> None:
        """Sends what names no key to the shard that has `key`."""
        if self._shards is not None:
            self._shards.home = slot_of_key(key)

    def servers(self) -> list[redis.Redis]:
        """A client of each primary, that of the control keys first; of one server its client."""
        client = self.client
        return client.primaries() if isinstance(client, Routed) else [client]

    def sender(self, size: int) -> redis.Redis:
        """The client for a command of `size` bytes: its timeout grows with them."""
        return self._client(timeout_seconds(size, COMMAND_TIMEOUT_SECONDS))

    def limits(
        self, patience_seconds: float = PATIENCE_SECONDS, *, on_retry: Callable[[RlbufferError], object] | None = None
    ) -> PushLimits:
        """The limits of a push here; read once, and again after the connection was lost."""
        if self._limits is None or self._limits[0] != self.losses:
            losses = self.losses
            read = PushLimits if self.is_memory else lambda: read_limits(self.client)
            self._limits = losses, self.call(read, patience_seconds=patience_seconds, repeat=True, on_retry=on_retry)
        return self._limits[1]

    @property
    def blocking(self) -> redis.Redis:
        """A client for reads that block, at most :data:`BLOCK_SECONDS`; each caller gets a connection of its own."""
        return self._client(BLOCKING_TIMEOUT_SECONDS)

    @property
    def address(self) -> str:
        """The server's URL, without its password."""
        return redacted(self._url)

    def script(self, text: str) -> Script:
        """A callable ``script(keys, args)`` of a Lua file's text; call it inside :meth:`call`."""
        return Script(lambda: self.client, text, has_flags=not self.is_memory)

    def call(
        self,
        fn: Callable[[], T],
        *,
        patience_seconds: float = PATIENCE_SECONDS,
        repeat: bool = True,
        op: str = "look",
        on_retry: Callable[[RlbufferError], object] | None = None,
    ) -> T:
        """Runs `fn`, again on a lost connection as long as patience lasts, with growing random pauses. `on_retry` hears
        each failure before the next attempt; what it raises ends the waiting.

        A lost connection leaves it unknown whether the server did the work: with ``repeat=False`` `fn` runs once and
        the caller decides. Either way an embedded server that died is started again. An attempt in progress is not cut
        short, so a server that hangs can take one command timeout more.

        Every error of redis-py comes out as one of ours:

        Raises:
            BufferClosed: :meth:`close` was called; at once, whatever the patience.
            ServerUnreachable: the connection was lost, or could not be made, and patience is over.
            ServerRefused: the server does not want to, for a reason that passes; :mod:`rlbuffer.store.server.answers`.
            ServerUnsuitable: the server refuses the login or denies the command.
            WrongAnswer: the command does not fit what is there, such as a key of another type.
        """
        thread, begun = threading.get_ident(), time.monotonic()
        if thread in self.asking:
            return self._answered(fn, begun, patience_seconds, repeat=repeat, op=op, on_retry=on_retry)
        self.asking[thread] = begun
        try:
            return self._answered(fn, begun, patience_seconds, repeat=repeat, op=op, on_retry=on_retry)
        finally:
            del self.asking[thread]

    def _answered(
        self,
        fn: Callable[[], T],
        begun: float,
        patience_seconds: float,
        *,
        repeat: bool,
        op: str,
        on_retry: Callable[[RlbufferError], object] | None,
    ) -> T:
        tries = 0
        pause = FIRST_PAUSE_SECONDS
        while True:
            if self._is_closed:
                raise BufferClosed(f"this buffer's connection to {self.address} was closed in this process")
            tries += 1
            try:
                answer = fn()
                self._is_known = True
                return answer
            except BrokenUnused:
                self._lose()
                tries -= 1
                continue  # nothing was sent
            except redis.RedisError as error:
                self.failures[op] += 1
                understood = understand(
                    error,
                    address=self.address,
                    source=self._source(),
                    is_embedded=self.embedded is not None,
                    is_watched=is_sentinel(self._url) or self.is_cluster,
                    is_known=self._is_known,
                )
                cause = error
            failure = understood.failure
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
            wait = pause * _RANDOM.uniform(0.5, 1.0)
            elapsed = time.monotonic() - begun
            if understood.is_loss:
                self._lose()
                if isinstance(failure, ServerUnreachable):
                    failure = self._recovered(failure, patience_seconds - elapsed)
                    elapsed = time.monotonic() - begun
            if not (repeat and understood.may_pass and elapsed + wait <= patience_seconds):
                if isinstance(failure, ServerUnreachable):
                    failure = ServerUnreachable(f"{failure}\n{self._advice(cause, tries, elapsed)}")
                raise failure from cause
            if on_retry is not None:
                on_retry(failure)
            time.sleep(wait)

    def server_id(self, patience_seconds: float, *, on_retry: Callable[[RlbufferError], object] | None = None) -> str:
        """The server's identity: a process, and since when it is a primary."""
        if self.is_memory:
            return "memory"
        info = self.call(
            lambda: dict(self.client.info()), patience_seconds=patience_seconds, repeat=True, on_retry=on_retry
        )
        return f"{info.get('run_id', '')} {info.get('master_replid', '')}"

    def describe(self) -> dict[str, Any]:
        """Facts: name, version, address, embedded, policy; in bytes: maxmemory (0: no limit), used_memory
        (what counts against it), unfreed (objects that are unlinked and not given back yet: a number, not bytes),
        buffers (of the clients). Of a cluster those of the fullest shard."""
        info: Mapping[str, Any] = {}
        if not self.is_memory:
            info = self.call(
                lambda: fullest([dict(each.info()) for each in self.servers()]),
                patience_seconds=PATIENCE_SECONDS,
                repeat=True,
            )
        return self.facts(info)

    def facts(self, info: Mapping[str, Any]) -> dict[str, Any]:
        """The facts of :meth:`describe` in what INFO says of the server; empty in memory."""
        return {"address": self.address, "embedded": self.embedded is not None} | figures(info)

    @property
    def sentinels(self) -> Watchers | None:
        """Those that name the server; None where the address does."""
        return None if self.is_memory else watchers_of(self._url_options())

    def close(self) -> None:
        """Closes the clients and leaves the embedded server, which the last user stops. Safe to repeat."""
        with self._lock:
            self._is_closed = True
            for pool in self._pools():
                # In memory a thread that is in the middle of a call keeps its connection busy; it goes with the thread.
                with suppress(ValueError):
                    pool.disconnect()
            if self.embedded is not None:
                self.embedded.release()

    def _client(self, timeout_seconds: float) -> redis.Redis:
        clients = self._clients  # others take their place when the address changes
        if timeout_seconds not in clients:
            clients.setdefault(timeout_seconds, self._make_client(timeout_seconds))
        return clients[timeout_seconds]

    def _make_client(self, timeout_seconds: float) -> redis.Redis:
        if self._memory is not None:
            return self._memory
        if self._shards is not None:
            return Routed(self._shards, lambda **place: self._make_node(timeout_seconds, **place))
        return self._make_node(timeout_seconds)

    def _make_node(self, timeout_seconds: float, **place: Any) -> redis.Redis:
        options = self._url_options()
        watchers = watchers_of(options)
        for name in ("sentinels", "service", "nodes", *SENTINEL_LOGIN.values()):
            options.pop(name, None)
        options |= place | {
            "protocol": 3,
            "driver_info": None,  # CLIENT SETINFO is of Redis 7.2, and no user of an ACL file for 7.0 may send it
            "retry": Retry(NoBackoff(), 0),
            "socket_timeout": timeout_seconds,
            "socket_connect_timeout": CONNECT_TIMEOUT_SECONDS,
            "socket_read_size": SOCKET_READ_BYTES,
            "maint_notifications_config": MaintNotificationsConfig(enabled=False),
            "redis_connect_func": self._made_anew,
            "command_packer": Packer(),
            "max_connections": 1000,
        }
        if watchers is None:
            pool = FreshPool(**options)
        else:
            is_tls = options.pop("connection_class", None) is SSLConnection
            pool = FollowingPool(watchers.service, watchers, ssl=is_tls, **options)  # type: ignore[no-untyped-call]
        pool.is_stale = lambda connection: self._made.get(connection) != self.losses
        return redis.Redis(connection_pool=pool)

    def _lose(self) -> None:
        """Counts a loss. No open connection outlives it: behind one address there may be another primary by now."""
        self.losses += 1
        self._identities.clear()
        self._hang_up()

    def _hang_up(self) -> None:
        """Closes the connections that nobody uses at this moment; the others are closed when they come back."""
        if self._shards is not None:
            self._shards.forget()
        if not self.is_memory:
            for pool in self._pools():
                pool.disconnect(inuse_connections=False)

    def _pools(self) -> Iterator[ConnectionPool]:
        for client in tuple(self._clients.values()):
            yield from client.pools() if isinstance(client, Routed) else [client.connection_pool]

    def _made_anew(self, connection: Any) -> None:
        """The pool has made one of its connections, and sends nothing of ours on it before this.

        Servers and balancers close what is idle: such a connection is made again, and nothing is lost. But what is
        about to be sent must not go to a server that is back without its newest writes, nor to another one than the
        open connections lead to: in a planned failover the old primary answers for a while. So each new connection asks
        who answers. A user who may not ask has each connection that broke unused counted as a loss.
        """
        address = (getattr(connection, "host", ""), getattr(connection, "port", 0))
        connection.on_connect()
        identity = _introduce(connection, self._name)
        was_open = self._made.pop(connection, None) == self.losses
        first_identity = self._identities.setdefault(address if self.is_cluster else None, identity or repr(address))
        if first_identity != (identity or repr(address)) or (was_open and not identity):
            raise BrokenUnused("another server answers than the open connections lead to, or it has started again")
        self._made[connection] = self.losses

    def _url_options(self) -> dict[str, Any]:
        options = options_of(self._url, self._source())
        warning = check_tls(options, self.address, self._source())
        if warning and warning != self._warned:
            self._warned = warning
            _log.warning("Warning: %s", warning)
        if self._password is not None and self.embedded is None and "password" not in options:
            user = options.get("username", "")
            self._login = self._login or Login(self._password, user)
            if self._login.password:
                options.pop("username", None)
                options["credential_provider"] = self._login
        return options

    def _check_server(self) -> None:
        for server in self.servers():
            check_suitable(server, self.address, self._source(), is_cluster=self.is_cluster)

    def _recovered(self, failure: ServerUnreachable, seconds: float) -> ServerUnreachable:
        """Starts the embedded server again if it died. -> what is wrong now: the failure, or why it does not start."""
        with self._lock:
            if self.embedded is None or self._is_closed:
                return failure
            try:
                fresh = ensure(self._home, self._settings, timeout_seconds=max(seconds, 5.0))
            except ServerUnreachable as error:
                return error
            old, self.embedded = self.embedded, fresh
            old.release()
            if fresh.address != self._url:
                self._url, self._clients = fresh.address, {}
            return failure

    def _source(self) -> str:
        return source_of(self._origin)

    def _advice(self, error: redis.RedisError, tries: int, seconds: float) -> str:
        spent = "Tried once." if tries == 1 else f"Tried {tries} times in {seconds:.{0 if seconds >= 9.95 else 1}f} s."
        if self.embedded is not None:
            return f"  {spent} Its log: {self.embedded.log}"
        source = f" The address comes from {self._origin}." if self._origin else ""
        lines = remedy(error, url=self._url, origin=self._origin, is_known=self._is_known)
        return f"  {spent}{source}\n{lines}"


def _introduce(connection: Any, name: str) -> str:
    """Tells the server the connection's name, and asks who it is.

    Managed servers may know no CLIENT; only CLIENT LIST needs it.

    Returns:
        The process that answers, and since when it is a primary; "" where the login may not ask.
    """
    commands = [("INFO", "server", "replication"), *([("CLIENT", "SETNAME", name)] if name else [])]
    connection.send_packed_command(connection.pack_commands(commands))
    answers: list[bytes] = []
    for _ in commands:
        try:
            answers.append(connection.read_response())
        except redis.ResponseError:
            answers.append(b"")
    return b" ".join(re.findall(rb"^(?:run_id|master_replid):(\w+)", answers[0], re.MULTILINE)).decode()
