"""The embedded server: a Redis or Valkey of one's own under ``home/server/``, found when it runs, started when not.

Every process that uses it holds a shared lock on ``users.lock``. The last one that leaves cleanly stops it; when all
users crash it runs on and is found again, so that a run survives any of its processes, and its data survive it.

Three locks, all released by the kernel when their holder dies, so none can be left behind:

- ``start.lock``: exclusive while a server is started or stopped. Eight processes at once start one. A server at work is
  joined without it.
- ``users.lock``: shared, one per user. A user that can turn its own into an exclusive one is the last.
- ``alive.lock``: exclusive, inherited by the server itself. While it is held nobody starts a second server on the same
  files, whatever the socket or a stale pid says.

Losses by kind of failure (measured with Valkey 9.1.2; docs/log.md). A clean stop loses nothing. When the server process
alone is killed, ``appendfsync always`` and ``no`` lose no acknowledged write: both hand each write to the kernel before
they answer. ``everysec`` does so too, except while an fsync is under way: then the server holds the write back, for up
to two seconds, and still answers; with an fsync slowed to 0.7 s a kill lost every write acknowledged meanwhile, on a
quick disk none. No setting turns that off. When the power goes, ``always`` loses nothing, ``everysec`` up to two
seconds, and ``no`` whatever the kernel had not written back, about 30 s on Linux.

`home` must be on a filesystem with working ``flock`` and must not be shared between hosts: a unix socket is local.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from rlbuffer.config.settings import ServerSettings
from rlbuffer.errors import ConfigError, ServerUnreachable
from rlbuffer.process.file_locks import LOCK_POLL_SECONDS, exclusive, is_held, try_lock
from rlbuffer.process.files import write_whole
from rlbuffer.store.server.binary import find_binary
from rlbuffer.store.server.embedded_files import (
    configuration,
    log_tail,
    read_record,
    socket_address,
    socket_path,
    write_record,
)
from rlbuffer.store.server.embedded_process import children, is_dead, left_behind, state_and_program
from rlbuffer.store.server.suitable import identity

ANSWER_TIMEOUT_SECONDS = 2.0
"""A server that answers INFO later than this is busy or stopped, not gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """A server's answer about itself."""

    pid: int
    name: str
    version: str
    is_loading: bool

    def server(
        self, home: Path, socket: str, *, started_here: bool = False, users: int | None = None
    ) -> EmbeddedServer:
        """The server that answered at `socket`; `users` is the descriptor of a user's lock."""
        return EmbeddedServer(
            home=home,
            address=socket_address(socket),
            pid=self.pid,
            name=self.name,
            version=self.version,
            started_here=started_here,
            _users=users,
        )


@dataclass(slots=True, kw_only=True, eq=False)
class EmbeddedServer:
    """A running embedded server, and this process's place among its users.

    Lifecycle: `ensure` (a user) -> `release` (no longer one). A server that `find` gives never was a user.
    """

    home: Path
    address: str
    """``unix:///...sock?db=0``."""
    pid: int
    name: str
    """``redis`` or ``valkey``."""
    version: str
    started_here: bool
    """This call started it; False when it was found running."""
    _users: int | None = field(default=None, repr=False)
    """File descriptor that holds the shared lock."""
    _mutex: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def log(self) -> Path:
        """The server's log file."""
        return self.home / "server" / "server.log"

    @property
    def is_user(self) -> bool:
        """This process counts as a user through this object."""
        return self._users is not None

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
_is_exiting = False
"""The interpreter is ending: a daemon thread that loses the server now must not start it again."""


def ensure(home: Path, settings: ServerSettings, *, timeout_seconds: float = 60.0) -> EmbeddedServer:
    """Finds the home's server or starts it, waits until it answers, and makes this process one of its users.

    `settings` count when it starts; a server that already runs keeps those it was started with.

    Raises:
        ServerUnreachable: no program, no start, or no answer in time; the message has the log's last lines.
        ConfigError: a setting that no server would take, or a home that cannot be made.
    """
    if _is_exiting:
        raise ServerUnreachable("this process is ending: it does not start the embedded server again")
    home = home.expanduser().absolute()
    directory = home / "server"
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ConfigError(f"home: {directory} cannot be made: {error.strerror}", setting="home") from None
    directory.chmod(0o700)
    deadline = time.monotonic() + timeout_seconds
    server = _join_at_work(home, deadline)
    if server is None:
        with exclusive(directory / "start.lock", deadline):
            is_ours = False
            while True:
                if not is_held(directory / "alive.lock") or _bury(directory):
                    if is_ours:
                        raise ServerUnreachable(f"the embedded server ended before it answered.\n{log_tail(directory)}")
                    _start(directory, settings)
                    is_ours = True
                socket = read_record(directory).get("socket") or str(socket_path(directory))
                answer = _await_ready(directory, Path(socket), deadline)
                if answer is not None:
                    break
            write_record(directory, pid=answer.pid, socket=socket, program=state_and_program(answer.pid)[1])
            server = answer.server(home, socket, started_here=is_ours, users=_join(directory))
    _joined.add(server)
    return server


def _join_at_work(home: Path, deadline: float) -> EmbeddedServer | None:
    """Joins a server whose process lives, without the lock that one starts and stops with: a thousand may come at once.
    None when it does not live, or its last user is about to stop it."""
    directory = home / "server"
    recorded = read_record(directory)
    socket = recorded.get("socket")
    if not isinstance(socket, str) or not is_held(directory / "alive.lock") or is_dead(recorded):
        return None
    try:
        users = _join(directory)
    except BlockingIOError:
        return None
    # From here on nobody stops it.
    try:
        answer = _await_ready(directory, Path(socket), deadline)
    except ServerUnreachable:
        os.close(users)
        raise
    if answer is None:
        os.close(users)
        return None
    return answer.server(home, socket, users=users)


def find(home: Path) -> EmbeddedServer | None:
    """The home's server if it runs and answers, without becoming one of its users, or None. Changes nothing."""
    home = home.expanduser().absolute()
    directory = home / "server"
    socket = read_record(directory).get("socket")
    if not isinstance(socket, str) or not is_held(directory / "alive.lock"):
        return None
    try:
        answer = _look(Path(socket))
    except redis.TimeoutError:
        return None
    return None if answer is None else answer.server(home, socket)


def _start(directory: Path, settings: ServerSettings) -> None:
    binary = find_binary()
    socket = socket_path(directory)
    socket.unlink(missing_ok=True)
    config = directory / "server.conf"
    write_whole(config, configuration(directory, socket, settings), is_private=True)
    alive = os.open(directory / "alive.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        # A `find` that just looks holds it for a moment.
        while not try_lock(alive, fcntl.LOCK_EX):
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
                pass_fds=(alive,),
            )
    except OSError as error:
        raise ServerUnreachable(f"cannot start the embedded server {binary.path}: {error}") from error
    finally:
        os.close(alive)
    children[child.pid] = child
    # Its program is recorded once it answers: a wrapper script changes it with `exec`.
    write_record(directory, pid=child.pid, socket=str(socket), program=None)


def _await_ready(directory: Path, socket: Path, deadline: float) -> _Answer | None:
    """The server's answer once it has loaded its data, or None when it died meanwhile and was not started here."""
    state = "did not listen"
    while time.monotonic() < deadline:
        try:
            answer = _look(socket)
        except redis.TimeoutError:
            state = "listens but does not answer"
            continue
        if answer is not None and not answer.is_loading:
            return answer
        if answer is not None:
            state = "is still loading its data"
        elif not is_held(directory / "alive.lock") or is_dead(read_record(directory)):
            return None
        time.sleep(LOCK_POLL_SECONDS)
    pid = read_record(directory).get("pid", "unknown")
    raise ServerUnreachable(f"the embedded server (pid {pid}) {state} at {socket}.\n{log_tail(directory)}")


def _look(socket: Path) -> _Answer | None:
    """The server that answers at the socket; None when nothing listens. Raises redis.TimeoutError when it is silent."""
    client = redis.Redis(
        unix_socket_path=str(socket),
        protocol=3,
        retry=Retry(NoBackoff(), 0),
        socket_timeout=ANSWER_TIMEOUT_SECONDS,
        socket_connect_timeout=ANSWER_TIMEOUT_SECONDS,
        driver_info=None,
    )
    try:
        # INFO is answered while the data load, PING is not.
        info: Mapping[str, Any] = client.info("server", "persistence")
    except redis.ConnectionError:
        return None
    finally:
        client.close()
    name, version = identity(info)
    return _Answer(pid=int(info["process_id"]), name=name, version=version, is_loading=bool(info.get("loading", 0)))


def _stop(directory: Path, deadline: float) -> bool:
    """SIGTERM, then waits for the end: the server syncs its append-only file before it goes."""
    recorded = read_record(directory)
    if not is_held(directory / "alive.lock") or "pid" not in recorded or is_dead(recorded):
        return False
    try:
        os.kill(int(recorded["pid"]), signal.SIGTERM)
    except ProcessLookupError:
        return False
    while not is_dead(recorded):
        if time.monotonic() > deadline:
            return False
        time.sleep(LOCK_POLL_SECONDS)
    if not is_held(directory / "alive.lock"):
        (directory / "server.json").unlink(missing_ok=True)
    socket = Path(recorded["socket"])
    socket.unlink(missing_ok=True)
    if socket.parent != directory:
        with contextlib.suppress(OSError):
            socket.parent.rmdir()
    return True


def _bury(directory: Path) -> bool:
    """True when the server is dead although its lock is held: a child that it forked to rewrite its file lives on."""
    recorded = read_record(directory)
    if not is_dead(recorded):
        return False
    for pid in left_behind(directory, int(recorded["pid"])):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    patience = time.monotonic() + 1.0
    while is_held(directory / "alive.lock"):
        if time.monotonic() > patience:
            # Held by something that inherited it by accident (a fork in the moment of starting): it guards nothing.
            (directory / "alive.lock").unlink(missing_ok=True)
            break
        time.sleep(LOCK_POLL_SECONDS)
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
    for child in children.values():
        if child.poll() is None:
            # It outlives this process on purpose, so its finalizer has nothing to warn of.
            child.returncode = 0


def _after_fork() -> None:
    for server in tuple(_joined):
        server._rejoin()


atexit.register(_release_all)
os.register_at_fork(after_in_child=_after_fork)
