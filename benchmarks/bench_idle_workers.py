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
PROCESSES = 4
"""Each holds its share of the workers and of the readers, a thread for every one."""
CONNECT_SECONDS = 30.0
"""All shall be connected within this."""
PATIENCE_SECONDS = 180.0
SETTLE_SECONDS, MEASURED_SECONDS = 10.0, 20.0
MOST_OF_A_CORE = 0.02
SPAWN = multiprocessing.get_context("spawn")


def run(report: Report) -> None:
    """Connects them all, waits, and looks at the server's CPU."""
    report.begin(
        "idle workers",
        measures=f"{WORKERS:,} workers without tickets and {READERS} waiting readers in {PROCESSES} processes: time "
        f"until all are connected, errors, and the server's CPU over {MEASURED_SECONDS:g} s, heartbeats counted",
        not_measured="the network (unix socket here), the workers' own CPU, workers that begin or end meanwhile",
    )
    home = Path(tempfile.mkdtemp(prefix="rlb-bench-"))
    store, heard = open_(home), SPAWN.Queue()
    crowds = [SPAWN.Process(target=crowd, args=(home, i, heard), daemon=True) for i in range(PROCESSES)]
    try:
        store.open_run()
        store.attempt(uuid="bench", world_size=READERS, resume_step=0)
        begun = time.monotonic()
        for process in crowds:
            process.start()
        said = [heard.get(timeout=PATIENCE_SECONDS) for _ in range(WORKERS + READERS)]
        seconds, errors = max(at for at, _ in said) - begun, [text for _, text in said if text]
        time.sleep(SETTLE_SECONDS)
        cost = Clock(store)(lambda: time.sleep(MEASURED_SECONDS))
    finally:
        for process in crowds:
            process.kill()
            process.join()
        store.close()
        shutil.rmtree(home, ignore_errors=True)
    share = cost.server / cost.wall
    report.line(f"connected after {seconds:.1f} s, errors: {len(errors)} {errors[:1] or ''}")
    report.line(f"server: {100 * share:.2f} % of a core; {1e6 * share / WORKERS:.1f} us a second for each worker")
    name = f"{WORKERS:,} workers and {READERS} readers connect within {CONNECT_SECONDS:g} s without an error"
    report.line(f"\n{name}, met: {report.target(name, seconds <= CONNECT_SECONDS and not errors)}")
    name = f"{WORKERS:,} idle workers cost the server less than {100 * MOST_OF_A_CORE:g} % of a core"
    report.line(f"{name}, met: {report.target(name, share < MOST_OF_A_CORE)}")


def open_(home: Path) -> RedisStore:
    return open_store(None, run="bench", home=home, server=ServerSettings(appendfsync="everysec"))


def crowd(home: Path, number: int, heard: Any) -> None:
    """A process with its share of the workers and readers."""
    logging.disable(logging.WARNING)  # a thousand workers say that they wait
    threading.stack_size(256 * 1024)
    roles = [(idle_worker, i) for i in range(number, WORKERS, PROCESSES)]
    roles += [(waiting_reader, i) for i in range(number, READERS, PROCESSES)]
    threads = [threading.Thread(target=role, args=(home, i, heard), daemon=True) for role, i in roles]
    for thread in threads:
        thread.start()
    beat_for(home, range(number, WORKERS, PROCESSES))


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


def beat_for(home: Path, numbers: range) -> None:
    """The heartbeats of a process's workers, spread over their interval."""
    store = open_(home)
    buffer = Buffer(store, settings=RunSettings())
    record = Pulse(buffer, "worker", "math").record()
    due = time.monotonic()
    while True:
        for number in numbers:
            buffer.heartbeat("worker", f"worker-{number}", record)
            due += BEAT_SECONDS / len(numbers)
            time.sleep(max(0.0, due - time.monotonic()))
