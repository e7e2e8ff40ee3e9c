"""Threads that keep no process from ending: for work of the user's own, which may hang, and for what waits."""

from __future__ import annotations

import asyncio
import faulthandler
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from tempfile import TemporaryFile
from typing import TypeVar

T = TypeVar("T")

Place = tuple[str, int, str]
"""File, line, function."""

MOST_IDLE = 16
"""Threads that wait for more work: more than a moment's pieces of short work need."""
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
"""A line of faulthandler's."""


async def in_thread(work: Callable[[], T]) -> T:
    """Does `work` in a daemon thread of its own, and gives or raises what it does.

    ``asyncio.to_thread`` takes a thread of a pool that is joined before the process can end: one call that never
    returns would hold it for ever. Here nobody waits for a thread that is not awaited any more; it goes along with the
    cancellation (`thread`), for whoever asks where it is.
    """
    return await _done(work, _started)


class KeptThreads:
    """Daemon threads that are kept for more: for many short pieces of work, of which each would start a thread.

    As with :func:`in_thread` no piece waits for another one, and nobody waits for a thread that is not awaited any
    more.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._idle: list[_Kept] = []
        self._is_closed = False

    @property
    def idle(self) -> int:
        """Threads that wait for more."""
        return len(self._idle)

    async def do(self, work: Callable[[], T]) -> T:
        """Does `work` in a thread that is idle, else in a new one, and gives or raises what it does."""
        return await _done(work, self._given)

    def close(self) -> None:
        """Ends the idle threads; those at work end after it. Work may still be done, each in a thread of its own."""
        with self._lock:
            self._is_closed, idle, self._idle = True, self._idle, []
        for thread in idle:
            thread.work.put(None)

    def _given(self, run: Callable[[], None]) -> threading.Thread:
        with self._lock:
            thread = self._idle.pop() if self._idle else None
        if thread is None:
            thread = _Kept(self._name, self._rests)
            thread.start()
        thread.work.put(run)
        return thread

    def _rests(self, thread: _Kept) -> bool:
        """A thread has done its work. -> whether it is kept for more."""
        with self._lock:
            if self._is_closed or len(self._idle) >= MOST_IDLE:
                return False
            self._idle.append(thread)
            return True


class _Kept(threading.Thread):
    """Does what comes; None ends it."""

    def __init__(self, name: str, rests: Callable[[_Kept], bool]) -> None:
        super().__init__(name=name, daemon=True)
        self.work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._rests = rests

    def run(self) -> None:
        while (run := self.work.get()) is not None:
            run()
            del run  # what it holds would stay until there is more to do
            if not self._rests(self):
                return


def _started(run: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=run, name="user-work", daemon=True)
    thread.start()
    return thread


async def _done(work: Callable[[], T], begin: Callable[[Callable[[], None]], threading.Thread]) -> T:
    """What `work` gives or raises in the thread that `begin` takes for it."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[tuple[list[T], BaseException | None]] = loop.create_future()

    def finish(value: list[T], error: BaseException | None) -> None:
        if not outcome.done():
            outcome.set_result((value, error))

    def run() -> None:
        value: list[T] = []
        error: BaseException | None = None
        try:
            value = [work()]
        except BaseException as raised:  # whatever it is, it belongs to whoever awaits this
            error = raised
        with suppress(RuntimeError):  # the loop is closed: nobody awaits it any more
            loop.call_soon_threadsafe(finish, value, error)

    thread = begin(run)
    try:
        done, raised = await outcome
    except asyncio.CancelledError as cancelled:
        cancelled.thread = thread  # type: ignore[attr-defined]
        raise
    if raised is not None:
        raise raised
    return done[0]


def begun(work: Callable[[], T], name: str) -> Future[T]:
    """Begins `work` in a daemon thread of its own. The threads of an executor are joined before a process can end."""
    future: Future[T] = Future()

    def run() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(work())
        except BaseException as error:  # whoever asks for the result gets it
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def places_of_thread(ident: int | None) -> list[Place]:
    """The places where a thread is at this moment, the innermost one last; none of one that has ended.

    `faulthandler` looks while nothing else runs. Following ``f_back`` from Python while the thread goes on has crashed
    the interpreter (CPython 3.11.7).
    """
    if ident is None:
        return []
    with TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        threads = file.read().decode(errors="replace").split("\n\n")
    stack = next((thread for thread in threads if f"hread 0x{ident:016x} " in thread), "")
    return [(name, int(line), function) for name, line, function in reversed(_FRAME.findall(stack))]
