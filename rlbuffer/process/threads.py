"""Threads that keep no process from ending: for work of the user's own, which may hang, and for what waits."""

from __future__ import annotations

import asyncio
import faulthandler
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from tempfile import TemporaryFile
from typing import TypeVar

T = TypeVar("T")

Place = tuple[str, int, str]
"""File, line, function."""

_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
"""A line of faulthandler's."""


async def in_thread(work: Callable[[], T]) -> T:
    """Does `work` in a daemon thread of its own, and gives or raises what it does.

    ``asyncio.to_thread`` takes a thread of a pool that is joined before the process can end: one call that never
    returns would hold it for ever. Here nobody waits for a thread that is not awaited any more; it goes along with the
    cancellation (`thread`), for whoever asks where it is.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[tuple[list[T], BaseException | None]] = loop.create_future()

    def settle(value: list[T], error: BaseException | None) -> None:
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
            loop.call_soon_threadsafe(settle, value, error)

    thread = threading.Thread(target=run, name="user-work", daemon=True)
    thread.start()
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
