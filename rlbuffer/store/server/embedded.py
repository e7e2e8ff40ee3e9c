"""The embedded server: a Redis or Valkey of one's own under ``home/server/``, found when it runs, started when not.

Every process that uses it holds a shared lock on ``users.lock``. The last one that leaves cleanly stops it. When all
users crash it runs on for a minute and is found again, so that a run survives any of its processes; then a process
beside it (:mod:`rlbuffer.store.server.embedded_reaper`) ends it. Its data survive it: the next user starts it again.

Three locks, all released by the kernel when their holder dies, so none can be left behind:

- ``start.lock``: exclusive while a server is started or stopped. Eight processes at once start one. A server at work is
  joined without it.
- ``users.lock``: shared, one per user. A user that can turn its own into an exclusive one is the last.
- ``alive.lock`` and the folder itself: exclusive, inherited by the server. While one of them is held the server is
  alive, whatever its socket says, and nobody starts a second one on the same files. The file can be removed; the folder
  cannot while there is something in it, and systemd's cleaning of /tmp leaves a locked one alone (tmpfiles.d(5)). NFS
  locks files only.

Losses by kind of failure (measured with Valkey 9.1.2; docs/log.md). A clean stop loses nothing. When the server process
alone is killed, ``appendfsync always`` and ``no`` lose no acknowledged write: both hand each write to the kernel before
they answer. ``everysec`` does so too, except while an fsync is under way: then the server holds the write back, for up
to two seconds, and still answers; with an fsync slowed to 0.7 s a kill lost every write acknowledged meanwhile, on a
quick disk none. No setting turns that off. When the power goes, ``always`` loses nothing, ``everysec`` up to two
seconds, and ``no`` whatever the kernel had not written back, about 30 s on Linux.

`home` must be on a filesystem with working ``flock``. Containers of one host may share it; hosts may not: a unix socket
is local.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from rlbuffer.config.settings import ServerSettings
from rlbuffer.errors import ConfigError, RlbufferError, ServerUnreachable
from rlbuffer.process.file_locks import LOCK_POLL_SECONDS, NO_LOCKS, exclusive, is_held, try_lock
from rlbuffer.process.files import append_lines, owner_of, write_whole
from rlbuffer.store.server.binary import find_binary
from rlbuffer.store.server.embedded_files import (
    configuration,
    cut_zeros,
    log_tail,
    read_record,
    socket_address,
    socket_path,
    write_record,
)

ANSWER_TIMEOUT_SECONDS = 2.0
"""A server that answers INFO later than this is busy or stopped, not gone."""
UNUSED_SECONDS = 60.0
"""Seconds for which a server runs on without a user: whoever is started again meanwhile finds it."""
SOCKET_SECONDS = 5.0
"""A server opens its socket right after its start: one that has none for so long has lost it."""


@dataclass(slots=True, kw_only=True, eq=False)
class EmbeddedServer:
    """A running embedded server, and this process's place among its users.

    Lifecycle: `ensure` (a user) -> `release` (no longer one).
    """

    home: Path
    address: str
    """``unix:///...sock?db=0``."""
    pid: int
    _users: int | None = field(default=None, repr=False)
    """File descriptor that holds the shared lock."""
    _mutex: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def log(self) -> Path:
        """The server's log file."""
        return self.home / "server" / "server.log"

    def release(self, *, timeout_seconds: float = 30.0) -> bool:
        """Leaves, and stops the server when nobody else uses it; its files are synced first. Safe to repeat.

        Returns True when the server was stopped. When the lock cannot be had in time, or the server takes longer to
        end, it is left to itself: it may run on and is found again.
        """
        with self._mutex:
            descriptor, self._users = self._users, None
        _joined.discard(self)
        if descriptor is None:
            return False
        directory = self.home / "server"
        deadline = time.monotonic() + timeout_seconds
        try:
            with exclusive(directory / "start.lock", deadline):
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return False
                if not os.path.samestat(os.fstat(descriptor), (directory / "users.lock").stat()):
                    return False  # the home was removed and made again: the server in it is not the one that was used
                return _stop(directory, deadline)
        except (OSError, ServerUnreachable):
            # The directory is gone or stays locked: leaving must work even so, at exit above all.
            return False
        finally:
            os.close(descriptor)

    def _rejoin(self) -> None:
        """Takes, in a forked child, a lock of its own instead of the parent's, which both would share."""
        self._mutex = threading.Lock()
        if self._users is None:
            return
        os.close(self._users)
        try:
            self._users = _join(self.home / "server")
        except OSError:
            self._users = None


_joined: set[EmbeddedServer] = set()
"""Users of this process, released at exit when the program did not."""
_children: list[subprocess.Popen[bytes]] = []
"""Servers that this process has started, and what watches them."""
_starting: set[int] = set()
"""Descriptors of locks that are about to be a server's: a process that is forked meanwhile must not keep them."""
_is_exiting = False
"""The interpreter is ending: a daemon thread that loses the server now must not start it again."""


def ensure(home: Path, settings: ServerSettings, *, timeout_seconds: float = 60.0) -> EmbeddedServer:
    """Finds the home's server or starts it, waits until it answers, and makes this process one of its users.

    `settings` count when it starts; a server that already runs keeps those it was started with.

    Raises:
        ServerUnreachable: no program, no start, or no answer in time; the message has the log's last lines. Or one is
            at work that cannot be reached from here.
        ConfigError: a setting that no server would take, or a home that cannot be used.
    """
    if _is_exiting:
        raise ServerUnreachable("this process is ending: it does not start the embedded server again")
    home = home.absolute()
    directory = home / "server"
    deadline = time.monotonic() + timeout_seconds
    with _usable(directory):
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        directory.chmod(0o700)
        users, socket, pid = _join_at_work(directory, deadline) or _start_or_join(directory, settings, deadline)
    server = EmbeddedServer(home=home, address=socket_address(socket), pid=pid, _users=users)
    _joined.add(server)
    return server


@contextlib.contextmanager
def _usable(directory: Path) -> Iterator[None]:
    """Raises ConfigError where the filesystem refuses: somebody else's folder, no locks, no space."""
    try:
        yield
    except RlbufferError:
        raise
    except OSError as error:
        place = Path(error.filename or directory)
        no_locks = error.errno in NO_LOCKS
        reason = "its filesystem has no flock" if no_locks else (error.strerror or "").lower()
        raise ConfigError(
            f"the embedded server cannot live under home {directory.parent}: {place}: {reason} ({owner_of(place)}).\n"
            "  Name a folder of your own, on a disk of this host: --home, RLBUFFER_HOME, or `home` in the settings. Or "
            "name a server: --redis.",
            setting="home",
        ) from error


_Joined = tuple[int, Path, int]
"""The descriptor of a user's lock; the server's socket; its process."""


def _start_or_join(directory: Path, settings: ServerSettings, deadline: float) -> _Joined:
    with exclusive(directory / "start.lock", deadline):
        is_ours = False
        while True:
            if not _is_alive(directory):
                if is_ours:
                    raise ServerUnreachable(f"the embedded server ended before it answered.\n{log_tail(directory)}")
                _start(directory, settings)
                is_ours = True
            socket = _socket_of(directory)
            pid = _await_ready(directory, socket, deadline)
            if pid is not None:
                return _join(directory), socket, pid


def _join_at_work(directory: Path, deadline: float) -> _Joined | None:
    """Joins a server at work, without the lock that one starts and stops with: a thousand may come at once.
    None when it is not, nobody listens, or its last user is about to stop it."""
    socket = _socket_of(directory)
    if not socket.exists() or not _is_alive(directory):
        return None
    try:
        users = _join(directory)
    except BlockingIOError:
        return None
    # From here on nobody stops it.
    try:
        pid = _await_ready(directory, socket, deadline)
    except ServerUnreachable:
        os.close(users)
        raise
    if pid is None:
        os.close(users)
        return None
    return users, socket, pid


def _socket_of(directory: Path) -> Path:
    """The socket of the server last started: its starter may have had another temporary directory than this process."""
    return Path(read_record(directory).get("socket") or socket_path(directory))


def find(home: Path, *, timeout_seconds: float = 60.0) -> str | None:
    """The address of the home's server once it answers, for who does not become one of its users; None where none is at
    work. Changes nothing.

    Raises:
        ServerUnreachable: one is at work, and does not answer in time.
        ConfigError: a home that cannot be used.
    """
    directory = home.absolute() / "server"
    with _usable(directory):
        if not read_record(directory) or not _is_alive(directory):
            return None
        # Whoever has just started it may have written its record before it opens its socket.
        socket = _socket_of(directory)
        pid = _await_ready(directory, socket, time.monotonic() + timeout_seconds)
        return None if pid is None else socket_address(socket)


def _is_alive(directory: Path) -> bool:
    """A server is at work on the folder's files."""
    return any(is_held(path) for path in _alive_locks(directory))


def _alive_locks(directory: Path) -> tuple[Path, ...]:
    """What the server holds as long as it lives."""
    file = directory / "alive.lock"
    return (file,) if _on_nfs(directory) else (file, directory)


@cache
def _on_nfs(directory: Path) -> bool:
    """Only what is open for writing can be locked, and no folder can."""
    try:
        is_held(directory)
        return False
    except OSError as error:
        if error.errno != errno.EBADF:
            raise
        return True


def _start(directory: Path, settings: ServerSettings) -> None:
    binary = find_binary()
    socket = socket_path(directory)
    socket.unlink(missing_ok=True)
    cut_zeros(directory)
    config = directory / "server.conf"
    write_whole(config, configuration(directory, socket, settings), is_private=True)
    alive: list[int] = []
    try:
        append_lines(directory / "server.log", "")  # a server that was killed may have left half a line
        for path in _alive_locks(directory):
            flags = os.O_RDONLY if path == directory else os.O_RDWR | os.O_CREAT
            alive.append(os.open(path, flags | os.O_CLOEXEC, 0o600))
            _starting.add(alive[-1])
            # Whoever just looks holds it for a moment.
            while not try_lock(alive[-1], fcntl.LOCK_EX):
                time.sleep(LOCK_POLL_SECONDS)
        with (directory / "server.log").open("ab") as log:
            child = subprocess.Popen(
                [binary.path, config],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=directory,
                # A session of its own: neither ctrl-C in the starter's terminal nor the starter's end reaches it.
                start_new_session=True,
                pass_fds=alive,
            )
    except OSError as error:
        raise ServerUnreachable(f"cannot start the embedded server {binary.path}: {error}") from error
    finally:
        for descriptor in alive:
            _starting.discard(descriptor)
            os.close(descriptor)
    for former in _children:
        former.poll()  # a parent must reap its children
    _children[:] = [former for former in _children if former.returncode is None]
    _children.append(child)
    write_record(directory, pid=child.pid, socket=socket)
    _watch(directory, child.pid, socket)


def _watch(directory: Path, pid: int, socket: Path) -> None:
    """Starts the process that ends the server once nobody uses it. Without one it runs on, as it must then."""
    reaper = Path(__file__).with_name("embedded_reaper.py")
    words: list[str | Path] = [sys.executable, "-I", "-S", reaper, directory, str(pid), socket, str(UNUSED_SECONDS)]
    with contextlib.suppress(OSError):
        _children.append(
            subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )
        )


def _await_ready(directory: Path, socket: Path, deadline: float) -> int | None:
    """The server's process once it has loaded its data; None when it has ended.

    Raises:
        ServerUnreachable: it is not ready in time, or alive without a socket.
    """
    state = "did not listen"
    silent = time.monotonic() + SOCKET_SECONDS
    while time.monotonic() < deadline:
        try:
            with _client(socket) as client:
                # INFO is answered while the data load, PING is not.
                info = client.info("server", "persistence")
            if not info.get("loading", 0):
                return int(info["process_id"])
            state = "is still loading its data"
        except redis.TimeoutError:
            state = "listens but does not answer"
        except redis.ConnectionError:
            if not _is_alive(directory):
                return None
            if time.monotonic() > silent:
                break
        time.sleep(LOCK_POLL_SECONDS)
    pid = read_record(directory).get("pid", "unknown")
    if state == "did not listen":
        raise ServerUnreachable(
            f"a server is at work on {directory} (its lock is held), and nobody listens at its socket {socket}. Where "
            "it was started on another host or in another container, use it there, give both one server by its address "
            "(--redis), or name another home here. Where its socket was removed, end it once, and its data are whole: "
            f'pkill -f "{directory}/server.conf"'
        )
    raise ServerUnreachable(f"the embedded server (pid {pid}) {state} at {socket}.\n{log_tail(directory)}")


def _client(socket: Path) -> redis.Redis:
    return redis.Redis(
        unix_socket_path=str(socket),
        protocol=3,
        retry=Retry(NoBackoff(), 0),
        socket_timeout=ANSWER_TIMEOUT_SECONDS,
        socket_connect_timeout=ANSWER_TIMEOUT_SECONDS,
        driver_info=None,
    )


def _stop(directory: Path, deadline: float) -> bool:
    """Asks the server to end, and waits for it: it syncs its append-only file before it goes."""
    socket = _socket_of(directory)
    if not _is_alive(directory):
        return False
    with contextlib.suppress(redis.RedisError), _client(socket) as client:
        client.execute_command("SHUTDOWN")
    while _is_alive(directory):
        if time.monotonic() > deadline:
            return False
        time.sleep(LOCK_POLL_SECONDS)
    for path in (directory / "server.json", socket):
        path.unlink(missing_ok=True)
    if socket.parent != directory:
        with contextlib.suppress(OSError):
            socket.parent.rmdir()
    return True


def _join(directory: Path) -> int:
    descriptor = os.open(directory / "users.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _release_all() -> None:
    global _is_exiting
    _is_exiting = True
    for server in tuple(_joined):
        server.release(timeout_seconds=10.0)
    for child in _children:
        if child.poll() is None:
            # It outlives this process on purpose, so its finalizer has nothing to warn of.
            child.returncode = 0


def _after_fork() -> None:
    for descriptor in _starting:
        os.close(descriptor)
    _starting.clear()
    for server in tuple(_joined):
        server._rejoin()


atexit.register(_release_all)
os.register_at_fork(after_in_child=_after_fork)
