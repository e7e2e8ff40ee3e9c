"""What a process says, written by a thread of its own: a reader that leaves, or does not read, stops nobody.

`rlbuffer run | tee run.txt`: ctrl-C reaches `tee`, too, which is gone before the run has drained. `rlbuffer serve |
less`, or ctrl-S in a terminal: the reader is there and does not read.

``log.info("step %d ...", n, extra=fields("step", step=n))`` is one line of text, or with ``--display json`` one object
with the time, the level, the logger, the text and the fields. What comes for each group alone is logged at DEBUG: JSON
has it, plain text does not.
"""

from __future__ import annotations

import atexit
import dataclasses
import io
import json
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from rlbuffer.state.text import plural, printable

KEPT_BYTES = 1 << 20
"""What waits for a reader; lines that come then are counted and left out."""
UNREAD_SECONDS = 5.0
"""Seconds that the end of a process waits for a reader that is late."""
AGAIN_SECONDS = 60.0
"""A trouble that lasts is said once, and again after so long."""
ROOT = logging.getLogger("rlbuffer")
_ended: Callable[[], None] | None = None
"""Takes away what :func:`start` began."""
_outputs: list[_Output] = []


def fields(event: str, of: Any = None, /, **values: Any) -> dict[str, Any]:
    """What ``--display json`` has of a line besides its text: ``extra`` of a call of a logger. The fields of `of`, a
    dataclass, are among them."""
    parts = {} if of is None else {part.name: getattr(of, part.name) for part in dataclasses.fields(of)}
    return {"fields": {"event": event, **parts, **values}}


def start(display: str = "plain", *, clock: bool = True, write: Callable[[str], None] | None = None) -> None:
    """Begins to write what is logged: to stdout, or where `write` takes a line."""
    global _ended
    if _ended is not None:
        return
    outlive_readers()
    handler = _Lines(_as_json if display == "json" else _as_text, clock, write or to_stdout)
    handler.setLevel(logging.DEBUG if display == "json" else logging.INFO)
    was = ROOT.level, ROOT.propagate
    ROOT.addHandler(handler)
    ROOT.setLevel({"none": logging.CRITICAL + 1, "json": logging.DEBUG}.get(display, logging.INFO))
    ROOT.propagate = False

    def end() -> None:
        ROOT.removeHandler(handler)
        ROOT.setLevel(was[0])
        ROOT.propagate = was[1]

    _ended = end


def stop() -> None:
    """Ends what :func:`start` began; waits a little for a reader that is late."""
    global _ended
    for output in _outputs:
        output.drain()
    if _ended is not None:
        _ended()
        _ended = None


atexit.register(stop)


def to_stdout(line: str) -> None:
    """Prints a line whole, whatever other threads print."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


@contextmanager
def written(display: str, *, clock: bool = True, write: Callable[[str], None] | None = None) -> Iterator[None]:
    """Writes what is logged while the block runs, as :func:`start` says."""
    start(display, clock=clock, write=write)
    try:
        yield
    finally:
        stop()


@contextmanager
def heard(logger: str, take: Callable[[dict[str, Any]], None], level: int = logging.DEBUG) -> Iterator[None]:
    """Hands text and fields of each line of `logger` from `level` on to `take` while the block runs."""

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            take({"text": record.getMessage(), "event": ""} | getattr(record, "fields", {}))

    handler, log = Heard(level), logging.getLogger(logger)
    was = log.level
    log.addHandler(handler)
    log.setLevel(min(level, log.getEffectiveLevel()))
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(was)


class RateLimited:
    """Decides when to say a trouble that is met again and again: at once, then every minute."""

    def __init__(self) -> None:
        self._told: dict[Hashable, float] = {}

    def is_due(self, trouble: Hashable, now: float) -> bool:
        """True when `trouble` is to be said now: an error's first line, or the key of a record."""
        if isinstance(trouble, str):
            trouble = trouble.partition("\n")[0]  # what follows may differ each time
        if now < self._told.get(trouble, float("-inf")) + AGAIN_SECONDS:
            return False
        self._told[trouble] = now
        return True

    def is_over(self) -> None:
        """The trouble has passed: another one is said at once."""
        self._told.clear()


def outlive_readers() -> None:
    """Gives what this process prints to a thread, which writes it: for the streams that the process was started with.
    One that somebody has put in their place is left alone."""
    places: dict[tuple[int, int], _Output] = {}
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None or stream is not getattr(sys, f"__{name}__"):
            continue
        stream.flush()
        there = os.fstat(stream.fileno())
        place = there.st_dev, there.st_ino
        if place not in places:
            places[place] = _Output(stream.fileno())
        text = io.TextIOWrapper(places[place], encoding=stream.encoding, errors="backslashreplace", line_buffering=True)
        setattr(sys, name, text)
    if places:
        _outputs.extend(places.values())
        os.register_at_fork(after_in_child=_print_itself)


def _print_itself() -> None:
    """In a process that was forked from this one: it has no thread that writes."""
    _outputs.clear()
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__


class _Output(io.BufferedIOBase):
    """A descriptor that a thread writes to. What comes while too much waits for the reader is left out; a line says how
    much, as soon as the reader has the rest.

    `logging.handlers.QueueListener` would write log records alone: what is printed, and a traceback, would wait for the
    reader. Its `stop` waits for one that does not read for ever."""

    def __init__(self, number: int) -> None:
        self.name = number  # as `io.FileIO` has it
        self._lock = threading.RLock()
        self._waiting: queue.SimpleQueue[bytes | threading.Event] = queue.SimpleQueue()
        self._size = self._left_out = 0
        self._is_late = False
        threading.Thread(target=self._work, name="output", daemon=True).start()

    def write(self, data: Any, /) -> int:
        new = bytes(data)
        with self._lock:
            if self._left_out or (self._size and self._size + len(new) > KEPT_BYTES):
                self._left_out += new.count(b"\n")
            else:
                self._size += len(new)
                self._waiting.put(new)
        return len(new)

    def drain(self) -> None:
        """Waits until all is written; for a reader that does not read only once."""
        for _ in range(2):  # behind the last line may come the one that counts
            done = threading.Event()
            self._waiting.put(done)
            self._is_late = not done.wait(0 if self._is_late else UNREAD_SECONDS)

    def _work(self) -> None:
        while True:
            data = self._waiting.get()
            if isinstance(data, threading.Event):
                data.set()
                continue
            rest = data
            with suppress(OSError):  # EPIPE; EIO of a terminal that is gone; a full disk
                while rest:
                    rest = rest[os.write(self.name, rest) :]
            with self._lock:
                self._size -= len(data)
                left_out = 0 if self._size else self._left_out
                self._left_out -= left_out
            if left_out:
                text = f"{plural(left_out, 'line')} left out: nobody read them"
                ROOT.warning("%s", text, extra=fields("left_out", lines=left_out))

    def fileno(self) -> int:
        return self.name

    def isatty(self) -> bool:
        return os.isatty(self.name)

    def writable(self) -> bool:
        return True

    def close(self) -> None:
        """Nothing: both streams may write here, until the end of the process."""


class _Lines(logging.Handler):
    """Hands each record to `write` as a line."""

    def __init__(
        self, form: Callable[[logging.LogRecord, bool], str], clock: bool, write: Callable[[str], None]
    ) -> None:
        super().__init__()
        self._form, self._clock, self._write = form, clock, write

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._write(self._form(record, self._clock))
        except Exception:
            self.handleError(record)


def _as_text(record: logging.LogRecord, clock: bool) -> str:
    at = time.strftime("%H:%M:%S ", time.localtime(record.created)) if clock else ""
    mark = "! " if record.levelno >= logging.WARNING else ""
    return f"{at}{mark}{printable(record.getMessage(), lines=True)}"


def _as_json(record: logging.LogRecord, clock: bool) -> str:
    line = {"time": record.created, "level": record.levelname.lower(), "logger": record.name}
    return json.dumps(line | {"text": record.getMessage()} | getattr(record, "fields", {}), default=_plain)


def _plain(value: Any) -> Any:
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) else str(value)  # type: ignore[arg-type]
