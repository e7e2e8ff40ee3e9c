"""The browser of `rlbuffer inspect` at 10,000 groups: until its rows are there, until its header is, and filters.

The target is half a second until the rows. Imports are not in it: they are measured apart, in another interpreter.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import rlbuffer
from benchmarks.report import Report
from rlbuffer.testing import make_group

PENDING_GROUPS = 10_000
MOST_SECONDS = 0.5
REPEATS = 5
SEARCHES = ("env:none", "reward>2", "rollout.reward>2", "stop:length", "text:/never/")
"""By what is in the pool, by every rollout of it, and by payloads."""


def run(report: Report) -> None:
    """Pushes groups to an embedded server, opens the browser a few times."""
    report.begin(
        "browser",
        measures=f"seconds until the first 1,000 of {PENDING_GROUPS:,} pending groups are shown, and the header",
        not_measured="a real terminal's drawing, a server over a network, damaged or very large metadata",
    )
    home = Path(tempfile.mkdtemp(prefix="rlb-bench-"))
    try:
        with rlbuffer.connect(run="bench", config={"home": str(home)}) as buffer:
            writer = buffer.writer("w")
            for i in range(PENDING_GROUPS):
                writer.push(make_group(env="math", size=4, lengths=[8] * 4, group_id=f"math.{i}"))
            times = [asyncio.run(_opened(buffer)) for _ in range(REPEATS)]
            searches = [[where, f"{_searched(buffer, where):.3f}"] for where in SEARCHES]
    finally:
        shutil.rmtree(home, ignore_errors=True)
    rows, header = (sorted(column)[REPEATS // 2] for column in zip(*times, strict=True))
    met = report.target(f"{PENDING_GROUPS:,} groups are on the screen within {MOST_SECONDS} s", rows < MOST_SECONDS)
    report.table([f"filter that no group of {PENDING_GROUPS:,} matches", "seconds"], searches)
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import rlbuffer_cli.browse.app"], check=True)
    imports = time.perf_counter() - begun
    report.table(
        ["median of 5", "seconds", f"below {MOST_SECONDS}"],
        [["rows", f"{rows:.3f}", met], ["header", f"{header:.3f}", ""], ["imports", f"{imports:.3f}", ""]],
    )


def _searched(buffer: rlbuffer.Buffer, where: str) -> float:
    """Seconds of a search, the median of a few."""
    times = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        assert buffer.groups(where) == []
        times.append(time.perf_counter() - begun)
    return sorted(times)[REPEATS // 2]


async def _opened(buffer: rlbuffer.Buffer) -> tuple[float, float]:
    """Seconds until the rows, and until the header."""
    from rlbuffer_cli.browse.app import Browser
    from rlbuffer_cli.browse.pool import Pool

    begun = time.perf_counter()
    app = Browser(buffer)
    async with app.run_test(size=(140, 40)) as pilot:
        pool = app.screen
        assert isinstance(pool, Pool)
        while not pool.is_read:
            await pilot.pause(0.005)
        rows = time.perf_counter() - begun
        while pool.summary is None:
            await pilot.pause(0.005)
        return rows, time.perf_counter() - begun
