"""Each reason for which no connection can be had: what is told helps against that one, and nothing else is told."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import pytest
import redis
from faults import TalkingServer, info_reply
from own_server import OwnServer

from rlbuffer.config.settings import ServerSettings
from rlbuffer.errors import RlbufferError, ServerRefused, ServerUnreachable, ServerUnsuitable
from rlbuffer.store.server import connection
from rlbuffer.store.server.connection import Connection

START = "Start one there"
EMBEDDED = "Or use the embedded one"
TLS = "speak TLS"
NO_TLS = "speak no TLS"
FULL = "as many connections as it takes (maxclients)"
HOST = "does not know that name"
WAY = "does a firewall stand between"
RIGHTS = "this process's user may not use it"
FILES = "as many files open as it may"
PORTS = "no port left"
STRANGER = "Another program listens there"
PASSWORD = "at its password"
ACL = "ACL for the user"
PROTECTED = "protected mode"
REPLICA = "it is a replica"
LOADING = "still loading"
CLOSES = "closes a connection that has worked before"
BEFORE = "has answered before"
EVERYTHING = {START, EMBEDDED, TLS, NO_TLS, FULL, HOST, WAY, RIGHTS, FILES, PORTS, STRANGER, PASSWORD, ACL, PROTECTED}
EVERYTHING |= {REPLICA, LOADING, CLOSES, BEFORE}


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "COMMAND_TIMEOUT_SECONDS", 1.0)
    monkeypatch.setattr(connection, "CONNECT_TIMEOUT_SECONDS", 1.0)


def told(url: str, home: Path, *, patience: float = 0.0) -> RlbufferError:
    """What somebody is told who connects there."""
    with pytest.raises(RlbufferError) as caught:
        Connection(url, home=home, server=ServerSettings(), name="x", origin="--redis", patience_seconds=patience)
    return caught.value


def remedies(text: str) -> set[str]:
    return {each for each in EVERYTHING if each.lower() in text.lower()}


# -- sockets -----------------------------------------------------------------------------------------------------------
@contextmanager
def port(answer: Callable[[socket.socket], None] | None = None) -> Iterator[str]:
    """The address of a port where something listens; without `answer` nothing ever comes back."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as open_ones:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    end = open_ones.enter_context(listener.accept()[0])
                    if answer is not None:
                        with suppress(OSError), end:
                            answer(end)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"redis://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def says(words: bytes) -> Callable[[socket.socket], None]:
    def answer(end: socket.socket) -> None:
        end.recv(65536)
        end.sendall(words)
        end.shutdown(socket.SHUT_WR)
        end.recv(65536)  # until it hangs up, so that it reads the words

    return answer


def hangs_up(end: socket.socket) -> None:
    end.recv(1)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def test_nobody_listens(home: Path) -> None:
    error = told(f"redis://127.0.0.1:{free_port()}", home)
    assert (type(error), remedies(str(error))) == (ServerUnreachable, {START, EMBEDDED})


def test_no_such_host(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert remedies(str(told("redis://no-such-host.invalid:6379", home))) == {HOST}


def test_something_is_there_that_says_nothing(home: Path) -> None:
    with port() as url:
        assert remedies(str(told(url, home))) == {TLS}
        assert NO_TLS in remedies(str(told(url.replace("redis", "rediss"), home)))


def test_something_is_there_that_hangs_up(home: Path) -> None:
    with port(hangs_up) as url:
        assert remedies(str(told(url, home))) == {TLS}


WORDS = [
    (b"HTTP/1.1 400 Bad Request\r\n\r\n", ServerUnreachable, {STRANGER}),
    (b"SSH-2.0-OpenSSH_9.2p1\r\n", ServerUnreachable, {STRANGER}),
    (b"-ERR max number of clients reached\r\n", ServerUnreachable, {FULL}),
    (b"-ERR max number of clients + cluster connections reached\r\n", ServerUnreachable, {FULL}),
    (
        b"-DENIED Redis is running in protected mode because protected mode is enabled and no password is set.\r\n",
        ServerUnsuitable,
        {PROTECTED},
    ),
    (b"-LOADING Redis is loading the dataset in memory\r\n", ServerRefused, {LOADING}),
    (b"-MASTERDOWN Link with MASTER is down\r\n", ServerRefused, {REPLICA}),
    (b"-NOAUTH Authentication required.\r\n", ServerUnsuitable, {PASSWORD}),
    (b"-WRONGPASS invalid username-password pair or user is disabled.\r\n", ServerUnsuitable, {PASSWORD}),
]


@pytest.mark.parametrize(("words", "kind", "helps"), WORDS, ids=[words.decode()[:20].strip() for words, *_ in WORDS])
def test_something_is_there_that_answers(home: Path, words: bytes, kind: type[RlbufferError], helps: set[str]) -> None:
    with port(says(words)) as url:
        error = told(url, home)
    assert (type(error), remedies(str(error))) == (kind, helps)


NUMBERS = [
    (errno.EHOSTUNREACH, {WAY}),
    (errno.ENETUNREACH, {WAY}),
    (errno.ETIMEDOUT, {WAY}),
    (errno.EACCES, {RIGHTS}),
    (errno.EPERM, {RIGHTS}),
    (errno.EMFILE, {FILES}),
    (errno.ENFILE, {FILES}),
    (errno.EADDRNOTAVAIL, {PORTS}),
    (errno.ECONNRESET, {TLS}),
    (errno.EPIPE, {TLS}),
]


@pytest.mark.parametrize(("number", "helps"), NUMBERS, ids=[errno.errorcode[number] for number, _ in NUMBERS])
def test_the_socket_fails(home: Path, monkeypatch: pytest.MonkeyPatch, number: int, helps: set[str]) -> None:
    class Failing(socket.socket):
        def connect(self, address: object) -> None:
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(socket, "socket", Failing)
    error = told("redis://127.0.0.1:6379", home)
    assert os.strerror(number).lower() in str(error).lower()
    assert remedies(str(error)) == helps


def test_a_socket_that_is_not_there_or_not_this_users(home: Path, tmp_path: Path) -> None:
    assert remedies(str(told(f"unix://{tmp_path}/none.sock", home))) == {START, EMBEDDED}
    path = tmp_path / "s"
    with closing(socket.socket(socket.AF_UNIX)) as listener:
        listener.bind(str(path))
        listener.listen()
        path.chmod(0)
        if os.geteuid():  # root may use every socket
            assert remedies(str(told(f"unix://{path}", home))) == {RIGHTS}


# -- servers -----------------------------------------------------------------------------------------------------------
def test_a_server_that_is_full_of_connections(server_binary: object, home: Path, tmp_path: Path) -> None:
    with OwnServer(tmp_path / "server", options={"maxclients": "8"}) as server, ExitStack() as idle:
        for _ in range(7):
            idle.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        with suppress(redis.RedisError), redis.Redis(port=server.port) as last:
            last.ping()
            assert remedies(str(told(server.url, home, patience=0.5))) == {FULL}


@pytest.mark.parametrize(
    ("words", "helps"),
    [
        (b"-ERR max number of clients reached\r\n", {FULL}),
        (b"-NOPERM this user has no permissions to run the 'get' command\r\n", {ACL}),
        (b"-ERR ACL failure in script: this user has no permissions\r\n", {ACL}),
        (b"", {BEFORE}),
    ],
)
def test_a_server_that_has_answered_before_is_not_doubted(home: Path, words: bytes, helps: set[str]) -> None:
    with (
        TalkingServer(info_reply(redis_version="7.2.4")) as talking,
        Connection(talking.url, home=home, server=ServerSettings(), name="x", patience_seconds=5) as made,
    ):
        talking.reply = words
        with pytest.raises(RlbufferError) as caught:
            made.call(lambda: made.client.get("k"), patience_seconds=0.0)
    assert remedies(str(caught.value)) == helps
