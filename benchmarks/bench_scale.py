"""A run of 1,000 workers and 512 ranks on one server: do its steps flow, what is the server's cost, who waits how long?

The real daemon, writers, pulls and heartbeats over connections of their own; sampling is a pause, training nothing.
``python -m benchmarks --seconds 600 scale`` is the long run.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import multiprocessing
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from every_role import EveryRole

from benchmarks.bench_idle_workers import beat_for, open_
from benchmarks.report import Report
from rlbuffer.client.buffer import Buffer
from rlbuffer.client.step_pull import StepPull
from rlbuffer.client.writer import Writer
from rlbuffer.config.batcher import BatcherConfig
from rlbuffer.config.settings import RunSettings
from rlbuffer.daemon import Daemon
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.store.payloads import Trainable
from rlbuffer.store.verify.verify import verify
from rlbuffer.testing import make_group

WORKERS, RANKS = 1_000, 512
PROCESSES = 4
"""Each holds its share of the workers and of the ranks, with a connection for every one."""
SAMPLE_SECONDS = 20.0
"""Median of a lognormal, for a group."""
ASK_SECONDS = 1.0
"""Between two questions for a ticket, as of a worker that has waited for some time."""
GROUP_SIZE, STEP_GROUPS, TOKENS = 4, 256, 512
"""Rollouts of a group, groups of a step, mean tokens of a rollout: 1,024 rollouts a step, two for each rank."""
KEPT_STEPS = 4
"""Steps behind the newest that the trainer keeps a checkpoint of."""
WARM_STEPS = 2
SECONDS = 60.0
SLOW_MICROSECONDS, SLOW_ENTRIES = 1000, 10_000
"""Commands above it are in the servers' own logs; so many of them."""
PATIENCE_SECONDS = 300.0
CONFIG = BatcherConfig(row_tokens=4096, step_groups=STEP_GROUPS, max_age=8, order="oldest_first")
SPAWN = multiprocessing.get_context("spawn")


Ask = Callable[..., Any]
"""Sends a server a command. -> its answer."""


class Place(NamedTuple):
    """A run's server, as each process opens it."""

    home: Path
    url: str | None = None
    """None: the embedded server of `home`."""

    def open(self) -> EveryRole:
        """The run, over a connection of its own."""
        return open_(self.home, self.url)


def run(report: Report) -> None:
    """The run on the embedded server."""
    home = Path(tempfile.mkdtemp(prefix="rlb-bench-"))
    store = open_(home)
    try:
        measure(report, "scale", Place(home), [store.connection.client.execute_command])
    finally:
        store.close()
        shutil.rmtree(home, ignore_errors=True)


def measure(report: Report, title: str, place: Place, servers: Sequence[Ask]) -> None:
    """Starts them all, trains for a while, and looks at everybody's times."""
    seconds = report.seconds or SECONDS
    report.begin(
        title,
        measures=f"{WORKERS:,} workers that sample for {SAMPLE_SECONDS:g} s a group and {RANKS} ranks in {PROCESSES} "
        f"processes, a daemon in one more, servers: {len(servers)}; "
        f"steps of {STEP_GROUPS} groups of {GROUP_SIZE} rollouts of {TOKENS} tokens "
        f"in {seconds:g} s, CPU of the server, and the time of each call as its caller sees it",
        not_measured="the network (this machine's sockets), machines of their own: the callers share these cores with "
        "the servers, so their times have its queue and their own in them; torch",
    )
    store, heard = place.open(), SPAWN.Queue()
    stop = SPAWN.Event()
    processes = [SPAWN.Process(target=lead, args=(place, heard, stop), daemon=True)]
    processes += [SPAWN.Process(target=crowd, args=(place, i, heard, stop), daemon=True) for i in range(PROCESSES)]
    try:
        epoch = store.open_run().epoch
        attempt = store.attempt(uuid="bench", world_size=RANKS, resume_step=0).number
        trainer = Trainer(store, attempt, epoch, servers)
        for process in processes:
            process.start()
        times = trainer.train(heard, stop, seconds)
        findings = verify(store).findings
    finally:
        for process in processes:
            process.kill()
            process.join()
        store.close()
    show(report, trainer, times)
    name = f"steps flow with {WORKERS:,} workers and {RANKS} ranks, and the account is exact"
    report.line(f"\n{name}, met: {report.target(name, trainer.steps > 1 and not findings)} {list(findings[:2]) or ''}")


class Trainer:
    """Rank 0's words, once all ranks have pulled a step; and the server's figures between two of its moments."""

    def __init__(self, store: EveryRole, attempt: int, epoch: int, servers: Sequence[Ask]) -> None:
        self.store, self.attempt, self.epoch, self._servers = store, attempt, epoch, servers
        self.trained = self.steps = 0
        """Last trained step; steps of the measured time."""
        self.wall = 0.0
        self.servers: list[dict[str, float]] = []
        """What INFO of each counted in the measured time, by field."""
        self.slow: list[Any] = []
        """Entries of the servers' logs of slow commands."""
        self.connections = 0
        self._say(0, "")

    def train(self, heard: Any, stop: Any, seconds: float) -> dict[str, list[float]]:
        """Trains until `seconds` after the warm steps. -> kind of call -> the seconds of each."""
        pulled: Counter[int] = Counter()
        begun, first, before = 0.0, 0, list[dict[str, float]]()
        limit = time.monotonic() + PATIENCE_SECONDS
        while not begun or time.monotonic() < begun + seconds:
            kind, what = heard.get(timeout=max(1.0, limit - time.monotonic()))
            if kind == "error":
                raise RuntimeError(what)
            step, ranks = what
            pulled[step] += ranks
            if pulled[step] < RANKS:
                continue
            header = self.store.wait_step(step, block_seconds=0)
            self._say(step, header.digest if header is not None else "")
            limit = time.monotonic() + PATIENCE_SECONDS
            if step == WARM_STEPS:
                for ask in self._servers:
                    ask("CONFIG", "SET", "slowlog-log-slower-than", SLOW_MICROSECONDS, "slowlog-max-len", SLOW_ENTRIES)
                    ask("SLOWLOG", "RESET")
                begun, first, before = time.monotonic(), step, self._facts()
        self.wall, self.steps = time.monotonic() - begun, self.trained - first
        pairs = zip(self._facts(), before, strict=True)
        self.servers = [{name: after[name] - earlier[name] for name in after} for after, earlier in pairs]
        # As one name: so redis-py reads the answer into records.
        self.slow = [entry for ask in self._servers for entry in ask("SLOWLOG GET", SLOW_ENTRIES)]
        self.connections = sum(int(ask("INFO", "clients")["connected_clients"]) for ask in self._servers)
        stop.set()
        times: dict[str, list[float]] = {}
        for _ in range(PROCESSES + 1):
            kind, what = "", None
            while kind != "times":
                kind, what = heard.get(timeout=PATIENCE_SECONDS)
            for name, its in what.items():
                times.setdefault(name, []).extend(its)
        return times

    def _say(self, step: int, digest: str) -> None:
        self.store.announce(self.attempt, PolicyVersion(version=step))
        kept = max(0, step - KEPT_STEPS)
        self.store.report(self.attempt, epoch=self.epoch, trained=step, digest=digest, oldest_kept=kept)
        self.trained = step

    def _facts(self) -> list[dict[str, float]]:
        names = ("used_cpu_user", "used_cpu_sys", "total_net_input_bytes", "total_net_output_bytes")
        infos = [ask("INFO") for ask in self._servers]
        return [{name: float(info[name]) for name in (*names, "total_commands_processed")} for info in infos]


def timed(times: dict[str, list[float]], name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """The same call, whose seconds are noted."""

    def measured(*args: Any, **named: Any) -> Any:
        begun = time.perf_counter()
        answer = call(*args, **named)
        times.setdefault(name, []).append(time.perf_counter() - begun)
        return answer

    return measured


def lead(place: Place, heard: Any, stop: Any) -> None:
    """The daemon's process."""
    times: dict[str, list[float]] = {}
    store, ended = place.open(), threading.Event()
    setattr(store, "commit", timed(times, "commit", store.commit))  # noqa: B010
    daemon = threading.Thread(target=Daemon(Buffer(store, settings=RunSettings()), CONFIG).run, args=(ended,))
    daemon.start()
    stop.wait()
    ended.set()
    daemon.join()
    heard.put(("times", times | {"leader's CPU": [time.process_time()]}))
    time.sleep(PATIENCE_SECONDS)


def crowd(place: Place, number: int, heard: Any, stop: Any) -> None:
    """A process with its share of the workers and ranks."""
    logging.disable(logging.WARNING)  # a thousand workers say that they wait
    times: dict[str, list[float]] = {}
    workers, ranks = range(number, WORKERS, PROCESSES), range(number, RANKS, PROCESSES)
    for role, its in ((pull_all, ranks), (work_all, workers)):
        threading.Thread(target=_played, args=(role, place, its, times, heard, stop), daemon=True).start()
    threading.Thread(target=beat_for, args=(place.home, workers, place.url), daemon=True).start()
    stop.wait()
    time.sleep(1.0)
    heard.put(("times", {name: list(its) for name, its in times.items()}))
    time.sleep(PATIENCE_SECONDS)


def _played(role: Callable[..., None], place: Place, its: range, times: Any, heard: Any, stop: Any) -> None:
    try:
        role(place, its, times, heard, stop)
    except Exception as error:  # what it meets is what is measured
        if not stop.is_set():
            heard.put(("error", f"{role.__name__}: {type(error).__name__}: {error}"))


class Worker:
    """A worker between two of its calls: it takes a ticket, pauses, and pushes."""

    def __init__(self, store: EveryRole, number: int, times: dict[str, list[float]]) -> None:
        setattr(store, "take_tickets", timed(times, "take", store.take_tickets))  # noqa: B010
        self.policy = Buffer(store, settings=RunSettings()).policy()
        self.writer = Writer(store, f"worker-{number}", epoch=store.meta().epoch)
        self._push = timed(times, "push", self.writer.push)
        self._rng = np.random.default_rng(number)
        self._ticket: Any = None
        self._version = 0

    def go_on(self) -> float:
        """Makes its next calls. -> seconds until those after them."""
        if self._ticket is not None:
            lengths = self._rng.integers(TOKENS // 2, 3 * TOKENS // 2, GROUP_SIZE).tolist()
            self._push(make_group(env="math", size=GROUP_SIZE, lengths=lengths, version=self._version, **self._ticket))
        taken = self.writer.take("math", timeout_seconds=0.0)
        self._ticket = {"group_id": taken[0].group_id, "worker": self.writer.worker} if taken else None
        if not taken:
            return ASK_SECONDS
        self._version = self.policy.current().version
        return SAMPLE_SECONDS * float(np.exp(0.5 * self._rng.standard_normal()))


def work_all(place: Place, numbers: range, times: dict[str, list[float]], heard: Any, stop: Any) -> None:
    """A process's workers, each with a connection of its own, in the order in which they are due."""
    due = [(time.monotonic(), number, Worker(place.open(), number, times)) for number in numbers]
    while not stop.is_set():
        at, number, worker = heapq.heappop(due)
        time.sleep(max(0.0, at - time.monotonic()))
        heapq.heappush(due, (time.monotonic() + worker.go_on(), number, worker))


def pull_all(place: Place, ranks: range, times: dict[str, list[float]], heard: Any, stop: Any) -> None:
    """A process's ranks, each with a connection of its own: one after the other reads a step once it is there."""
    stores = [place.open() for _ in ranks]
    options: Any = {"pad_token_id": 0, "pad_to_multiple_of": 1}
    sources = [StepPull(store, r, RANKS, Trainable(), **options) for store, r in zip(stores, ranks, strict=True)]
    for step in itertools.count(1):
        for store, source in zip(stores, sources, strict=True):
            header = None
            while header is None and not stop.is_set():
                header = store.wait_step(step, block_seconds=2.0)
            if header is None:
                return
            pulled, damaged = timed(times, "pull", lambda h, s=source: s.step(h, s.part(h)))(header)
            if damaged or pulled.number != step:
                raise RuntimeError(f"step {step}: {damaged}")
        heard.put(("pulled", (step, len(stores))))


def show(report: Report, trainer: Trainer, times: dict[str, list[float]]) -> None:
    """Prints the server's figures and the callers' times."""
    servers, wall = trainer.servers, trainer.wall
    tokens = trainer.steps * STEP_GROUPS * GROUP_SIZE * TOKENS
    (leader,) = times.pop("leader's CPU")
    report.line(f"{trainer.steps} steps in {wall:.0f} s: {tokens / wall / 1e6:.3f} million tokens a second")
    for server in servers:
        cpu = server["used_cpu_user"] + server["used_cpu_sys"]
        report.line(
            f"server: {100 * cpu / wall:.1f} % of a core, {server['total_commands_processed'] / wall:,.0f} commands "
            f"and {server['total_net_input_bytes'] / wall / 1e6:.2f} MB in, "
            f"{server['total_net_output_bytes'] / wall / 1e6:.2f} MB out a second"
        )
    report.line(f"{trainer.connections:,} connections; leader: {leader:.1f} s of CPU since its start")
    if trainer.slow:
        worst = max(trainer.slow, key=lambda entry: entry["duration"])
        report.line(
            f"slowest of {len(trainer.slow):,} commands above {SLOW_MICROSECONDS / 1e3:g} ms: "
            f"{worst['duration'] / 1e3:.1f} ms, {worst['command'][:60]!r}"
        )
    rows = []
    for name in ("take", "push", "commit", "pull"):
        its = 1e3 * np.array(times.get(name, [np.nan]))
        rows.append([name, f"{len(its):,}", *(f"{value:.1f}" for value in (*np.percentile(its, [50, 99]), its.max()))])
    report.table(["call, from its caller", "calls", "p50 ms", "p99 ms", "slowest ms"], rows)
