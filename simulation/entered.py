"""Seeds that run each line: a seed that never runs a changed line goes on as if nothing had changed.

The Lua files say it by their marks (:mod:`simulation.branches`), for every seed of the pool; a tracer says it for
Python, for the first seeds only, since it takes as long as five seeds.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from simulation.branches import around, branches

POOL = 300
"""Seeds that are looked at."""
TRACED = 24
"""The first of those seeds, whose lines of Python are known."""
CHUNK = 5


class Entered:
    """Lines and branches that were entered: seed -> marks, and seed -> file -> lines."""

    def __init__(self, marks: dict[int, list[int]], lines: dict[int, dict[str, list[int]]]) -> None:
        self._marks = marks
        self._lines = lines

    def lines(self, path: str) -> set[int]:
        """Lines of a Python file that any seed runs."""
        return {line for of_seed in self._lines.values() for line in of_seed.get(path, ())}

    def seeds(self, path: str, line: int) -> list[int]:
        """Seeds that may run a line, in the order in which to try them."""
        if not path.endswith(".lua"):
            first = [seed for seed, files in self._lines.items() if line in files.get(path, ())]
            return first + [seed for seed in self._marks if seed not in self._lines]
        script = Path(path).stem
        mark = around(script, line)
        its = {number for number, branch in enumerate(branches()) if branch.script == script}
        numbers = its if mark is None else {mark}
        return [seed for seed, marks in self._marks.items() if not numbers.isdisjoint(marks)] or list(self._marks)


def entered(files: Iterable[str], root: Path, *, processes: int, kept: Path, digest: str) -> Entered:
    """Runs the pool; what an earlier call has seen of the same tree is read from `kept`."""
    record: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    if record.get("tree") != digest:
        parts = [range(first, first + CHUNK) for first in range(0, POOL, CHUNK)]
        with multiprocessing.Pool(processes) as pool:
            seen = list(pool.imap(partial(_look, sorted(files), root), parts))
        record = {"tree": digest, "seeds": [item for part in seen for item in part]}
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(record), encoding="utf-8")
    return Entered(
        {seed: marks for seed, marks, _ in record["seeds"]},
        {seed: lines for seed, _, lines in record["seeds"] if lines},
    )


def _look(files: Sequence[str], root: Path, seeds: Sequence[int]) -> list[tuple[int, list[int], dict[str, list[int]]]]:
    from simulation.__main__ import run_seed

    made = []
    for seed in seeds:
        if seed < TRACED:
            lines = _traced(files, root, seed)
            made.append((seed, lines.pop("", []), lines))
        else:
            made.append((seed, sorted(run_seed(seed).branches), {}))
    return made


def _traced(files: Sequence[str], root: Path, seed: int) -> dict[str, list[int]]:
    """File -> lines; "" -> marks."""
    from simulation.__main__ import run_seed
    from simulation.scheduler import Task

    lines: dict[str, set[int]] = {str(root / file): set() for file in files}

    def local(frame: Any, event: str, arg: object) -> Any:
        if event == "line":
            lines[frame.f_code.co_filename].add(frame.f_lineno)
        return local

    def trace(frame: Any, event: str, arg: object) -> Any:
        return local if frame.f_code.co_filename in lines else None

    begin = Task._run

    def traced(task: Task) -> None:
        sys.settrace(trace)  # a greenlet has a tracer of its own
        begin(task)

    Task._run = traced  # type: ignore[method-assign]
    sys.settrace(trace)
    try:
        marks = sorted(run_seed(seed).branches)
    finally:
        sys.settrace(None)
        Task._run = begin  # type: ignore[method-assign]
    return {str(Path(name).relative_to(root)): sorted(its) for name, its in lines.items()} | {"": marks}


def replayable() -> None:
    """Starts the process again with sets of strings in the order that every replay has."""
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, sys.orig_argv)
