"""How soon trainers have what workers push: from a step's last push to every rank's tensors, and from a commit to the
last of many waiting ranks.

Every role is a process of its own on one real server: the pusher, the daemon, each rank. All write their moments into
memory that they share, and the main process looks there rarely: 64 messages to it on the same cores would be a good
part of what is measured. The limits are measured by bare clients in the same processes, in turn with what they limit.
"""

from __future__ import annotations

import multiprocessing
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from every_role import EveryRole
from numpy.typing import NDArray

from benchmarks.moves import Arrays, arrays, hmget, make_groups, plain_client
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
from rlbuffer.store.session import open_store

RANKS = 8
STEPS = 12
"""Steps of workload a; the first is left out."""
WAITING_RANKS = 64
SMALL_STEPS = 30
"""The first is left out."""
STREAM, HEADER_BYTES = "bare", 1_000
"""The entry that bare clients wait for: about what the header of a small step takes."""
SETTLE_SECONDS = 0.5
"""Before a step's last push: the leader has taken in the others, and what the step before left to do is done."""
LOOK_SECONDS = 0.05
"""Between two looks of the main process, and of a rank that waits for the others before its bare commands."""
START_SECONDS = 60.0
MOST_RATIO = {0.5: 1.6, 0.99: 3.0}
"""Quantile -> times the bare commands' that the tensors may take."""
WAKE_MS = 5.0
_CONTEXT = multiprocessing.get_context("forkserver")
"""Its server has imported everything and connected to nothing: 64 processes start in seconds."""
_CONTEXT.set_forkserver_preload([__name__])


class Moments:
    """Monotonic seconds, one clock for all processes, of steps and processes; 0 while they have not come.

    `kinds`: what a process does in a step.
    """

    def __init__(self, kinds: Sequence[str], steps: int, processes: int) -> None:
        self._kinds, self._shape = list(kinds), (len(kinds), 1 + steps, processes)
        self._memory = _CONTEXT.RawArray("d", len(kinds) * (1 + steps) * processes)

    def of(self, kind: str) -> NDArray[np.float64]:
        """[1 + steps, processes]; step 0 is the start. Written and read by all."""
        its: NDArray[np.float64] = np.frombuffer(self._memory).reshape(self._shape)[self._kinds.index(kind)]
        return its

    def wait(self, kind: str, step: int) -> NDArray[np.float64]:
        """The moments of all processes in a step, when they have come."""
        its: NDArray[np.float64] = self.of(kind)[step]
        deadline = time.monotonic() + START_SECONDS
        while not its.all():
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"{kind} of step {step} within {START_SECONDS:g} s: {np.count_nonzero(its)} of {len(its)}"
                )
            time.sleep(LOOK_SECONDS)
        return its


def run(report: Report) -> None:
    """Both measurements."""
    report.begin(
        "wake-up",
        measures=f"workload a ({len(WORKLOADS['a'].lengths):,} rollouts) for {RANKS} ranks, {STEPS - 1} steps: ms from "
        "the moment that the step's last push has returned until a rank has its tensors, beside bare HMGETs of the "
        f"same fields by the same {RANKS} processes, all at once; then {WAITING_RANKS} ranks, each a process, that "
        f"wait for small steps, {SMALL_STEPS - 1} of them: ms from the beginning of the commit until a rank has its "
        "header, beside redis-py's own client in the same processes: from an XADD to the entry of a blocking XREAD",
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
    report.line()
    bare_wakes, woken = wakes(report)
    report.table(
        [f"{WAITING_RANKS} waiting", "p50, ms", "p99, ms", "CPU of a wait, asking included, us"],
        [wake_row("bare XREADs", *bare_wakes), wake_row("ranks", *woken)],
    )
    worst = 1e3 * float(np.quantile(woken[0], 0.99))
    name = f"{WAITING_RANKS} waiting ranks wake within {WAKE_MS:g} ms of a commit, p99"
    report.line(f"{name}, met: {report.target(name, worst <= WAKE_MS)}")


def wake_row(who: str, seconds: NDArray[np.float64], cpu: NDArray[np.float64]) -> list[str]:
    """Quantiles of the time, and the median CPU of a wait."""
    p50, p99 = 1e3 * np.quantile(seconds, (0.5, 0.99))
    return [who, f"{p50:.2f}", f"{p99:.2f}", f"{1e6 * np.median(cpu):.0f}"]


def last_push_to_tensors() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Seconds of every rank and step: to its tensors, and for the bare commands."""
    rng = np.random.default_rng(0)
    sampled = [arrays(rng, int(n)) for n in WORKLOADS["a"].lengths]
    moments = Moments(("ready", "tensors", "bare"), STEPS, RANKS)
    main = Moments(("pushed", "commit", "sent", "answered", "go"), STEPS, 1)
    with a_run(sampled, train, moments, main) as store:
        writer = Writer(store, "bench", epoch=store.meta().epoch)
        for step in range(1, STEPS + 1):
            main.of("pushed")[step] = push_step(writer, sampled, step)
            moments.wait("tensors", step)
            main.of("go")[step] = time.monotonic() + 2 * SETTLE_SECONDS
            moments.wait("bare", step)
    tensors, bare = (moments.of(kind) - main.of(begun) for kind, begun in (("tensors", "pushed"), ("bare", "go")))
    return tensors[2:].ravel(), bare[2:].ravel()


Wakes = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Seconds of every process and step until it has woken, and of its CPU from the asking on."""


def wakes(report: Report) -> tuple[Wakes, Wakes]:
    """Measures bare clients, and ranks: in each step the same processes wait as ranks, then as bare clients."""
    rng = np.random.default_rng(0)
    sampled = [arrays(rng, 128) for _ in range(64)]
    moments = Moments(("ready", "header", "header cpu", "bare", "bare cpu"), SMALL_STEPS, WAITING_RANKS)
    main = Moments(("xadd", "commit", "sent", "answered"), SMALL_STEPS, 1)
    with a_run(sampled, wait_for_headers, moments, main) as store:
        writer = Writer(store, "bench", epoch=store.meta().epoch)
        for step in range(1, SMALL_STEPS + 1):
            push_step(writer, sampled, step)
            moments.wait("header", step)
            time.sleep(SETTLE_SECONDS)
            main.of("xadd")[step] = time.monotonic()
            store.connection.client.xadd(STREAM, {"header": bytes(HEADER_BYTES)}, id=f"{step}-0")
            moments.wait("bare", step)
    begun, sent, answered = (main.of(kind)[2:] for kind in ("commit", "sent", "answered"))
    making, answer = (1e3 * float(np.median(its)) for its in (sent - begun, answered - sent))
    report.line(f"a commit, p50: {making:.2f} ms until it is sent, {answer:.2f} more until the leader has the answer")
    bare, header = (
        ((moments.of(kind) - main.of(begun))[2:].ravel(), moments.of(f"{kind} cpu")[2:].ravel())
        for kind, begun in (("bare", "xadd"), ("header", "commit"))
    )
    return bare, header


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
    sampled: Sequence[Arrays], work: Callable[[Path, int, Moments, Moments], None], moments: Moments, main: Moments
) -> Iterator[EveryRole]:
    """A server, a daemon, and a process of `work` for each rank; yields a store of the main process.

    `main`: moments that are not of ranks.
    """
    home = Path(tempfile.mkdtemp(prefix="rlb-bench-"))
    store = open_(home)
    ranks = moments.of("ready").shape[1]
    starts = [_CONTEXT.Process(target=serve, args=(home, len(sampled) // 16, ranks, main), daemon=True)]
    starts += [_CONTEXT.Process(target=work, args=(home, rank, moments, main), daemon=True) for rank in range(ranks)]
    try:
        store.open_run()
        for process in starts:
            process.start()
        moments.wait("ready", 0)
        yield store
    finally:
        for process in (p for p in starts if p.pid is not None):
            process.kill()
            process.join()
        store.close()
        shutil.rmtree(home, ignore_errors=True)


def open_(home: Path) -> EveryRole:
    return open_store(EveryRole, None, run="bench", home=home, server=ServerSettings(appendfsync="everysec"))


class Committing(EveryRole):
    """A leader's store that notes when it begins a COMMIT, sends it, and has its answer."""

    main: Moments

    def commit(self, plan: StepPlan, *args: Any, **named: Any) -> tuple[CommitStatus, Any]:
        self.note("commit", plan.step)
        self.step = plan.step
        return super().commit(plan, *args, **named)

    def move(self, script: str, *args: Any, **named: Any) -> list[Any]:
        if script != "commit":
            return super().move(script, *args, **named)
        self.note("sent", self.step)
        reply = super().move(script, *args, **named)
        self.note("answered", self.step)
        return reply

    def note(self, kind: str, step: int) -> None:
        """Notes this moment."""
        self.main.of(kind)[step] = time.monotonic()


def serve(home: Path, step_groups: int, world_size: int, main: Moments) -> None:
    """The batcher's process."""
    store = Committing(open_(home).connection, "bench")
    store.main = main
    config = BatcherConfig(row_tokens=16_384, step_groups=step_groups, max_age=10**6, lookahead=2)
    settings = RunSettings(trainer={"world_size": world_size})
    Daemon(Buffer(store, settings=settings), config).run(threading.Event())


def train(home: Path, rank: int, moments: Moments, main: Moments) -> None:
    """One rank pulls steps as a trainer does, and the fields of each again with bare commands."""
    store = open_(home)
    tensors, bare, go = moments.of("tensors"), moments.of("bare"), main.of("go")
    reader = Reader(store, rank=rank, world_size=RANKS, timeout_seconds=START_SECONDS)
    reader.start()
    moments.of("ready")[0, rank] = time.monotonic()
    for step in reader.steps():
        tensors[step.number, rank] = time.monotonic()
        while not go[step.number, 0]:
            time.sleep(LOOK_SECONDS)
        fields: dict[str, list[str]] = {}
        for ref in store.read_parts(step.number, [rank])[0].rollouts:
            fields.setdefault(ref.payload_key, []).append(str(ref.index))
        time.sleep(max(0.0, go[step.number, 0] - time.monotonic()))
        hmget(store.connection.client, fields)
        bare[step.number, rank] = time.monotonic()


def wait_for_headers(home: Path, rank: int, moments: Moments, main: Moments) -> None:
    """One rank waits for headers only, and after each for an entry with a bare client; rank 0 reports as well."""
    store = open_(home)
    client = plain_client(store.connection.client)
    attempt = 0
    if rank == 0:
        attempt = store.attempt(uuid="bench", world_size=WAITING_RANKS, resume_step=0).number
        store.announce(attempt, PolicyVersion(version=0))
        store.report(attempt, epoch=store.meta().epoch, trained=0, digest="", oldest_kept=0)
    kinds = ("header", "header cpu", "bare", "bare cpu")
    header_at, header_cpu, bare_at, bare_cpu = (moments.of(kind) for kind in kinds)
    moments.of("ready")[0, rank] = time.monotonic()
    for step in range(1, SMALL_STEPS + 1):
        header, cpu = None, time.thread_time()
        while header is None:
            header = store.wait_step(step, block_seconds=5.0)
        header_at[step, rank] = time.monotonic()
        header_cpu[step, rank] = time.thread_time() - cpu
        if attempt:
            store.report(attempt, epoch=header.epoch, trained=step, digest=header.digest, oldest_kept=step)
        time.sleep(LOOK_SECONDS)
        cpu = time.thread_time()
        client.xread({STREAM: f"{step - 1}-0"}, count=1, block=0)
        bare_at[step, rank] = time.monotonic()
        bare_cpu[step, rank] = time.thread_time() - cpu
        time.sleep(LOOK_SECONDS)  # none asks for the next while others are still to wake
