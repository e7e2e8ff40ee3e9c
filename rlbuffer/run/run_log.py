"""The one log of a run: what every process said, in ``run.log`` and to whoever watches."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import IO

from rlbuffer.process.files import append_lines

Say = Callable[[str, str], None]
"""(process name, line)."""
LOG_FILE = "run.log"
"""In the run's folder."""
ERROR = "Error: "
"""The line of a process that ends by an error begins so; what follows it belongs to it."""


class RunLog:
    """Lines of all processes in one file, in the order in which they came.

    Args:
        path: the file; its folder is made by `open`.
        say: hears every line, too.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     log = RunLog(Path(folder) / "logs" / "run.log", say=lambda name, line: print(f"{name}: {line}"))
        ...     log.open()
        ...     log.write_line("serve", "step 1 is ready")
        ...     log.close()
        ...     len(log.path.read_text().splitlines())
        serve: step 1 is ready
        1
    """

    def __init__(self, path: Path, say: Say) -> None:
        self.path = path
        self._say = say
        self._is_open = False
        self._lock = threading.Lock()
        self._is_broken = False
        self._readers: list[threading.Thread] = []
        self.errors: dict[str, list[str]] = {}
        """Process -> the lines of the error that it ended with last."""

    def open(self) -> None:
        """Appends to the file from now on."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._is_open = True

    def write_line(self, name: str, line: str) -> None:
        """Takes in one line."""
        try:
            with self._lock:
                if self._is_open:
                    append_lines(self.path, f"{datetime.now():%H:%M:%S} {name:<14} {line}\n")
        except OSError as error:
            # A full disk must not stop whoever copies a process's output: its pipe would fill, and the process with it.
            if not self._is_broken:
                self._is_broken = True
                self._say("run", f"{self.path} cannot be written: {error.strerror}. Lines are missing there")
        self._say(name, line)

    def follow(self, name: str, stream: IO[str]) -> None:
        """Takes in the lines of a process's output as they come, in a thread, and closes it at its end."""
        self.errors.pop(name, None)

        def copy() -> None:
            with stream:
                for line in stream:
                    if line.strip():
                        if line.startswith(ERROR):
                            self.errors[name] = []
                        if name in self.errors:
                            self.errors[name].append(line.rstrip())
                        self.write_line(name, line.rstrip())

        thread = threading.Thread(target=copy, name=f"log-{name}", daemon=True)
        thread.start()
        self._readers.append(thread)

    def close(self) -> None:
        """Waits a second for each output to end; nothing is written any more."""
        for thread in self._readers:
            thread.join(timeout=1.0)
        with self._lock:
            self._is_open = False
