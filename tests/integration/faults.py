"""A TCP proxy in front of a unix socket that swallows replies and cuts connections, and a server that only talks."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType


class CuttingProxy:
    """Forwards everything; a request that holds an armed mark reaches the server, its reply never comes back."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._lock = threading.Lock()
        self._mark = b""
        self._cuts = 0
        self.seen = 0
        """Requests that held the mark."""
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def swallow_replies(self, mark: bytes, times: int) -> None:
        """The next `times` requests that hold `mark` are carried out, and then the connection breaks."""
        with self._lock:
            self._mark, self._cuts, self.seen = mark, times, 0

    def __enter__(self) -> CuttingProxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each in (self._listener, *tuple(self._open)):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.socket(socket.AF_UNIX)
            far.connect(self._target)
            self._open |= {near, far}
            is_cut = threading.Event()
            for work in (self._requests, self._replies):
                threading.Thread(target=work, args=(near, far, is_cut), daemon=True).start()

    def _requests(self, near: socket.socket, far: socket.socket, is_cut: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := near.recv(1 << 16):
                with self._lock:
                    if self._mark and self._mark in data:
                        self.seen += 1
                        if self._cuts:
                            self._cuts -= 1
                            is_cut.set()
                far.sendall(data)
        self._hang_up(far)

    def _replies(self, near: socket.socket, far: socket.socket, is_cut: threading.Event) -> None:
        with contextlib.suppress(OSError):
            # The first byte of the reply tells that the server has done the work.
            while (data := far.recv(1 << 16)) and not is_cut.is_set():
                near.sendall(data)
        self._hang_up(near)

    @staticmethod
    def _hang_up(end: socket.socket) -> None:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


class TalkingServer:
    """Answers HELLO and CLIENT as a server does, and everything else with one fixed reply."""

    def __init__(self, reply: bytes) -> None:
        self._reply = reply
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
                elif b"CLIENT" in data:
                    end.sendall(b"+OK\r\n")
                else:
                    end.sendall(self._reply)


def info_reply(**fields: str) -> bytes:
    """INFO's reply with these fields."""
    text = "".join(f"{name}:{value}\r\n" for name, value in fields.items()).encode()
    return b"=%d\r\ntxt:%b\r\n" % (len(text) + 4, text)
