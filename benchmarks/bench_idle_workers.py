"""The server's cost of workers that have nothing to do, and of many processes that connect at once.

The workers are `run_worker` as ``rlbuffer worker`` runs it, with a sampler that never samples: each over connections of
its own, many in a process. The embedded server, as it is started for everybody.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import dropwhile
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from every_role import EveryRole

from benchmarks.moves import Clock
from benchmarks.report import Report
from rlbuffer.client.asking import SELDOM_SECONDS, pauses_between_asks
from rlbuffer.client.buffer import Buffer
from rlbuffer.client.reader import READER_BLOCK_SECONDS
from rlbuffer.config.settings import RunSettings, ServerSettings, WorkerSettings
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.store.session import open_store
from rlbuffer.worker import loop
from rlbuffer.worker.envs import make_env
from rlbuffer.worker.samplers import Completion, SamplerTraits

WORKERS, READERS = 1_000, 512
WORKER_PROCESSES, READER_PROCESSES = 3, 2
"""Each holds its share, a thread for every one."""
CONNECT_SECONDS = 30.0
"""All shall be connected within this."""
PATIENCE_SECONDS = 180.0
SPREAD_SECONDS, SETTLE_SECONDS, MEASURED_SECONDS = 30.0, 20.0, 30.0
"""The workers begin within the first of these; the last holds several asks of each."""
MOST_OF_A_CORE = 0.02
SPAWN = multiprocessing.get_context("spawn")


def run(report: Report) -> None:
    """Connects them all, waits, and looks at the server's CPU."""
    report.begin(
        "idle workers",
        measures=f"{WORKERS:,} workers without tickets and {READERS} waiting readers in "
        f"{WORKER_PROCESSES + READER_PROCESSES} processes: time until all are connected, errors, and the server's CPU "
        f"over {MEASURED_SECONDS:g} s, of all and of the workers alone. What real workers ask is counted: heartbeats, "
        "tickets, the newest version, an operator's wishes. They begin as if they had waited for two minutes: two "
        "cores cannot carry a thousand that have just begun",
        not_measured="the network (unix socket here), hosts whose clocks differ, the workers' own CPU beyond its sum, "
        "a leader, and workers that begin or end, have waited for less, wait for the first version, evaluate, or meet "
        "a full server",
    )
    home = Path(tempfile.mkdtemp(prefix="rlb-bench-"))
    store, heard, connected = open_(home), SPAWN.Queue(), SPAWN.Event()
    workers = [SPAWN.Process(target=worker_crowd, args=(home, i, heard, connected)) for i in range(WORKER_PROCESSES)]
    readers = [SPAWN.Process(target=reader_crowd, args=(home, i, heard)) for i in range(READER_PROCESSES)]
    try:
        store.open_run()
        attempt = store.attempt(uuid="bench", world_size=READERS, resume_step=0)
        store.announce(attempt.number, PolicyVersion(version=0))
        begun = time.monotonic()
        for process in (*workers, *readers):
            process.start()
        said = [heard.get(timeout=PATIENCE_SECONDS) for _ in range(WORKERS + READERS)]
        seconds, errors = max(at for at, _ in said) - begun, [text for _, text in said if text]
        connected.set()
        errors += [text for _ in range(WORKERS) if (text := heard.get(timeout=PATIENCE_SECONDS)[1])]
        time.sleep(SETTLE_SECONDS)
        together = Clock(store)(lambda: time.sleep(MEASURED_SECONDS))
        end(readers)
        time.sleep(1.0)
        before, own = round_trips(store), spent(workers)
        alone = Clock(store)(lambda: time.sleep(MEASURED_SECONDS))
        trips, own, beats = round_trips(store) - before, spent(workers) - own, store.heartbeats("worker")
        while not heard.empty():
            errors.append(heard.get()[1])
    finally:
        end([*workers, *readers])
        store.close()
        shutil.rmtree(home, ignore_errors=True)
    share = alone.server / alone.wall
    report.line(f"connected after {seconds:.1f} s, errors: {len(errors)} {errors[:1] or ''}")
    report.line(f"server: {100 * together.server / together.wall:.2f} % of a core with the readers")
    report.line(f"workers alone: {100 * share:.2f} %; {1e6 * share / WORKERS:.1f} us a second for each worker")
    report.line(
        f"{trips / alone.wall:.0f} round trips a second, {1e6 * alone.server / trips:.0f} us of the server each; "
        f"the workers' own CPU: {100 * own / alone.wall:.0f} % of a core"
    )
    longest = max(beat["seconds_ago"] for beat in beats.values())
    report.line(f"{len(beats):,} workers heard, the longest silent for {longest:.1f} s")
    name = f"{WORKERS:,} workers and {READERS} readers connect within {CONNECT_SECONDS:g} s without an error"
    report.line(f"\n{name}, met: {report.target(name, seconds <= CONNECT_SECONDS and not errors)}")
    name = f"{WORKERS:,} idle workers cost the server less than {100 * MOST_OF_A_CORE:g} % of a core"
    report.line(f"{name}, met: {report.target(name, share < MOST_OF_A_CORE)}")


def open_(home: Path) -> EveryRole:
    return open_store(EveryRole, None, run="bench", home=home, server=ServerSettings(appendfsync="everysec"))


def end(processes: Sequence[BaseProcess]) -> None:
    """Kills them; those that have ended are let be."""
    for process in processes:
        if process.pid is not None:
            process.kill()
            process.join()


def round_trips(store: EveryRole) -> int:
    """The times that the server has read from a client since it began."""
    facts: Any = store.connection.client.info("stats")
    return int(facts["total_reads_processed"])


def spent(processes: Sequence[BaseProcess]) -> float:
    """CPU seconds of these processes so far."""
    times = [Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split() for process in processes]
    return sum(int(each[11]) + int(each[12]) for each in times) / os.sysconf("SC_CLK_TCK")


def worker_crowd(home: Path, number: int, heard: Any, connected: Any) -> None:
    """A process with its share of the workers. They begin when all are connected."""
    setattr(loop, "pauses_between_asks", long_waited)  # noqa: B010
    begin = threading.Event()
    threads = start(partial(idle_worker, begin), home, range(number, WORKERS, WORKER_PROCESSES), heard)
    connected.wait()
    begin.set()
    for thread in threads:
        thread.join()


def reader_crowd(home: Path, number: int, heard: Any) -> None:
    """A process with its share of the readers."""
    for thread in start(waiting_reader, home, range(number, READERS, READER_PROCESSES), heard):
        thread.join()


def start(role: Callable[[Path, int, Any], None], home: Path, numbers: range, heard: Any) -> list[threading.Thread]:
    """A thread for each number."""
    logging.disable(logging.WARNING)  # a thousand workers say that they wait
    threading.stack_size(256 * 1024)
    threads = [threading.Thread(target=role, args=(home, i, heard), daemon=True) for i in numbers]
    for thread in threads:
        thread.start()
    return threads


def long_waited() -> Iterator[float]:
    """The pauses of a worker that has waited for long."""
    return dropwhile(lambda pause: pause < SELDOM_SECONDS, pauses_between_asks())


class NoSampler:
    """Serves every version, and is never asked for a token: there are no tickets."""

    version, vocab_size, context = -1, 1 << 30, 0
    traits = SamplerTraits(is_exact=True)

    def __init__(self, heard: Any) -> None:
        self._heard = heard

    async def load(self, policy: PolicyVersion) -> None:
        self.version = policy.version
        self._heard.put((time.monotonic(), ""))

    async def sample(self, *args: Any, **options: Any) -> list[Completion]:
        raise NotImplementedError

    async def close(self) -> None:
        return


def idle_worker(begin: threading.Event, home: Path, number: int, heard: Any) -> None:
    """A worker whose tickets never come. It says when it is connected, and when it has its first version."""
    try:
        with Buffer(open_(home), settings=RunSettings()) as buffer:
            buffer.store.meta()
            heard.put((time.monotonic(), ""))
            begin.wait()
            time.sleep(SPREAD_SECONDS * number / WORKERS)
            loop.run_worker(
                buffer,
                f"worker-{number}",
                WorkerSettings(env="vcopy"),
                stop=threading.Event(),
                env=make_env("vcopy"),
                sampler=NoSampler(heard),
            )
    except Exception as error:  # what it meets is what is measured
        heard.put((time.monotonic(), f"{type(error).__name__}: {error}"))


def waiting_reader(home: Path, number: int, heard: Any) -> None:
    """Waits for a step that never comes, as a rank does."""
    try:
        store = open_(home)
        store.meta()
    except Exception as error:  # what it meets is what is measured
        heard.put((time.monotonic(), f"{type(error).__name__}: {error}"))
        return
    heard.put((time.monotonic(), ""))
    while True:
        store.wait_step(1, block_seconds=READER_BLOCK_SECONDS)
