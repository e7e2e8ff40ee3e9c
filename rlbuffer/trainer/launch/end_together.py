"""Ends all ranks when one has ended, in seconds, whatever they are doing.

Torch's launcher asks them and waits for half a minute. A rank that hangs in an exchange, in its data or halted never
answers, and has nothing to save: a checkpoint takes all ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from rlbuffer.process.files import write_whole

END_SECONDS = 4.0
"""Time that ranks have to end by themselves once one has failed: to see the lost connection, and to report it."""
RANKS_LOOK_SECONDS = 0.2


def note_start(directory: Path, rank: int) -> None:
    """A rank begins."""
    write_whole(directory / f"{rank}.pid", f"{os.getpid()} {_begin_of(os.getpid())}")


def note_end(directory: Path, rank: int) -> None:
    """A rank has done all that it should. Called last."""
    (directory / f"{rank}.pid").unlink(missing_ok=True)


class EndTogether:
    """Kills the remaining ranks from the launcher, some seconds after one of them failed."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.killed: set[int] = set()
        """Ranks that did not end by themselves."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="end-together", daemon=True)

    def __enter__(self) -> EndTogether:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        failed_at: float | None = None
        while not self._over.wait(RANKS_LOOK_SECONDS):
            if failed_at is None:
                failed_at = time.monotonic() if self._has_failed() else None
            elif time.monotonic() - failed_at >= END_SECONDS:
                for rank, process in self._ranks().items():
                    if self._over.is_set():
                        return
                    if process.is_there():
                        self.killed.add(rank)
                        process.kill()
                return

    def _ranks(self) -> dict[int, _Process]:
        """The processes of ranks that have begun and not said that they are done."""
        processes = {}
        for path in self._directory.glob("*.pid"):
            # It says so at this moment, or the file was not written by a rank: such a one is not watched.
            with contextlib.suppress(OSError, ValueError):
                pid, begin = path.read_text(encoding="utf-8").split(" ")
                processes[int(path.stem)] = _Process(int(pid), begin)
        return processes

    def _has_failed(self) -> bool:
        """True when a rank is gone without having finished, or has left a report of an error."""
        kinds = [_kind_of(path) for path in self._directory.glob("rank-*.json")]
        if kinds:
            return any(kind != "stopped" for kind in kinds)
        gone = {rank for rank, process in self._ranks().items() if not process.is_there()}
        # Looked at once more: one that was done took its note away before it went. One that began since is not gone.
        return bool(gone & self._ranks().keys())


def _kind_of(report: Path) -> str:
    """The kind of a rank's end, as its report says; "" when that cannot be read."""
    try:
        return str(json.loads(report.read_text(encoding="utf-8"))["kind"])
    except (OSError, ValueError, LookupError, TypeError):
        return ""


@dataclass(frozen=True, slots=True)
class _Process:
    """A process, by its number and its begin: numbers come again."""

    pid: int
    begin: str

    def is_there(self) -> bool:
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        return _begin_of(self.pid) == self.begin

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


def _begin_of(pid: int) -> str:
    """The begin of a process, in ticks since the boot; "" where there is no /proc."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[19]
