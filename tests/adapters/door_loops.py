"""A trainer's process behind a door, started again and again: a batcher, and a launcher that has imported the trainer.

The script reads lines of its input, starts a process for each and says its pid; it is given RUN, URL and FOLDER, and
writes down what happens as lines of JSON in FOLDER.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from homes import Home

HERE = Path(__file__).parent


class Loops:
    """A batcher, and a process that may be killed."""

    def __init__(self, home: Home, run: str, script: str, settings: str) -> None:
        self.home, self.run, self._script = home, run, script
        home.environment |= {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        file = home.path / f"{run}.toml"
        file.write_text(f'run = "{run}"\n\n{settings}')
        home.start("serve", "--config", file, "--display", "plain", log="serve")
        with home.connect(run) as buffer:
            self.url = buffer.store.server()["address"]
            # The embedded server ends with its last user, and until the batcher is one, that is this line.
            home.wait_until(lambda: buffer.store.heartbeats("batcher"), seconds=60, why="a batcher")
        self._launcher: subprocess.Popen[str] | None = None

    def start(self, line: str) -> int:
        """A process by that line of the script's input; its pid."""
        if self._launcher is None:
            command = [sys.executable, str(HERE / self._script), self.run, self.url, str(self.home.path)]
            pipe = subprocess.PIPE
            self._launcher = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, text=True, env={**os.environ, **self.home.environment}
            )
        assert self._launcher.stdin is not None
        assert self._launcher.stdout is not None
        print(line, file=self._launcher.stdin, flush=True)
        return int(self._launcher.stdout.readline())

    def close(self) -> None:
        """Ends the launcher, which waits for its last process."""
        if self._launcher is not None:
            self._launcher.communicate(timeout=60)

    def lines(self, kind: str) -> list[dict[str, Any]]:
        file = self.home.path / f"{kind}.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def lines_of(self, pid: int, kind: str) -> list[dict[str, Any]]:
        return [line for line in self.lines(kind) if line["pid"] == pid]
