"""Plain-text report of a benchmark: what ran, on what, the numbers, the targets, and what it does not measure."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


class Report:
    """Prints as it goes and remembers which targets were missed."""

    def __init__(self, *, environments: Sequence[Path] = ()) -> None:
        self.environments = environments
        """Virtual environments that hold peers to run beside."""
        self.missed: list[str] = []
        """One sentence per missed target."""
        self.record: list[dict[str, Any]] = []
        """Per benchmark: what was printed, as JSON types."""

    def begin(self, title: str, *, measures: str, not_measured: str) -> None:
        """Opens a benchmark: title, what it measures, what it does not."""
        where = {"date": datetime.date.today().isoformat(), "commit": commit(), "machine": machine()}
        self.record.append(
            {"benchmark": title, **where, "measures": measures, "does not measure": not_measured}
            | {"lines": [], "tables": [], "targets": {}}
        )
        print(f"\n== {title} ==")
        print("{date}, commit {commit}, {machine}".format(**where))
        print(f"measures: {measures}")
        print(f"does not measure: {not_measured}\n")

    def line(self, text: str = "") -> None:
        """Prints a line."""
        self.record[-1]["lines"] += [text.strip()] if text.strip() else []
        print(text)

    def table(self, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Prints a table: first column to the left, the others to the right."""
        self.record[-1]["tables"].append([dict(zip(head, row, strict=True)) for row in rows])
        widths = [max(len(line[k]) for line in (head, *rows)) for k in range(len(head))]
        for line in (head, ["-" * width for width in widths], *rows):
            cells = [
                cell.ljust(w) if k == 0 else cell.rjust(w) for k, (cell, w) in enumerate(zip(line, widths, strict=True))
            ]
            print("  ".join(cells).rstrip())

    def target(self, name: str, met: bool) -> str:
        """Notes whether a stated target is met. -> ``yes`` | ``NO``."""
        self.record[-1]["targets"][name] = met
        if not met:
            self.missed.append(name)
        return "yes" if met else "NO"

    def end(self) -> int:
        """Prints the missed targets. -> exit code: 0 when all were met, else 1."""
        for name in self.missed:
            print(f"target missed: {name}")
        return 1 if self.missed else 0


def commit() -> str:
    """Short id of the checked-out commit, with ``+`` when tracked files differ from it."""
    try:
        run = subprocess.run(
            ["git", "describe", "--always", "--dirty=+"], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return run.stdout.strip()


def machine() -> str:
    """Python, processor kind, cores and their present load: a timing means nothing without them."""
    load = os.getloadavg()[0]
    return f"Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} cores, load {load:.1f}"


def best_of(work: Callable[[], object], *, times: int = 5, warm: int = 1) -> tuple[float, float]:
    """Runs `work` `warm` times, then `times` times. -> the least (CPU seconds, wall seconds), each by itself."""
    for _ in range(warm):
        work()
    cpu, wall = [], []
    for _ in range(times):
        started, at = time.process_time(), time.perf_counter()
        work()
        cpu.append(time.process_time() - started)
        wall.append(time.perf_counter() - at)
    return min(cpu), min(wall)
