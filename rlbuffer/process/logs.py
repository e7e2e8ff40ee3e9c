"""What a process says: :mod:`logging`, written by a thread of its own. A reader that does not read stops nobody.

``log.info("step %d ...", n, extra=fields("step", step=n))`` is one line of text, or with ``--display json`` one object
with the time, the level, the logger, the text and the fields. What comes for each group alone is logged at DEBUG: JSON
has it, plain text does not.
"""

from __future__ import annotations

import atexit
import dataclasses
import json
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from logging.handlers import QueueHandler
from typing import Any

from rlbuffer.state.text import plural, printable

KEPT_LINES = 10_000
"""Lines that wait for a reader; newer ones are counted and left out."""
UNREAD_SECONDS = 5.0
"""Seconds that the end of a process waits for a reader that is late."""
AGAIN_SECONDS = 60.0
"""A trouble that lasts is said once, and again after so long."""
ROOT = logging.getLogger("rlbuffer")
_stop: Callable[[], None] | None = None


def fields(event: str, of: Any = None, /, **values: Any) -> dict[str, Any]:
    """What ``--display json`` has of a line besides its text: ``extra`` of a call of a logger. The fields of `of`, a
    dataclass, are among them."""
    own = {} if of is None else {part.name: getattr(of, part.name) for part in dataclasses.fields(of)}
    return {"fields": {"event": event, **own, **values}}


def start(display: str = "plain", *, clock: bool = True, write: Callable[[str], None] | None = None) -> None:
    """Begins to write what is logged, after the last fork: to stdout, or where `write` takes a line."""
    global _stop
    if _stop is not None:
        return
    form = _as_json if display == "json" else _as_text
    waiting: queue.Queue[Any] = queue.Queue(KEPT_LINES)
    handler = _Bounded(waiting)
    handler.setLevel(logging.DEBUG if display == "json" else logging.INFO)
    was = ROOT.level, ROOT.propagate
    ROOT.addHandler(handler)
    ROOT.setLevel({"none": logging.CRITICAL + 1, "json": logging.DEBUG}.get(display, logging.INFO))
    ROOT.propagate = False

    def work() -> None:
        while (record := waiting.get()) is not None:
            with suppress(OSError, ValueError):  # a reader that has left, a full disk: no reason to end
                (write or to_stdout)(form(record, clock))

    thread = threading.Thread(target=work, name="logs", daemon=True)
    thread.start()

    def end() -> None:
        ROOT.removeHandler(handler)
        ROOT.setLevel(was[0])
        ROOT.propagate = was[1]
        deadline = time.monotonic() + UNREAD_SECONDS
        with suppress(queue.Full):
            waiting.put(None, timeout=UNREAD_SECONDS)
            thread.join(deadline - time.monotonic())

    _stop = end


def stop() -> None:
    """Ends what :func:`start` began; waits a little for a reader that is late."""
    global _stop
    if _stop is not None:
        _stop()
        _stop = None


atexit.register(stop)


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


class Lasting:
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


class _Bounded(QueueHandler):
    """Keeps the newest lines out while nobody reads the old ones, and says how many."""

    _left_out = 0

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            if self._left_out:
                text = f"{plural(self._left_out, 'line')} left out: nobody read them"
                extra = fields("left_out", lines=self._left_out)
                self.queue.put_nowait(ROOT.makeRecord(ROOT.name, logging.WARNING, "", 0, text, (), None, extra=extra))
                self._left_out = 0
            self.queue.put_nowait(record)
        except queue.Full:
            self._left_out += 1


def _as_text(record: logging.LogRecord, clock: bool) -> str:
    at = time.strftime("%H:%M:%S ", time.localtime(record.created)) if clock else ""
    mark = "! " if record.levelno >= logging.WARNING else ""
    return f"{at}{mark}{printable(record.getMessage(), lines=True)}"


def _as_json(record: logging.LogRecord, clock: bool) -> str:
    line = {"time": record.created, "level": record.levelname.lower(), "logger": record.name}
    return json.dumps(line | {"text": record.getMessage()} | getattr(record, "fields", {}), default=_plain)


def _plain(value: Any) -> Any:
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) else str(value)  # type: ignore[arg-type]


def to_stdout(line: str) -> None:
    """Past the buffer: a plain exit would wait for a lock that the thread holds which waits for the reader."""
    data = f"{line}\n".encode(sys.stdout.encoding, "backslashreplace")
    sys.stdout.flush()
    while data:
        data = data[os.write(sys.stdout.fileno(), data) :]
