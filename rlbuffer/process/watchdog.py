"""Ends a process that cannot end itself: its interpreter is held, or it was asked to stop and does not come to that.

Python's own timer does it (:mod:`faulthandler`), whose thread needs no interpreter: it prints where all threads are,
and leaves. A thread of Python's winds it up again and again; it cannot while another one holds the interpreter, as a
regular expression may for hours, and it does not any more once the process was asked to stop.
"""

from __future__ import annotations

import faulthandler
import threading
from collections.abc import Iterator
from contextlib import contextmanager

GRACE_SECONDS = 15.0
"""Time that a process has to end once it was asked to."""
HELD_SECONDS = 60.0
"""Time that the interpreter may be held. Reading a large file of weights from a slow disk holds it for tens of seconds;
nobody hears of the process meanwhile, and what it had taken has expired."""
WIND_SECONDS = 1.0


@contextmanager
def ended_when_stuck(stop: threading.Event, *, held_seconds: float | None = None) -> Iterator[None]:
    """Inside, this process ends with exit code 1 when its interpreter is held for `held_seconds`
    (:data:`HELD_SECONDS`), or when it is still there :data:`GRACE_SECONDS` after `stop` was set; the places of all
    threads go to stderr. Nothing of it is left outside."""
    is_over = threading.Event()

    def wind() -> None:
        while not stop.is_set():
            faulthandler.dump_traceback_later(held_seconds or HELD_SECONDS, exit=True, file=2)
            if is_over.wait(WIND_SECONDS):
                return
        faulthandler.dump_traceback_later(GRACE_SECONDS, exit=True, file=2)

    thread = threading.Thread(target=wind, name="watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        faulthandler.cancel_dump_traceback_later()
