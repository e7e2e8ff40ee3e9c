"""Signals, and the end of a process: it stops when it is asked to, and when its supervisor is gone.

A handler leaves a note and nothing else. An exception out of one appears between any two instructions: inside a
destructor, where Python prints it and goes on as if nobody had asked, or with a lock taken.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rlbuffer.process.watchdog import GRACE_SECONDS


class Stopped(Exception):
    """Asked to stop while something was waited for, such as a server that is away."""


class StopRequest:
    """A request to this process to stop, which may come at any time. A long wait looks at it meanwhile."""

    def __init__(self) -> None:
        self.is_set = False

    def set(self) -> None:
        """Asks to stop."""
        self.is_set = True

    def on_signals(self, *numbers: signal.Signals) -> None:
        """Lets these signals ask. Does nothing outside the main thread, where Python does not allow it."""
        if threading.current_thread() is threading.main_thread():
            for number in numbers:
                signal.signal(number, lambda *_: self.set())


@contextmanager
def stop_on_signals(stop: threading.Event) -> Iterator[None]:
    """Inside, SIGTERM, SIGINT and SIGHUP, which a terminal that closes sends, set `stop`; a second one leaves at once
    with exit code 130. A SIGHUP that is ignored, as under nohup, stays so."""

    def handle(number: int, frame: object) -> None:
        if stop.is_set():
            os._exit(130)
        stop.set()

    asking = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        asking.append(signal.SIGHUP)
    before = {number: signal.signal(number, handle) for number in asking}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_with(wait_for_end: Callable[[], Any]) -> None:
    """Sends this process SIGTERM when `wait_for_end` returns, and leaves :data:`GRACE_SECONDS` later regardless."""

    def watch() -> None:
        wait_for_end()
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(GRACE_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="watch-supervisor", daemon=True).start()


def end_with_supervisor() -> None:
    """Ends a process made by the forkserver with its supervisor: the supervisor that asked for this one holds the other
    end of a pipe."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        end_with(parent.join)
