"""Being asked to stop: finish the step, write a checkpoint, leave.

The handler leaves a note and nothing else. An exception out of a handler appears between any two instructions: inside
a destructor, where Python prints it and goes on as if nobody had asked, or with a lock taken.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType


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
                signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.is_set = True


class Stopped(Exception):
    """Asked to stop while something was waited for, such as a server that is away."""
