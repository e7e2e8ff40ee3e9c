"""Threads that keep no process from ending: for work of the user's own, which may hang, and for what waits."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from types import FrameType
from typing import TypeVar

T = TypeVar("T")

Place = tuple[str, int, str]
"""File, line, function."""


async def in_thread(work: Callable[[], T]) -> T:
    """Does `work` in a daemon thread of its own, and gives or raises what it does.

    ``asyncio.to_thread`` takes a thread of a pool that is joined before the process can end: one call that never
    returns would hold it for ever. Here nobody waits for a thread that is not awaited any more; where it was then goes
    along with the cancellation (`places`).
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
        cancelled.places = places_of_thread(thread.ident)  # type: ignore[attr-defined]
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
    """The places where a thread is at this moment, the innermost one last."""
    places = []
    frame: FrameType | None = sys._current_frames().get(ident or 0)
    while frame is not None:
        places.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return places[::-1]
