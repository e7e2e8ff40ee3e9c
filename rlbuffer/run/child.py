"""One process that a supervisor keeps: how it is started, when it began, how often it failed."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Child:
    """One supervised process."""

    name: str
    start: Callable[[], Any]
    """Starts it; returns a Popen or a multiprocessing Process."""
    process: Any = None
    started: float = 0.0
    failures: int = 0
    restart_at: float = 0.0
    is_finished: bool = False
    """It has done all that it had to do."""
    is_forked: bool = True
    """It comes from the forkserver, which gives none before it has loaded torch."""

    @property
    def pid(self) -> int:
        return int(self.process.pid) if self.process is not None else 0

    def exit_code(self) -> int | None:
        """None while it runs."""
        if self.process is None:
            return None
        poll = self.process.poll if isinstance(self.process, subprocess.Popen) else None
        code = poll() if poll else self.process.exitcode
        return None if code is None else int(code)


def send(pid: int, number: signal.Signals) -> None:
    """Signals a process, if it is still there."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # it ended by itself in between


def signal_name(number: int) -> str:
    """SIGTERM, SIGKILL ..."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
