"""A step of 100,000 rollouts for 512 ranks: what a leader spends on it, and whether it is made beside busy processes.

The real daemon over a real server, with the shipped lease. A step of this size takes longer than the lease lasts.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from every_role import EveryRole

from benchmarks.bench_leader import GROUP_SIZE, Cost, fill, spent
from benchmarks.report import Report
from rlbuffer.client.buffer import Buffer
from rlbuffer.config.batcher import BatcherConfig
from rlbuffer.config.settings import RunSettings, ServerSettings
from rlbuffer.daemon import Daemon
from rlbuffer.daemon.loop import LEASE_SECONDS
from rlbuffer.process.logs import heard
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.store.session import open_store

RANKS = 512
MICRO_BATCHES = 4
ROLLOUTS = 100_000
STEPS = 2
POOL = round(1.05 * STEPS * ROLLOUTS) // GROUP_SIZE
"""Groups ready, more than the steps take: shares are of tokens, so some env gives more groups than its half."""
BUSY = 2
"""Processes beside it that do nothing but compute."""
CONFIG = BatcherConfig(
    row_tokens=16_384,
    micro_batches_per_rank=MICRO_BATCHES,
    step_groups=ROLLOUTS // GROUP_SIZE,
    lookahead=STEPS,
    max_age=STEPS,
    budgets={f"env{i}": 0.25 for i in range(4)},
)


def run(report: Report) -> None:
    """Makes the steps on the machine as it is, and again beside busy processes."""
    report.begin(
        "large step",
        measures=f"the real daemon on a real server: {STEPS} steps of {ROLLOUTS:,} rollouts, each for {RANKS} ranks x "
        f"{MICRO_BATCHES} micro-batches; CPU seconds of the leader and of the server per step, and leases lost",
        not_measured="pushes, pulls and reports at the same time, the network (a unix socket here), real payloads",
    )
    rows = []
    for busy in (0, BUSY):
        with beside(busy):
            cost, lost = measure()
        each = [cost.leader / STEPS, cost.server / STEPS, cost.wall / STEPS]
        rows.append(
            [str(busy), *(f"{seconds:.2f}" for seconds in each), f"{cost.wall / STEPS / LEASE_SECONDS:.1f}", str(lost)]
        )
    report.table(["busy beside it", "leader CPU s", "server CPU s", "wall s", "leases", "leases lost"], rows)
    name = (
        f"{STEPS} steps of {ROLLOUTS:,} rollouts for {RANKS} ranks are made beside {BUSY} busy processes, no lease lost"
    )
    report.line(f"\n{name}, met: {report.target(name, rows[-1][-1] == '0')}")


def measure() -> tuple[Cost, int]:
    """Returns the cost of all steps together, and how often the lease was lost meanwhile."""
    home = Path(tempfile.mkdtemp(prefix="rlb-bench-"))
    store = open_store(
        EveryRole, None, run="bench", home=home, server=ServerSettings(appendfsync="everysec", maxmemory="0")
    )
    try:
        fill(store, POOL)
        number = store.attempt(uuid="bench", world_size=RANKS, resume_step=0).number
        store.announce(number, PolicyVersion(version=0))
        stop, lost, marks = threading.Event(), [], [spent(store)]

        def hear(line: dict[str, Any]) -> None:
            if line["event"] == "ready":
                # The trainer's word, so that the leader need not wait for it.
                store.report(number, epoch=store.meta().epoch, trained=0, digest="", oldest_kept=0)
                marks[0] = spent(store)
            elif line.get("state") == "lost":
                lost.append(line["reason"])
            elif line["event"] == "step" and line["step"] == STEPS:
                marks.append(spent(store))
                stop.set()
            elif line["event"] == "waiting":
                raise RuntimeError(f"the benchmark's pool makes no step: {line['text']}")

        with heard("rlbuffer.daemon", hear):
            Daemon(Buffer(store, settings=RunSettings()), CONFIG).run(stop)
        return marks[1] - marks[0], len(lost)
    finally:
        store.close()
        shutil.rmtree(home, ignore_errors=True)


@contextmanager
def beside(count: int) -> Iterator[None]:
    """Keeps `count` cores busy."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()
