"""Memory over 5,000 steps: the leader's process and every key of the run, with pushes, reports and checkpoints."""

from __future__ import annotations

import importlib
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from every_role import EveryRole

from benchmarks.report import Report
from rlbuffer.client.buffer import Buffer
from rlbuffer.config.batcher import BatcherConfig
from rlbuffer.config.settings import RunSettings, ServerSettings
from rlbuffer.daemon import Daemon
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.store.keys import Keys
from rlbuffer.store.session import open_store
from rlbuffer.testing import make_group

STEPS = 5_000
EVERY = 500
CHECKPOINT_EVERY = 10
STEP_GROUPS = 2
AHEAD = 6
"""Groups that wait to be trained."""
CONFIG = BatcherConfig(row_tokens=128, step_groups=STEP_GROUPS, max_age=4, min_group_size=2, group_timeout_seconds=2.5)
"""Tombstones live for two timeouts: as long as the least time below, or what is closed grows over the whole run."""
SHORTENED: dict[tuple[str, str], float] = {
    ("rlbuffer.store.session", "MINIMUM_TOMBSTONE_MS"): 5_000,
    ("rlbuffer.store.viewer", "MINIMUM_TOMBSTONE_MS"): 5_000,
    ("rlbuffer.batcher.pool", "TOMBSTONE_SECONDS"): 5.0,
    ("rlbuffer.store.pool", "HISTORY_ENTRIES"): 300,
    ("rlbuffer.store.leader", "HISTORY_ENTRIES"): 300,
    ("rlbuffer.store.leader", "SUMMARY_LINES"): 300,
}
"""Records that are kept for an hour, or 10,000 times, are kept for less here, so that all of them are full by half of
the run."""
MAX_GROWTH = 0.05
"""From the middle of the run to its end, of the process and of the server: fragments and noise, no leak."""


def run(report: Report) -> None:
    """Trains STEPS steps and weighs everything every EVERY of them."""
    report.begin(
        "soak",
        measures=f"{STEPS:,} steps of {STEP_GROUPS} small groups on a real server: daemon, pushes and reports in one "
        f"process, a checkpoint every {CHECKPOINT_EVERY} steps; resident memory of that process, memory of the server, "
        "bytes and entries of the run's keys",
        not_measured="large groups, assembly and torch, several workers, days of clock time; tombstones live 5 s and "
        "histories 300 entries here, not an hour and 10,000",
    )
    home = Path(tempfile.mkdtemp(prefix="rlb-bench-"))
    settings = ServerSettings(appendfsync="no")
    stores = [open_store(EveryRole, None, run="soak", home=home, server=settings) for _ in range(2)]
    rows: list[list[str]] = []
    weights: list[tuple[int, int]] = []
    cpu, wall = time.process_time(), time.perf_counter()
    stop = threading.Event()
    try:
        with shortened():
            daemon = Daemon(Buffer(stores[0], settings=RunSettings()), CONFIG)
            leader = threading.Thread(target=daemon.run, args=(stop,))
            leader.start()
            for step in train(stores[1]):
                if step % EVERY == 0:
                    process, server = resident(), int(stores[1].connection.client.info("memory")["used_memory"])
                    weights.append((process, server))
                    sizes = [f"{process / 2**20:.1f}", f"{server / 2**20:.2f}"]
                    rows.append([f"{step:,}", *sizes, *keys_of(stores[1])])
            stop.set()
            leader.join()
    finally:
        stop.set()
        for store in stores:
            store.close()
        shutil.rmtree(home, ignore_errors=True)
    report.table(["step", "process MiB", "server MiB", *NAMES, "payloads"], rows)
    report.line("\nprocess MiB: 0 where the system does not tell. Keys: KiB (MEMORY USAGE); payloads: how many.")
    report.line(f"{time.process_time() - cpu:.0f} s of this process's CPU, {time.perf_counter() - wall:.0f} s")
    half = len(weights) // 2
    for name, at in (("process", 0), ("server", 1)):
        growth = weights[-1][at] / max(1, weights[half - 1][at]) - 1
        target = f"the memory of the {name} is flat: at most {MAX_GROWTH:.0%} more at the end than in the middle"
        report.line(f"{target}: {growth:+.1%}, met: {report.target(target, growth <= MAX_GROWTH)}")


NAMES = ("pool", "steps", "closed", "garbage", "history", "summary", "ledger", "state")


def keys_of(store: EveryRole) -> list[str]:
    """KiB of each of the run's larger keys, and how many payloads there are."""
    client: Any = store.connection.client
    keys = Keys("soak")
    sizes = [client.memory_usage(getattr(keys, name), samples=0) or 0 for name in NAMES]
    payloads = sum(1 for _ in client.scan_iter(match=keys.payload_prefix + "*", count=1000))
    return [f"{size / 1024:.1f}" for size in sizes] + [str(payloads)]


def train(store: EveryRole) -> Iterator[int]:
    """Pushes what the steps need and trains them, as fast as they come. -> each trained step."""
    epoch = store.open_run().epoch
    attempt = store.attempt(uuid="soak", world_size=1, resume_step=0).number
    store.announce(attempt, PolicyVersion(version=0))
    store.report(attempt, epoch=epoch, trained=0, digest="", oldest_kept=0)
    pushes, kept = count(1), 0
    pushed = 0
    for step in range(1, STEPS + 1):
        while pushed < (step * STEP_GROUPS) + AHEAD:
            pushed = next(pushes)
            group = make_group(env="ab"[pushed % 2], size=2, version=step - 1, seed=pushed % 50, group_id=f"g.{pushed}")
            store.push(group, producer="soak", incarnation="u", sequence=pushed, epoch=epoch)
        header = None
        while header is None:
            header = store.wait_step(step, block_seconds=1.0)
        store.announce(attempt, PolicyVersion(version=step))
        if step % CHECKPOINT_EVERY == 0:
            kept = step - CHECKPOINT_EVERY
        store.report(attempt, epoch=epoch, trained=step, digest=header.digest, oldest_kept=kept)
        yield step


def resident() -> int:
    """Bytes that this process holds in memory; 0 where the system does not tell."""
    try:
        fields = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in fields if line.startswith("VmRSS:")), 0)


@contextmanager
def shortened() -> Iterator[None]:
    """Puts the values of :data:`SHORTENED` into the modules for a while."""
    before = {place: getattr(importlib.import_module(place[0]), place[1]) for place in SHORTENED}
    try:
        for (module, name), value in SHORTENED.items():
            setattr(importlib.import_module(module), name, value)
        yield
    finally:
        for (module, name), value in before.items():
            setattr(importlib.import_module(module), name, value)
