"""The cost of a worker's own code: tickets, tasks, scoring, records, encoding and pushing, around a sampler that
answers at once.

The worker is the real loop on a real server. What runs in its process is counted: the event loop, the threads that
score and push, the pulse. An engine in the same process shares that core with it, one behind HTTP does not.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from every_role import EveryRole
from numpy.typing import NDArray

from benchmarks.report import Report
from rlbuffer.client.buffer import connect
from rlbuffer.config.settings import RunSettings, ServerSettings, WorkerSettings
from rlbuffer.process.logs import heard
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.records.spans import VersionSpan
from rlbuffer.worker import loop
from rlbuffer.worker.envs import Prompt, Score
from rlbuffer.worker.loop import run_worker
from rlbuffer.worker.samplers import Completion, SamplerTraits, Sampling

GROUP_SIZE = 8
PROMPT_TOKENS = 100
TOKENS = 1000
"""Tokens of a rollout, its prompt included."""
GROUPS = 1500
"""Timed, after WARM."""
WARM = 100
GROUPS_PER_MINUTE = 3000
"""Stated target, on one core: 20 ms of CPU a group."""
MAX_SECONDS = 600.0


class Instant:
    """Answers at once, with completions that were made before."""

    traits = SamplerTraits(is_exact=True)
    vocab_size = 50_000
    context = 0

    def __init__(self) -> None:
        self.version = -1
        rng = np.random.default_rng(0)
        count = TOKENS - PROMPT_TOKENS
        self._answer = [
            Completion(
                tokens=rng.integers(0, self.vocab_size, count).astype(np.int32),
                logprobs=-rng.random(count, np.float32),
                finish_reason="stop",
                version_spans=(VersionSpan(0, 0, count),),
            )
            for _ in range(GROUP_SIZE)
        ]

    async def load(self, policy: PolicyVersion) -> None:
        self.version = policy.version

    async def sample(self, prompt: NDArray[np.int32], *, n: int, sampling: Sampling) -> list[Completion]:
        return self._answer

    async def close(self) -> None: ...


class Plain:
    """An env whose own work is nothing."""

    name = "plain"
    vocab_size = 50_000
    eos_token_ids = (0,)
    max_new_tokens = TOKENS - PROMPT_TOKENS

    def prompt(self, number: int) -> Prompt:
        return Prompt(prompt_id=str(number), tokens=np.arange(PROMPT_TOKENS, dtype=np.int32), answer="42")

    def score(self, prompt: Prompt, tokens: NDArray[np.int32], *, finish_reason: str) -> Score:
        return Score(reward=float(tokens[0] % 2), successes={"right": bool(tokens[0] % 2)})

    def render(self, tokens: NDArray[np.int32]) -> str:
        return "some text"


class Watch:
    """Hears what the worker logs and takes the times between two groups."""

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop
        self.groups = 0
        self.begun = self.ended = (0.0, 0.0)
        """(CPU seconds, wall seconds)."""

    def __call__(self, line: Mapping[str, Any]) -> None:
        if line["event"] != "group":
            return
        self.groups += 1
        if self.groups == WARM:
            self.begun = time.process_time(), time.perf_counter()
        elif self.groups == WARM + GROUPS:
            self.ended = time.process_time(), time.perf_counter()
            self._stop.set()


def run(report: Report) -> None:
    """Times one worker."""
    report.begin(
        "worker",
        measures=f"{GROUPS} groups of {GROUP_SIZE} x {TOKENS} tokens through the real worker loop onto an embedded "
        "server, with a sampler that answers at once; CPU is all of this process's",
        not_measured="sampling, an env's own work, weights, the batcher, a network (unix socket here), the server's "
        "CPU, a full server",
    )
    home = Path(tempfile.mkdtemp(prefix="rlb-bench-"))
    before = vars(loop)["WORKER_TICKET_SECONDS"]
    vars(loop)["WORKER_TICKET_SECONDS"] = 3600.0  # nobody closes the tickets of what is pushed
    try:
        rows = [measured(home, in_flight) for in_flight in (4, 32)]
    finally:
        vars(loop)["WORKER_TICKET_SECONDS"] = before
        shutil.rmtree(home, ignore_errors=True)
    report.table(
        ["groups in flight", "CPU ms a group", "groups/min of CPU", "wall ms", "groups/min wall"], rows_of(rows)
    )
    worst = max(cpu for _, cpu, _ in rows)
    name = f"worker: {GROUPS_PER_MINUTE:,} groups/min on one core"
    met = report.target(name, 60 / worst >= GROUPS_PER_MINUTE)
    report.line(f"\nat least {GROUPS_PER_MINUTE:,} groups/min of one core's CPU: {met} ({60 / worst:,.0f})")


def rows_of(rows: list[tuple[int, float, float]]) -> list[list[str]]:
    """Rows of a table."""
    return [
        [str(n), f"{1000 * cpu:.2f}", f"{60 / cpu:,.0f}", f"{1000 * wall:.2f}", f"{60 / wall:,.0f}"]
        for n, cpu, wall in rows
    ]


def measured(home: Path, in_flight: int) -> tuple[int, float, float]:
    """Returns groups in flight, CPU seconds a group, wall seconds a group."""
    settings = RunSettings(home=home, server=ServerSettings(maxmemory="1gb", appendfsync="everysec"))
    stop = threading.Event()
    watch = Watch(stop)
    with connect(run=f"bench-{in_flight}", config=settings) as buffer:
        store = buffer.role(EveryRole)
        store.open_run()
        store.lease("bench", ttl_seconds=MAX_SECONDS)
        attempt = store.attempt(uuid="bench", world_size=1, resume_step=0).number
        store.announce(attempt, PolicyVersion(version=0))
        store.set_allowances({Plain.name: 10**6})
        options = WorkerSettings(env="vcopy", group_size=GROUP_SIZE, groups_per_batch=in_flight)
        with heard("rlbuffer.worker", watch):
            run_worker(buffer, "bench", options, stop=stop, env=Plain(), sampler=Instant())
        store.delete_run()
    cpu, wall = (end - start for start, end in zip(watch.begun, watch.ended, strict=True))
    return in_flight, cpu / GROUPS, wall / GROUPS
