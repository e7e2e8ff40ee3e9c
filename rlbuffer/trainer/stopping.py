"""Being asked to stop: finish the step, write a checkpoint, leave."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequested(BaseException):
    """Raised by the signal handler, and only while the rank waits for a step. Not an error: nothing failed."""


class StopRequest:
    """Whether somebody asked this process to stop. While it waits for data, the asking interrupts the waiting."""

    def __init__(self) -> None:
        self.is_set = False
        self._is_waiting = False

    def set(self) -> None:
        """Asks to stop."""
        self.is_set = True

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The block may be left by StopRequested at any point; it must not hold anything half done."""
        self._is_waiting = True
        try:
            if self.is_set:
                raise StopRequested
            yield
        finally:
            self._is_waiting = False

    def on_signals(self, *numbers: signal.Signals) -> None:
        """Lets these signals ask. Does nothing outside the main thread, where Python does not allow it."""
        if threading.current_thread() is threading.main_thread():
            for number in numbers:
                signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.is_set = True
        if self._is_waiting:
            self._is_waiting = False
            raise StopRequested
