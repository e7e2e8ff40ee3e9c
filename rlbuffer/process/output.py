"""The output of a process, when nobody reads it any more.

`rlbuffer run | tee run.txt`: ctrl-C reaches `tee`, too, which is gone before the run has drained. `rlbuffer serve |
less`, or ctrl-S in a terminal: the reader is there and does not read. A process that works for a run goes on, and what
it prints meanwhile goes nowhere, but for the newest lines.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import select
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

UNREAD_SECONDS = 5.0
"""Seconds that a write waits for a reader that does not read. The end of the process waits as long once more."""
MOST_KEPT_BYTES = 1 << 16
"""Bytes of the newest lines, which are kept for such a reader; older ones are left out."""
READER_LOOK_SECONDS = 0.01
"""Seconds until the next try where a descriptor says that it takes something, and then takes nothing."""


def outlive_readers() -> None:
    """Lets this process go on when whoever reads its output leaves or stops reading: a pipe is closed, a terminal is
    gone or halted, a pager has a full screen.

    For the streams that the process was started with; one that somebody has put in their place is left alone.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None or stream is not getattr(sys, f"__{name}__") or isinstance(_below(stream), _Outliving):
            continue
        stream.flush()
        raw = _Outliving(stream.fileno(), "w", closefd=False)
        wrapped = io.TextIOWrapper(
            raw if stream.write_through else io.BufferedWriter(raw),  # through: PYTHONUNBUFFERED
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        atexit.register(_finish, wrapped, raw)
        setattr(sys, name, wrapped)
        setattr(sys, f"__{name}__", wrapped)


def open_closed() -> None:
    """Gives the streams that were closed at the start (``>&-``) a place: else the next file or socket that is opened
    gets the number, and with it what others print there."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)
            stream = open(number, "w" if number else "r", encoding="utf-8", closefd=False)  # noqa: SIM115 - for good
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


class _Outliving(io.FileIO):
    """Drops everything when the reader has left, or the disk is full.

    When the reader does not read, the newest lines are kept and older ones left out. A line says how many as soon as it
    reads again.
    """

    _send: Callable[[memoryview], int] | None = None
    """Writes what is taken at once; None before the first write, and where the descriptor can only wait."""
    _place: tuple[int, int] | None = None
    """Device and inode that :attr:`_send` writes to."""
    _is_late = False
    """The reader has not taken everything: nothing waits for it now."""
    _is_begun = False
    """The reader has a part of a line."""
    _rest = b""
    """End of that line, which comes first."""
    _lines = 0
    """Lines that were left out behind it."""
    _is_json = False
    """They are objects of ``--display json``."""
    _newest = b""
    """Lines that come after that."""
    _is_inside = False
    """The end of the last line that was left out is still to come."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._lock = threading.RLock()  # a stream that is not buffered has none
        self._opened = contextlib.ExitStack()

    def write(self, data: Any, /) -> int:
        size = memoryview(data).nbytes
        with self._lock:
            new = bytes(data)
            if self._is_inside:
                _, newline, new = new.partition(b"\n")
                self._is_inside = not newline
            self._newest += new
            try:
                self._write()
            except OSError:  # EPIPE; EIO of a terminal that is gone; a full disk
                self._newest = b""
            else:
                self._leave_out()
        return size

    def finish(self) -> None:
        """Waits once more for a reader that has not taken everything. The stream is not used after that."""
        with self._lock, contextlib.suppress(OSError, ValueError):
            self._is_late = False
            self._write()

    def close(self) -> None:
        self._opened.close()
        super().close()

    def _write(self) -> None:
        self._rest = self._rest[self._sent(self._rest) :]
        if not self._rest and self._lines:
            self._rest, self._lines = _count_of(self._lines, self._is_json), 0
            self._rest = self._rest[self._sent(self._rest) :]
        if not self._rest:
            self._newest = self._newest[self._sent(self._newest) :]

    def _leave_out(self) -> None:
        """Leaves out the oldest lines when more is kept than :data:`MOST_KEPT_BYTES`."""
        if len(self._newest) <= MOST_KEPT_BYTES:
            return
        end = self._newest.find(b"\n", len(self._newest) - MOST_KEPT_BYTES) + 1 or len(self._newest)
        old, self._newest = self._newest[:end], self._newest[end:]
        if self._is_begun and not self._rest.endswith(b"\n"):
            own = old.find(b"\n") + 1 or len(old)
            self._rest, old = self._rest + old[:own], old[own:]
        if old:
            self._is_json = old.startswith(b"{")
            self._is_inside = not old.endswith(b"\n")
            self._lines += old.count(b"\n") + self._is_inside

    def _sent(self, data: bytes) -> int:
        """Bytes that the reader has taken. Waits for it only when it took everything before."""
        self._find()
        view, sent, deadline = memoryview(data), 0, time.monotonic() + UNREAD_SECONDS
        is_ready = False
        while sent < len(data):
            try:
                sent += self._taken(view[sent:])
                self._is_begun, is_ready = data[sent - 1 : sent] != b"\n", False
            except BlockingIOError:
                left = deadline - time.monotonic()
                if self._is_late or left <= 0:
                    self._is_late = True
                    return sent
                look = select.poll()
                look.register(self.fileno(), select.POLLOUT)
                if is_ready:  # a terminal with room for one byte, and a line's end takes two
                    time.sleep(READER_LOOK_SECONDS)
                is_ready = bool(look.poll(1000 * left))
        if data:
            self._is_late = False
        return sent

    def _taken(self, data: memoryview) -> int:
        if self._send is not None:
            return self._send(data)
        taken = super().write(data)
        if taken is None:
            raise BlockingIOError
        return taken

    def _find(self) -> None:
        """Finds a way to write without waiting.

        The flags of a descriptor belong to all who share it, the user's shell among them. So a pipe or a terminal is
        opened once more.
        """
        there = os.fstat(self.fileno())
        if self._place == (there.st_dev, there.st_ino):
            return
        self._opened.close()
        self._place, self._send = (there.st_dev, there.st_ino), None
        if stat.S_ISSOCK(there.st_mode):
            ours = self._opened.enter_context(socket.socket(fileno=os.dup(self.fileno())))
            self._send = lambda data: ours.send(data, socket.MSG_DONTWAIT)
        elif stat.S_ISFIFO(there.st_mode) or self.isatty():
            # Some systems have no /proc, and after `su` the terminal is another user's: then a write waits.
            with contextlib.suppress(OSError):
                again = os.open(f"/proc/self/fd/{self.fileno()}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
                self._opened.callback(os.close, again)
                self._send = lambda data: os.write(again, data)


def _finish(stream: io.TextIOWrapper, raw: _Outliving) -> None:
    with contextlib.suppress(ValueError):  # closed
        stream.flush()
    raw.finish()


def _count_of(lines: int, is_json: bool) -> bytes:
    """The line that stands for those that were left out, in the form that they had."""
    if is_json:
        return b'{"event": "left_out", "lines": %d}\n' % lines
    return b"... %d line%b left out: nobody read them\n" % (lines, b"s" * (lines > 1))


def _below(stream: Any) -> Any:
    buffer = getattr(stream, "buffer", None)
    return getattr(buffer, "raw", buffer)
