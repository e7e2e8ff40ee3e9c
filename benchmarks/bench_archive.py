"""What the archive takes of `serve`'s CPU: committed steps from a real server into files, per step and token.

The steps are those of the real batcher over pushes of a real writer. What is measured is all that the archive's thread
does with them: reading, taking apart, Parquet, zstd, the disk.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from every_role import EveryRole

from benchmarks.report import Report
from rlbuffer.archive.check import check_archive
from rlbuffer.archive.copying import copy_history, copy_steps, files_of, unwritten
from rlbuffer.archive.library import Archive
from rlbuffer.archive.writer import ArchiveWriter
from rlbuffer.client.buffer import Buffer
from rlbuffer.client.writer import Writer
from rlbuffer.config.batcher import BatcherConfig
from rlbuffer.config.settings import RunSettings, ServerSettings
from rlbuffer.daemon import Daemon
from rlbuffer.daemon.archiving import FILE_BYTES, FILE_STEPS
from rlbuffer.process.logs import heard
from rlbuffer.records.group import Group
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.records.rollout import Rollout
from rlbuffer.store.session import open_store

STEPS = 32
STEP_GROUPS, GROUP_SIZE = 16, 8
LENGTHS = {"short: 128 rollouts of 64 to 192 tokens": (64, 192), "long: 128 rollouts of 512 to 1,536": (512, 1536)}
VOCABULARY = 32_000
RATE = 51_200
"""Tokens per second of the run of which the archive may take :data:`MAX_SHARE` of a core."""
MAX_SHARE = 0.02
REPEATS = 5


def run(report: Report) -> None:
    """Archives the same steps a few times, each into a folder of its own."""
    report.begin(
        "archive",
        measures=f"CPU of copying {STEPS} committed steps of {STEP_GROUPS} groups of {GROUP_SIZE} from a server into "
        f"files, best of {REPEATS}; the share of a core at {RATE:,} tokens a second",
        not_measured="the server's part, a slow disk, further columns, several processes that compete for the core",
    )
    rows = []
    for name, (low, high) in LENGTHS.items():
        cpu, wall, tokens, size = measure(low, high)
        share = cpu / tokens * RATE
        met = report.target(f"{name}: under {MAX_SHARE:.0%} of a core", share < MAX_SHARE)
        each = [f"{1e3 * cpu / STEPS:.2f}", f"{1e6 * cpu / tokens:.3f}", f"{1e3 * wall / STEPS:.1f}"]
        rows.append([name, f"{tokens // STEPS:,}", *each, f"{size / tokens:.1f}", f"{share:.1%}", met])
    head = ["a step", "tokens", "CPU ms a step", "us a token", "wall ms", "bytes a token on disk", "share", "met"]
    report.table(head, rows)


def measure(low: int, high: int) -> tuple[float, float, int, int]:
    """Returns the CPU and wall seconds of all steps, their tokens, and the bytes of the files."""
    home = Path(tempfile.mkdtemp(prefix="rlb-bench-"))
    store = open_store(EveryRole, None, run="bench", home=home, server=ServerSettings(appendfsync="no", maxmemory="0"))
    try:
        tokens = committed(store, low, high)
        best = (float("inf"), float("inf"))
        for repeat in range(REPEATS):
            folder = home / f"archive{repeat}"
            writer = ArchiveWriter(folder, "bench")
            cpu, begun = time.process_time(), time.perf_counter()
            for file in files_of(unwritten(store, writer), steps=FILE_STEPS, size=FILE_BYTES):
                copy_steps(store, writer, file)
            copy_history(store, writer)
            best = min(best, (time.process_time() - cpu, time.perf_counter() - begun))
        findings = [finding for finding in check_archive(Archive(folder)).findings if finding.invariant != "A6"]
        if findings:
            raise RuntimeError(f"the archive is not whole: {findings[0]}")
        return *best, tokens, sum(path.stat().st_size for path in folder.glob("rollouts-*"))
    finally:
        store.close()
        shutil.rmtree(home, ignore_errors=True)


def committed(store: EveryRole, low: int, high: int) -> int:
    """Makes the steps. -> their tokens."""
    store.open_run()
    number = store.attempt(uuid="bench", world_size=8, resume_step=0).number
    store.announce(number, PolicyVersion(version=0))
    writer, rng = Writer(store, "w", epoch=store.meta().epoch), np.random.default_rng(0)
    for group in range((STEPS + 1) * STEP_GROUPS):  # one step more: the last one closes as any other
        rollouts = [_rollout(rng, i, int(rng.integers(low, high))) for i in range(GROUP_SIZE)]
        writer.push(
            Group(group_id=f"a.{group}", env="a", prompt_id=str(group), rollouts=tuple(rollouts), planned_size=8)
        )
    config = BatcherConfig(row_tokens=8192, step_groups=STEP_GROUPS, lookahead=STEPS + 1, max_age=10**6)
    stop = threading.Event()

    def hear(line: dict[str, Any]) -> None:
        if line["event"] == "ready":
            store.report(number, epoch=store.meta().epoch, trained=0, digest="", oldest_kept=0)
        if line["event"] == "step" and line["step"] == STEPS:
            stop.set()

    with heard("rlbuffer.daemon", hear):
        Daemon(Buffer(store, settings=RunSettings()), config).run(stop)
    return sum(header.tokens for header in store.headers())


def _rollout(rng: np.random.Generator, index: int, length: int) -> Rollout:
    """A rollout whose tokens and logprobs are spread as those of a language model are."""
    ids = np.minimum(rng.zipf(1.3, length), VOCABULARY - 1).astype(np.int32)
    logprobs = -rng.exponential(0.4, length).astype(np.float32)
    prompt = min(32, length // 2)
    return Rollout.from_completion(
        prompt_ids=ids[:prompt],
        token_ids=ids[prompt:],
        logprobs=logprobs[prompt:],
        reward=float(rng.random()),
        policy_version=0,
    )
