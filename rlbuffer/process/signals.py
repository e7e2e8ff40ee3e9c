"""Signals, and the end of a process: it stops when it is asked to, and when its supervisor is gone."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

from rlbuffer.process.watchdog import GRACE_SECONDS

_ASKING = signal.SIGTERM, signal.SIGINT


def stop_on_signals(stop: threading.Event) -> None:
    """SIGTERM and SIGINT set `stop`; a second one leaves at once with exit code 130.

    A thread hears them, so a main thread that is busy, blocked or holds a lock of `stop` keeps nobody from stopping.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in _ASKING:
        signal.signal(number, _wake)
    os.register_at_fork(before=_hold_back, after_in_parent=_let_through, after_in_child=_hear_nothing)

    def hear() -> None:
        while signals := os.read(reading, 1):
            if signals[0] not in _ASKING:
                continue
            if stop.is_set():
                os._exit(130)
            stop.set()

    threading.Thread(target=hear, name="signals", daemon=True).start()


def _wake(number: int, frame: object) -> None:
    """What Python runs in the main thread; the number was written to the pipe before."""


def _hold_back() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, _ASKING)


def _let_through() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ASKING)


def _hear_nothing() -> None:
    """A process that the user's code forks ends by a signal, and never writes of it into the pipe of this one."""
    signal.set_wakeup_fd(-1)
    for number in _ASKING:
        signal.signal(number, signal.SIG_DFL)
    _let_through()


def set_on_hangup(hangup: threading.Event, stop: threading.Event) -> None:
    """SIGHUP sets `hangup`; but `stop`, when it comes because the terminal of this process is gone."""
    had_terminal = os.isatty(0)

    def handle(number: int, frame: object) -> None:
        (stop if had_terminal and not os.isatty(0) else hangup).set()

    signal.signal(signal.SIGHUP, handle)


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
