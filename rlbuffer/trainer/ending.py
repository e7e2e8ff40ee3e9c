"""When one rank has ended, the others end too, in seconds, whatever they are doing.

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
from pathlib import Path
from types import TracebackType

END_SECONDS = 4.0
"""Time that ranks have to end by themselves once one has failed: to see the lost connection, and to report it."""
LOOK_SECONDS = 0.2


def note_start(directory: Path, rank: int) -> None:
    """A rank begins."""
    temporary = directory / f"{rank}.tmp"
    temporary.write_text(str(os.getpid()), encoding="utf-8")
    temporary.replace(directory / f"{rank}.pid")


def note_end(directory: Path, rank: int) -> None:
    """A rank has done all that it should. Called last."""
    (directory / f"{rank}.pid").unlink(missing_ok=True)


class EndTogether:
    """In the launcher: kills what is left of the ranks some seconds after one of them failed."""

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
        while not self._over.wait(LOOK_SECONDS):
            living = self._living()
            if failed_at is None:
                failed_at = time.monotonic() if self._has_failed(living) else None
            elif time.monotonic() - failed_at >= END_SECONDS:
                for rank, pid in living.items():
                    if self._over.is_set():
                        return
                    self.killed.add(rank)
                    _send(pid, signal.SIGKILL)
                return

    def _ranks(self) -> dict[int, int]:
        """rank -> pid, of ranks that have begun and not said that they are done."""
        found = {}
        for path in self._directory.glob("*.pid"):
            with contextlib.suppress(FileNotFoundError):  # it says so at this moment
                found[int(path.stem)] = int(path.read_text(encoding="utf-8"))
        return found

    def _living(self) -> dict[int, int]:
        return {rank: pid for rank, pid in self._ranks().items() if _send(pid, 0)}

    def _has_failed(self, living: dict[int, int]) -> bool:
        """Whether a rank is gone without having finished, or has left a report of an error."""
        reports = self._directory.glob("rank-*.json")
        kinds = [json.loads(path.read_text(encoding="utf-8"))["kind"] for path in reports]
        if kinds:
            return any(kind != "stopped" for kind in kinds)
        return bool(self._ranks().keys() - living.keys())


def _send(pid: int, number: int) -> bool:
    """-> whether there is such a process."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
