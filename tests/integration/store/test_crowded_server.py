"""A server whose queue of connections is full: more come at once than it has the CPU to accept."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from rlbuffer.config.settings import ServerSettings
from rlbuffer.process.file_locks import exclusive
from rlbuffer.store.server.connection import Connection

pytestmark = [pytest.mark.server, pytest.mark.usefixtures("server_binary")]

SETTINGS = ServerSettings(maxmemory="64mb", appendfsync="no")


@pytest.fixture
def crowded(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Connection]:
    """To an embedded server that is halted, and whose queue of connections is full: the next ones hear EAGAIN. Its
    blocking client has none yet."""
    monkeypatch.setattr("rlbuffer.store.server.embedded_files.BACKLOG", 1)
    with Connection(None, home=home, server=SETTINGS, name="test") as c:
        assert c.embedded is not None
        os.kill(c.embedded.pid, signal.SIGSTOP)
        others: list[socket.socket] = []
        try:
            with suppress(BlockingIOError):
                while True:
                    others.append(socket.socket(socket.AF_UNIX))
                    others[-1].setblocking(False)
                    others[-1].connect(str(c.embedded.home / "server" / "server.sock"))
            yield c
        finally:
            os.kill(c.embedded.pid, signal.SIGCONT)
            for other in others:
                other.close()


def test_a_server_with_a_full_queue_of_connections_is_waited_for_and_nothing_is_lost(crowded: Connection) -> None:
    """A thousand processes that start at once are more than a server accepts that has little of the CPU."""
    assert crowded.embedded is not None
    tries: list[int] = []

    def write() -> int:
        tries.append(threading.get_ident())
        return int(crowded.blocking.incr("k"))

    losses = crowded.losses
    # Somebody else holds the lock that a server is started and stopped with: it is not asked for.
    with (
        exclusive(crowded.embedded.home / "server" / "start.lock", time.monotonic() + 5),
        ThreadPoolExecutor(8) as pool,
    ):
        written = [pool.submit(crowded.call, write) for _ in range(8)]
        while len(tries) < 24 or len(set(tries)) < 8:
            assert not any(future.done() for future in written), "nobody gave up"
            time.sleep(0.01)
        os.kill(crowded.embedded.pid, signal.SIGCONT)
        assert sorted(future.result() for future in written) == list(range(1, 9))
    assert crowded.losses == losses
