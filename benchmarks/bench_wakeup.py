"""How soon trainers have what workers push: from a step's last push to every rank's tensors, and from a commit to the
last of many waiting ranks.

Every role is a process of its own on one real server: the pusher, the daemon, the ranks. The limit is measured by the
same rank processes a moment later: the bare HMGET of the fields that each has just pulled, all at once.
"""

from __future__ import annotations

import multiprocessing
import queue
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bench_data_path import Arrays, arrays, hmget, make_groups, plain_client
from benchmarks.report import Report
from benchmarks.workloads import WORKLOADS
from rlbuffer.client.buffer import Buffer
from rlbuffer.client.reader import Reader
from rlbuffer.client.writer import Writer
from rlbuffer.config.batcher import BatcherConfig
from rlbuffer.config.settings import RunSettings, ServerSettings
from rlbuffer.daemon import Daemon
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.records.states import CommitStatus
from rlbuffer.records.step_plan import StepPlan
from rlbuffer.store.redis_store import RedisStore, open_store

RANKS = 8
STEPS = 8
"""Steps of workload a; the first is left out."""
WAITING_RANKS = 64
"""In processes of eight ranks each."""
SMALL_STEPS = 30
STREAM, HEADER_BYTES = "bare", 1_000
"""The entry that bare clients wait for: about what the header of a small step takes."""
SETTLE_SECONDS = 0.5
"""Between a step's other pushes and its last one: the leader has taken them in."""
START_SECONDS = 60.0
MOST_RATIO = {0.5: 1.6, 0.99: 3.0}
"""Quantile -> times the bare commands' that the tensors may take."""
WAKE_MS = 5.0
SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """What a process says."""

    what: str
    """``ready``, ``commit``, ``tensors`` or ``bare``."""
    step: int
    at: float
    """Monotonic seconds, one clock for all processes."""


def run(report: Report) -> None:
    """Both measurements."""
    report.begin(
        "wake-up",
        measures=f"workload a ({len(WORKLOADS['a'].lengths):,} rollouts) for {RANKS} ranks, {STEPS - 1} steps: ms from "
        "the moment that the step's last push has returned until a rank has its tensors, beside bare HMGETs of the "
        f"same fields by the same {RANKS} processes; then {WAITING_RANKS} ranks in 8 processes that wait for small "
        f"steps, {SMALL_STEPS} of them: ms from the commit until a rank has its header, beside as many of redis-py's "
        "own clients that wait for an entry of a stream with a blocking XREAD",
        not_measured="the network (unix socket here), a trainer's own work beside the pull, prefetched steps, "
        "more processes than cores being a rare thing elsewhere",
    )
    tensors, bare = last_push_to_tensors()
    rows, ratios = [], {}
    for q in MOST_RATIO:
        here, limit = (1e3 * float(np.quantile(seconds, q)) for seconds in (tensors, bare))
        ratios[q] = here / limit
        rows.append([f"p{100 * q:g}", f"{here:.1f}", f"{limit:.1f}", f"{ratios[q]:.1f}x"])
    report.table(["", "last push to tensors, ms", "bare HMGET, ms", "ratio"], rows)
    for q, most in MOST_RATIO.items():
        name = f"a rank has its tensors within {most} x of the bare HMGETs, p{100 * q:g}"
        report.line(f"{name}: {ratios[q]:.1f} x, met: {report.target(name, ratios[q] <= most)}")
    worst = 0.0
    for who, measured in (("bare XREADs", xadd_to_xread), ("ranks", commit_to_header)):
        woken = [1e3 * seconds for seconds in measured()]
        worst = float(np.quantile(woken, 0.99))
        report.line(f"{WAITING_RANKS} waiting {who}: p50 {statistics.median(woken):.2f} ms, p99 {worst:.2f} ms")
    name = f"{WAITING_RANKS} waiting ranks wake within {WAKE_MS:g} ms of a commit, p99"
    report.line(f"{name}, met: {report.target(name, worst <= WAKE_MS)}")


def last_push_to_tensors() -> tuple[list[float], list[float]]:
    """Seconds of every rank and step: to its tensors, and for the bare commands."""
    rng = np.random.default_rng(0)
    sampled = [arrays(rng, int(n)) for n in WORKLOADS["a"].lengths]
    config = {"row_tokens": 16_384, "step_groups": len(sampled) // 16, "max_age": 10**6, "lookahead": 2}
    tensors: list[float] = []
    bare: list[float] = []
    with a_run(config, ranks=RANKS, per_process=1, whole=True) as (store, heard, go):
        writer = Writer(store, "bench", epoch=store.meta().epoch)
        for step in range(1, STEPS + 1):
            begun = push_step(writer, sampled, step)
            for name, seconds in (("tensors", tensors), ("bare", bare)):
                if name == "bare":
                    begun = time.monotonic()
                    go.set()
                came = wait_for(heard, name, step, RANKS)
                if step > 1:
                    seconds += [at - begun for at in came]
            go.clear()
    return tensors, bare


def commit_to_header() -> list[float]:
    """Seconds of every rank and small step."""
    rng = np.random.default_rng(0)
    sampled = [arrays(rng, 128) for _ in range(64)]
    config = {"row_tokens": 1024, "step_groups": 4, "max_age": 10**6, "lookahead": 2}
    woken: list[float] = []
    with a_run(config, ranks=WAITING_RANKS, per_process=8, whole=False) as (store, heard, go):
        go.set()
        writer = Writer(store, "bench", epoch=store.meta().epoch)
        for step in range(1, SMALL_STEPS + 1):
            push_step(writer, sampled, step)
            arrived = gather(heard, {"commit": 1, "tensors": WAITING_RANKS}, step)
            if step > 1:
                woken += [at - arrived["commit"][0] for at in arrived["tensors"]]
    return woken


def xadd_to_xread() -> list[float]:
    """Seconds of every bare client and entry, from just before the XADD."""
    home = Path(tempfile.mkdtemp(prefix="rlb-bench-"))
    store, heard, seconds = open_(home), SPAWN.Queue(), []
    waiting = [SPAWN.Process(target=wait_bare, args=(home, 8, heard), daemon=True) for _ in range(WAITING_RANKS // 8)]
    try:
        for process in waiting:
            process.start()
        wait_for(heard, "ready", 0, WAITING_RANKS)
        for step in range(1, SMALL_STEPS + 1):
            time.sleep(SETTLE_SECONDS)
            begun = time.monotonic()
            store.connection.client.xadd(STREAM, {"header": bytes(HEADER_BYTES)}, id=f"{step}-0")
            came = wait_for(heard, "bare", step, WAITING_RANKS)
            seconds += [at - begun for at in came if step > 1]
    finally:
        for process in (p for p in waiting if p.pid is not None):
            process.kill()
            process.join()
        store.close()
        shutil.rmtree(home, ignore_errors=True)
    return seconds


def wait_bare(home: Path, count: int, heard: Any) -> None:
    """A process of bare clients, a thread each."""
    threads = [threading.Thread(target=wait_for_entries, args=(home, heard)) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def wait_for_entries(home: Path, heard: Any) -> None:
    store = open_(home)
    client = plain_client(store.connection.client)
    heard.put(Arrived(what="ready", step=0, at=time.monotonic()))
    for step in range(1, SMALL_STEPS + 1):
        client.xread({STREAM: f"{step - 1}-0"}, count=1, block=0)
        heard.put(Arrived(what="bare", step=step, at=time.monotonic()))


def push_step(writer: Writer, sampled: Sequence[Arrays], step: int) -> float:
    """Pushes a step's groups, the last one after a moment. Returns when that was done."""
    groups = make_groups("math", sampled, first=(step - 1) * len(sampled) // 16, version=step - 1)
    for group in groups[:-1]:
        writer.push(group)
    time.sleep(SETTLE_SECONDS)
    writer.push(groups[-1])
    return time.monotonic()


# -- processes ---------------------------------------------------------------------------------------------------------
@contextmanager
def a_run(
    config: dict[str, Any], *, ranks: int, per_process: int, whole: bool
) -> Iterator[tuple[RedisStore, Any, Event]]:
    """A server, a daemon and `ranks` in processes; yields a store, what they say, and the leave to go on."""
    home = Path(tempfile.mkdtemp(prefix="rlb-bench-"))
    store = open_(home)
    heard, go = SPAWN.Queue(), SPAWN.Event()
    starts = [SPAWN.Process(target=serve, args=(home, config, ranks, heard), daemon=True)]
    for first in range(0, ranks, per_process):
        mine = range(first, first + per_process)
        starts.append(SPAWN.Process(target=train, args=(home, mine, ranks, whole, heard, go), daemon=True))
    try:
        store.open_run()
        for process in starts:
            process.start()
        wait_for(heard, "ready", 0, ranks)
        yield store, heard, go
    finally:
        for process in (p for p in starts if p.pid is not None):
            process.kill()
            process.join()
        store.close()
        shutil.rmtree(home, ignore_errors=True)


def open_(home: Path) -> RedisStore:
    return open_store(None, run="bench", home=home, server=ServerSettings(appendfsync="everysec"))


class Committing(RedisStore):
    """A leader's store that says when it begins a COMMIT."""

    heard: Any

    def commit(self, token: int, plan: StepPlan, *args: Any, **named: Any) -> tuple[CommitStatus, Any]:
        self.heard.put(Arrived(what="commit", step=plan.step, at=time.monotonic()))
        return super().commit(token, plan, *args, **named)


def serve(home: Path, config: dict[str, Any], world_size: int, heard: Any) -> None:
    """The batcher's process."""
    store = Committing(open_(home).connection, "bench")
    store.heard = heard
    settings = RunSettings(trainer={"world_size": world_size})
    Daemon(Buffer(store, settings=settings), BatcherConfig(**config)).run(threading.Event())


def train(home: Path, ranks: range, world_size: int, whole: bool, heard: Any, go: Event) -> None:
    """A process of one or several ranks, a thread each."""
    threads = [threading.Thread(target=train_rank, args=(home, r, world_size, whole, heard, go)) for r in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def train_rank(home: Path, rank: int, world_size: int, whole: bool, heard: Any, go: Event) -> None:
    """One rank: pulls steps as a trainer does (`whole`), or waits for their headers only."""
    store = open_(home)
    if not whole:
        attempt = 0
        if rank == 0:
            attempt = store.attempt(uuid="bench", world_size=world_size, resume_step=0).number
            store.announce(attempt, PolicyVersion(version=0))
            store.report(attempt, epoch=store.meta().epoch, trained=0, digest="", oldest_kept=0)
        heard.put(Arrived(what="ready", step=0, at=time.monotonic()))
        wait_for_headers(store, attempt, heard)
        return
    reader = Reader(store, rank=rank, world_size=world_size, timeout_seconds=START_SECONDS)
    reader.start()
    heard.put(Arrived(what="ready", step=0, at=time.monotonic()))
    for step in reader.steps():
        heard.put(Arrived(what="tensors", step=step.number, at=time.monotonic()))
        fields: dict[str, list[str]] = {}
        for ref in store.read_parts(step.number, [rank])[0].rollouts:
            fields.setdefault(ref.payload_key, []).append(str(ref.index))
        go.wait()
        hmget(store.connection.client, fields)
        heard.put(Arrived(what="bare", step=step.number, at=time.monotonic()))


def wait_for_headers(store: RedisStore, attempt: int, heard: Any) -> None:
    """`attempt`: of the rank that reports, else 0."""
    for step in range(1, SMALL_STEPS + 1):
        header = None
        while header is None:
            header = store.wait_step(step, block_seconds=5.0)
        heard.put(Arrived(what="tensors", step=step, at=time.monotonic()))
        if attempt:
            store.report(attempt, epoch=header.epoch, trained=step, digest=header.digest, oldest_kept=step)


def wait_for(heard: Any, what: str, step: int, count: int) -> list[float]:
    """The moments of `count` messages."""
    return gather(heard, {what: count}, step)[what]


def gather(heard: Any, counts: dict[str, int], step: int) -> dict[str, list[float]]:
    """The moments of so many messages of each kind about a step; others are passed over."""
    came: dict[str, list[float]] = {what: [] for what in counts}
    while any(len(came[what]) < count for what, count in counts.items()):
        try:
            arrived = heard.get(timeout=START_SECONDS)
        except queue.Empty:
            raise RuntimeError(f"step {step}: {came} came within {START_SECONDS:g} s, not {counts}") from None
        if arrived.step == step and arrived.what in came:
            came[arrived.what].append(arrived.at)
    return came
