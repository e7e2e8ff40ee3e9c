"""The server's cost of workers that have nothing to do, and of many processes that connect at once.

Real writers and heartbeats over connections of their own, many of them in a process; the embedded server, as it is
started for everybody.
"""

from __future__ import annotations

import logging
import multiprocessing
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from benchmarks.bench_data_path import Clock
from benchmarks.report import Report
from rlbuffer.client.buffer import Buffer
from rlbuffer.client.reader import READER_BLOCK_SECONDS
from rlbuffer.client.writer import Writer
from rlbuffer.config.settings import RunSettings, ServerSettings
from rlbuffer.process.heartbeat import BEAT_SECONDS
from rlbuffer.store.redis_store import RedisStore, open_store
from rlbuffer.worker.heartbeat import Pulse

WORKERS, READERS = 1_000, 512
WORKER_PROCESSES, READER_PROCESSES = 3, 2
"""Each holds its share, a thread for every one."""
CONNECT_SECONDS = 30.0
"""All shall be connected within this."""
PATIENCE_SECONDS = 180.0
SETTLE_SECONDS, MEASURED_SECONDS = 75.0, 20.0
"""After the first, workers ask as seldom as they ever do."""
MOST_OF_A_CORE = 0.02
SPAWN = multiprocessing.get_context("spawn")


def run(report: Report) -> None:
    """Connects them all, waits, and looks at the server's CPU."""
    report.begin(
        "idle workers",
        measures=f"{WORKERS:,} workers without tickets and {READERS} waiting readers in "
        f"{WORKER_PROCESSES + READER_PROCESSES} processes: time until all are connected, errors, and the server's CPU "
        f"over {MEASURED_SECONDS:g} s, {SETTLE_SECONDS:g} s later, of all and of the workers alone, heartbeats counted",
        not_measured="the network (unix socket here), the workers' own CPU, workers that begin or end meanwhile",
    )
    home = Path(tempfile.mkdtemp(prefix="rlb-bench-"))
    store, heard = open_(home), SPAWN.Queue()
    workers = [SPAWN.Process(target=worker_crowd, args=(home, i, heard)) for i in range(WORKER_PROCESSES)]
    readers = [SPAWN.Process(target=reader_crowd, args=(home, i, heard)) for i in range(READER_PROCESSES)]
    try:
        store.open_run()
        store.attempt(uuid="bench", world_size=READERS, resume_step=0)
        begun = time.monotonic()
        for process in (*workers, *readers):
            process.start()
        said = [heard.get(timeout=PATIENCE_SECONDS) for _ in range(WORKERS + READERS)]
        seconds, errors = max(at for at, _ in said) - begun, [text for _, text in said if text]
        time.sleep(SETTLE_SECONDS)
        together = Clock(store)(lambda: time.sleep(MEASURED_SECONDS))
        end(readers)
        time.sleep(1.0)
        alone = Clock(store)(lambda: time.sleep(MEASURED_SECONDS))
    finally:
        end([*workers, *readers])
        store.close()
        shutil.rmtree(home, ignore_errors=True)
    share = alone.server / alone.wall
    report.line(f"connected after {seconds:.1f} s, errors: {len(errors)} {errors[:1] or ''}")
    report.line(f"server: {100 * together.server / together.wall:.2f} % of a core with the readers")
    report.line(f"workers alone: {100 * share:.2f} %; {1e6 * share / WORKERS:.1f} us a second for each worker")
    name = f"{WORKERS:,} workers and {READERS} readers connect within {CONNECT_SECONDS:g} s without an error"
    report.line(f"\n{name}, met: {report.target(name, seconds <= CONNECT_SECONDS and not errors)}")
    name = f"{WORKERS:,} idle workers cost the server less than {100 * MOST_OF_A_CORE:g} % of a core"
    report.line(f"{name}, met: {report.target(name, share < MOST_OF_A_CORE)}")


def open_(home: Path, url: str | None = None) -> RedisStore:
    return open_store(url, run="bench", home=home, server=ServerSettings(appendfsync="everysec"))


def end(processes: Sequence[BaseProcess]) -> None:
    """Kills them; those that have ended are let be."""
    for process in processes:
        if process.pid is not None:
            process.kill()
            process.join()


def worker_crowd(home: Path, number: int, heard: Any) -> None:
    """A process with its share of the workers, and their heartbeats."""
    mine = range(number, WORKERS, WORKER_PROCESSES)
    start(idle_worker, home, mine, heard)
    beat_for(home, mine)


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


def idle_worker(home: Path, number: int, heard: Any) -> None:
    """Asks for a ticket that never comes."""
    try:
        store = open_(home)
        writer = Writer(store, f"worker-{number}", epoch=store.meta().epoch)
        taken = writer.take("math", timeout_seconds=0.0)
    except Exception as error:  # what it meets is what is measured
        heard.put((time.monotonic(), f"{type(error).__name__}: {error}"))
        return
    heard.put((time.monotonic(), f"took {taken}" if taken else ""))
    writer.take("math")


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


def beat_for(home: Path, numbers: range, url: str | None = None) -> None:
    """The heartbeats of a process's workers, spread over their interval."""
    store = open_(home, url)
    buffer = Buffer(store, settings=RunSettings())
    record = Pulse(buffer, "worker", "math").record()
    due = time.monotonic()
    while True:
        for number in numbers:
            buffer.heartbeat("worker", f"worker-{number}", record)
            due += BEAT_SECONDS / len(numbers)
            time.sleep(max(0.0, due - time.monotonic()))
