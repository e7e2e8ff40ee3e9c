"""A TCP proxy in front of a server that swallows replies and cuts connections, and a server that only talks."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import IO
from urllib.parse import unquote, urlsplit

import hiredis
import redis

from rlbuffer.store.server.address import is_cluster, options_of

MOMENTS = ("before send", "sent without reply", "after reply")
"""Moments at which a connection breaks."""
INSIDE = "inside"
"""A further one, for requests of several commands."""
INTRODUCTIONS = (b"HELLO", b"SETNAME", b"CLUSTER")
"""Words of the requests by which a client introduces itself, and asks who has which slot of a cluster."""


class CuttingProxy:
    """Forwards everything; a request that holds an armed mark reaches the server, its reply never comes back.

    `target` is the path of a unix socket, or a server's URL. The primaries of a cluster have a port here each, by which
    they are named in the answers that come through here.
    """

    def __init__(self, target: str) -> None:
        targets = primaries_of(target) if is_cluster(target) else [target]
        self._listeners = [socket.create_server(("127.0.0.1", 0)) for _ in targets]
        ports = [int(listener.getsockname()[1]) for listener in self._listeners]
        self.port = ports[0]
        self._targets = dict(zip(self._listeners, targets, strict=True))
        self.url, self._names = f"redis://127.0.0.1:{self.port}/0", dict[bytes, bytes]()
        if is_cluster(target):
            self.url = f"redis+cluster://{','.join(f'127.0.0.1:{port}' for port in ports)}"
            self._names = {b":%d\r\n" % urlsplit(t).port: b":%d\r\n" % p for t, p in zip(targets, ports, strict=True)}
        self._lock = threading.Lock()
        self._mark = b""
        self._cuts = 0
        self.seen = 0
        """Requests that held the mark."""
        self._moment = MOMENTS[1]
        self._nth = self._whole = 0
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        for listener in self._listeners:
            self._begin(self._accept, listener)

    def lead_to(self, target: str) -> None:
        """New connections go to `target`; those that are open stay where they are, as behind a service's address."""
        self._targets = dict.fromkeys(self._listeners, target)

    def swallow_replies(self, mark: bytes, times: int) -> None:
        """The next `times` requests that hold `mark` are carried out, and then the connection breaks."""
        with self._lock:
            self._mark, self._cuts, self.seen, self._moment, self._nth = mark, times, 0, MOMENTS[1], 0

    def cut_inside(self, mark: bytes, whole: int) -> None:
        """The next request that holds `mark`: the server gets so many commands with it whole, and no replies come."""
        with self._lock:
            self._mark, self._cuts, self.seen, self._moment, self._nth, self._whole = mark, 1, 0, INSIDE, 0, whole

    def strike(self, moment: str, nth: int) -> None:
        """The connection of the `nth` request from now breaks at that moment; 0: never, requests are only counted.

        Requests by which a client introduces itself on a new connection do not count.
        """
        with self._lock:
            self._mark, self._cuts, self.seen, self._moment, self._nth = b"*", int(nth > 0), 0, moment, nth

    def __enter__(self) -> CuttingProxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for listener, thread in zip(self._listeners, self._threads, strict=False):
            _hang_up(listener)
            thread.join()  # nobody comes any more
        for each in tuple(self._open):
            _hang_up(each)
        for thread in self._threads:
            thread.join()
        for listener in self._listeners:
            listener.close()

    def _begin(self, work: Callable[..., None], *arguments: socket.socket) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            try:
                far = _connected(self._targets[listener])
            except OSError:
                near.close()  # nobody is there now
                continue
            self._open |= {near, far}
            self._begin(self._forward, near, far)

    def _forward(self, near: socket.socket, far: socket.socket) -> None:
        """One connection, in one thread: a reply goes on its way before the request that follows it is looked at."""
        with near, far, contextlib.suppress(OSError):
            moment = ""
            names: dict[bytes, bytes] = {}
            reply = hiredis.Reader()
            while True:
                ready, _, _ = select.select([far] if moment else [near, far], [], [])
                if far in ready:
                    data = far.recv(1 << 20)
                    for theirs, ours in names.items():
                        data = data.replace(theirs, ours)
                    # The first byte of the reply tells that the server has done the work.
                    if not data or moment == MOMENTS[1]:
                        break
                    near.sendall(data)
                    reply.feed(data)
                    while reply.gets() is not False:
                        pass
                    if moment == MOMENTS[2] and not reply.has_data():
                        break  # it is whole
                else:
                    data = near.recv(1 << 20)
                    if not data:
                        break
                    moment = self._moment_for(data)
                    names = self._names if b"CLUSTER" in data else {}
                    if moment == MOMENTS[0]:
                        break
                    if moment == INSIDE:
                        self._carry_some(data, far)
                        break
                    far.sendall(data)
        self._open -= {near, far}

    def _carry_some(self, data: bytes, far: socket.socket) -> None:
        parts = data.split(self._mark)
        far.sendall(self._mark.join(parts[: self._whole + 1]))
        replies = hiredis.Reader()
        for _ in range(self._whole):
            while replies.gets() is False:
                replies.feed(far.recv(1 << 20))

    def _moment_for(self, data: bytes) -> str:
        with self._lock:
            if not self._mark or self._mark not in data or any(word in data for word in INTRODUCTIONS):
                return ""
            self.seen += 1
            if not self._cuts or self.seen < self._nth:
                return ""
            self._cuts -= 1
            return self._moment


def primaries_of(url: str) -> list[str]:
    """The address of each primary of a cluster."""
    host, port = options_of(url, "")["nodes"][0]
    with redis.Redis(host=host, port=port) as client:
        ranges = client.execute_command("CLUSTER", "SLOTS")
    return sorted({f"redis://{primary[0].decode()}:{primary[1]}/0" for _, _, primary, *_ in ranges})


def _connected(target: str) -> socket.socket:
    place = urlsplit(target)
    if target.startswith("redis://"):
        return socket.create_connection((place.hostname, place.port or 6379))
    far = socket.socket(socket.AF_UNIX)
    far.connect(unquote(place.path))
    return far


def _hang_up(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)


class TalkingServer:
    """Answers HELLO and CLIENT as a server does, and everything else with `reply`, which may be changed."""

    def __init__(self, reply: bytes) -> None:
        self.reply = reply
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> TalkingServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                end, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._talk, args=(end,), daemon=True).start()

    def _talk(self, end: socket.socket) -> None:
        with end, contextlib.suppress(OSError):
            while data := end.recv(1 << 16):
                if b"HELLO" in data:
                    end.sendall(b"%2\r\n$6\r\nserver\r\n$5\r\nredis\r\n$5\r\nproto\r\n:3\r\n")
                else:
                    named = b"CLIENT" in data  # behind the question who answers
                    end.sendall(self.reply + (b"+OK\r\n" if named else b""))


def info_reply(**fields: str) -> bytes:
    """INFO's reply with these fields."""
    text = "".join(f"{name}:{value}\r\n" for name, value in fields.items()).encode()
    return b"=%d\r\ntxt:%b\r\n" % (len(text) + 4, text)


class SlowProxy:
    """A TCP proxy that passes so many bytes a second on to the server, and replies at once."""

    def __init__(self, port: int, *, bytes_per_second: int) -> None:
        self._server, self._rate = port, bytes_per_second
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"
        self._open: set[socket.socket] = set()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def __enter__(self) -> SlowProxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                # Small buffers: what the client has sent is what the line has taken.
                near.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
                far = socket.create_connection(("127.0.0.1", self._server))
                self._open |= {near, far}
                for source, sink, rate in ((near, far, self._rate), (far, near, 0)):
                    thread = threading.Thread(target=self._pass, args=(source, sink, rate))
                    self._threads.append(thread)
                    thread.start()

    @staticmethod
    def _pass(source: socket.socket, sink: socket.socket, rate: int) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if rate:
                    time.sleep(len(data) / rate)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)


class RefusingProxy:
    """A proxy that answers some commands itself, with an error, as a managed server's front does.

    `rule` gets each command's words, and answers with the error's line, or "" where the command goes on.
    """

    def __init__(self, port: int, rule: Callable[[list[bytes]], str]) -> None:
        self._port, self.rule = port, rule
        self._ends: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept)]

    def __enter__(self) -> RefusingProxy:
        self._threads[0].start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for end in (self._listener, *self._ends):
            _hang_up(end)
        for thread in self._threads:
            thread.join()
        for end in (self._listener, *self._ends):
            end.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._port))
            self._ends += [near, far]
            thread = threading.Thread(target=self._talk, args=(near, far))
            self._threads.append(thread)
            thread.start()

    def _talk(self, near: socket.socket, far: socket.socket) -> None:
        """One command after the other, each answered before the next is read."""
        asks, answers = near.makefile("rb"), far.makefile("rb")
        with contextlib.suppress(OSError, ValueError), asks, answers:
            while head := asks.readline():
                raw, words = [head], list[bytes]()
                for _ in range(int(head[1:])):
                    size = asks.readline()
                    word = asks.read(int(size[1:]) + 2)
                    raw += [size, word]
                    words.append(word[:-2])
                if line := self.rule(words):
                    near.sendall(f"-{line}\r\n".encode())
                    continue
                far.sendall(b"".join(raw))
                near.sendall(_reply(answers))
        _hang_up(near)
        _hang_up(far)


def _reply(answers: IO[bytes]) -> bytes:
    """One reply of a server, RESP2 or RESP3, as it came."""
    head = answers.readline()
    kind, size = head[:1], head[1:].strip()
    if kind in (b"$", b"=", b"!") and size != b"-1":
        return head + answers.read(int(size) + 2)
    if kind in (b"*", b"~", b">", b"%") and size != b"-1":
        return head + b"".join(_reply(answers) for _ in range(int(size) * (2 if kind == b"%" else 1)))
    return head
