"""`rlbuffer inspect` at 10,000 groups of 8: until the browser's rows are there, filters, one call, the server's share.

Imports are not in the browser's time: they are measured apart, in another interpreter. A call of `rlbuffer inspect` has
all of its own CPU. The server says itself which commands took how long (SLOWLOG), and which of them write.
"""

from __future__ import annotations

import asyncio
import io
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import rlbuffer
from benchmarks.report import Report
from rlbuffer.client.searching import list_groups
from rlbuffer.testing import make_group

PENDING_GROUPS = 10_000
GROUP_SIZE = 8
MOST_SECONDS = 0.5
MOST_FILTER_SECONDS = 1.5
MOST_CPU_SECONDS = 0.6
MOST_COMMAND_MS = 5.0
SLOW_MICROSECONDS = 500
"""Commands above it are in the server's own log."""
REPEATS = 5
SEARCHES = ("env:none", "reward>2", "rollout.reward>2", "stop:length", "text:/never/")
"""By what is in the pool, by every rollout of it, and by payloads."""


def run(report: Report) -> None:
    """Pushes groups to an embedded server, opens the browser a few times."""
    report.begin(
        "browser",
        measures=f"seconds until the first 200 of {PENDING_GROUPS:,} pending groups are shown, and the header",
        not_measured="a real terminal's drawing, a server over a network, damaged or very large metadata",
    )
    home = Path(tempfile.mkdtemp(prefix="rlb-bench-"))
    try:
        with rlbuffer.connect(run="bench", config={"home": str(home)}) as buffer:
            writer = buffer.writer("w")
            for i in range(PENDING_GROUPS):
                writer.push(make_group(env="math", size=GROUP_SIZE, lengths=[8] * GROUP_SIZE, group_id=f"math.{i}"))
            before = _watch(buffer)
            times = [asyncio.run(_opened(buffer)) for _ in range(REPEATS)]
            searches = {where: _searched(buffer, where) for where in SEARCHES}
            looks = _looks(buffer)
            one_shot = [_one_shot(home) for _ in range(REPEATS)]
            slowest, command, writes = _asked(buffer, before)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    rows = sorted(times)[REPEATS // 2]
    met = report.target(f"{PENDING_GROUPS:,} groups are on the screen within {MOST_SECONDS} s", rows < MOST_SECONDS)
    quick = {
        where: report.target(f"`{where}` is answered within {MOST_FILTER_SECONDS} s", taken < MOST_FILTER_SECONDS)
        for where, taken in searches.items()
    }
    report.table(
        [
            f"filter that no group of {PENDING_GROUPS:,} matches",
            "seconds",
            f"< {MOST_FILTER_SECONDS}",
        ],
        [[where, f"{searches[where]:.3f}", quick[where]] for where in SEARCHES],
    )
    cpu, wall = (sorted(column)[REPEATS // 2] for column in zip(*one_shot, strict=True))
    light = report.target(f"`rlbuffer inspect` takes less than {MOST_CPU_SECONDS} s of CPU", cpu < MOST_CPU_SECONDS)
    gentle = report.target(f"no command takes the server {MOST_COMMAND_MS:g} ms", slowest < MOST_COMMAND_MS)
    silent = report.target("no command writes", not writes)
    report.table(
        ["one call, and the server meanwhile", "is", "as it shall be"],
        [
            ["CPU s of `rlbuffer inspect --plain`", f"{cpu:.2f}", light],
            ["its wall time, s", f"{wall:.2f}", ""],
            ["`rlbuffer top`: first look, later looks, ms", "{:.0f}, {:.0f}".format(*looks), ""],
            ["slowest command, ms", f"{slowest:.1f} {command}", gentle],
            ["commands that write", ", ".join(writes) or "none", silent],
        ],
    )
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import rlbuffer_cli.browse.app"], check=True)
    imports = time.perf_counter() - begun
    report.table(
        ["median of 5", "seconds", f"below {MOST_SECONDS}"],
        [["rows and header", f"{rows:.3f}", met], ["imports", f"{imports:.3f}", ""]],
    )


def _looks(buffer: rlbuffer.Buffer) -> tuple[float, float]:
    """Milliseconds of the first look of `rlbuffer top`, and the median of those after it."""
    from rlbuffer.client.run_state import read_run_state
    from rlbuffer_cli import look
    from rlbuffer_cli.run_tables import READ_RECORDS
    from rlbuffer_cli.view import run_view

    times = []
    for _ in range(1 + REPEATS):
        begun = time.perf_counter()
        look.console(io.StringIO()).print(run_view(read_run_state(buffer.store, history=READ_RECORDS)))
        times.append(1000 * (time.perf_counter() - begun))
    return times[0], sorted(times[1:])[REPEATS // 2]


def _one_shot(home: Path) -> tuple[float, float]:
    """CPU seconds and seconds of a call that prints the pool."""
    words = [sys.executable, "-m", "rlbuffer_cli", "inspect", "--plain", "--home", str(home), "--run", "bench"]
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    installed = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, env=installed)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, time.perf_counter() - begun


def _watch(buffer: rlbuffer.Buffer) -> dict[str, int]:
    """Has the server note slow commands from now on. -> command that writes -> its calls so far."""
    client: Any = buffer.store.client
    client.config_set("slowlog-log-slower-than", SLOW_MICROSECONDS)
    client.config_set("slowlog-max-len", 10_000)
    client.slowlog_reset()
    return _writes(client)


def _writes(client: Any) -> dict[str, int]:
    flags = {name: command["flags"] for name, command in client.command().items()}
    calls = {name.removeprefix("cmdstat_"): each["calls"] for name, each in client.info("commandstats").items()}
    return {name: n for name, n in calls.items() if "write" in flags[name.split("|")[0]]}


def _asked(buffer: rlbuffer.Buffer, before: dict[str, int]) -> tuple[float, str, list[str]]:
    """Milliseconds and name of the slowest command since :func:`_watch`, and the commands that wrote."""
    client: Any = buffer.store.client
    log = client.slowlog_get(10_000)
    slowest: Any = max(log, key=lambda entry: entry["duration"], default={"duration": 0, "command": b""})
    writes = [name for name, calls in _writes(client).items() if calls != before.get(name, 0)]
    return slowest["duration"] / 1000, slowest["command"].split(b" ")[0].decode(), writes


def _searched(buffer: rlbuffer.Buffer, where: str) -> float:
    """Seconds of a search, the median of a few."""
    times = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        assert list_groups(buffer.store, where=where, text_of=buffer.texts.decoded) == []
        times.append(time.perf_counter() - begun)
    return sorted(times)[REPEATS // 2]


async def _opened(buffer: rlbuffer.Buffer) -> float:
    """Seconds until the first rows, and the run above them."""
    from rlbuffer_cli.browse.app import Browser
    from rlbuffer_cli.browse.listing import Listing
    from rlbuffer_cli.whole_run import WholeRun

    begun = time.perf_counter()
    app = Browser(WholeRun(buffer))
    async with app.run_test(size=(140, 40)) as pilot:
        screen = app.screen
        assert isinstance(screen, Listing)
        while not screen.read_at:
            await pilot.pause(0.005)
        return time.perf_counter() - begun
