"""The batcher's cost of a step, with a small pool and with a large one: only what it selects or drops may count."""

from __future__ import annotations

import statistics
import time

import numpy as np

from benchmarks.report import Report
from rlbuffer.batcher.batcher import Batcher
from rlbuffer.config.batcher import BatcherConfig
from rlbuffer.records.info import GroupInfo, RolloutInfo

GROUP_SIZE = 8
STEP_GROUPS = 64
STALE_GROUPS = 16
"""Groups per step that are swept as stale."""
STEPS = 200
POOLS = (1_000, 10_000, 100_000)
MAX_RATIO = 1.25
"""A step over the largest pool may cost this much of one over the smallest: memory further apart is slower."""
MAX_AGE = 10**6
"""So large that nothing but what is meant to be swept gets too old, however deep the pool."""


def make_info(number: int, version: int, lengths: np.ndarray) -> GroupInfo:
    """A whole group of GROUP_SIZE rollouts; envs take turns."""
    name = f"g{number}"
    return GroupInfo(
        group_id=name,
        env=f"env{number % 4}",
        prompt_id=name,
        planned_size=GROUP_SIZE,
        rollouts=tuple(
            RolloutInfo(
                rollout_id=f"{name}/{i}",
                length=length,
                prompt_tokens=32,
                loss_tokens=length - 32,
                reward=float(i % 2),
                min_version=version,
                max_version=version,
            )
            for i, length in enumerate(lengths.tolist())
        ),
    )


def measure(pool: int) -> tuple[float, float, float]:
    """Returns CPU milliseconds per step (next, dropped, committed), per `allowances`, and per added group."""
    rng = np.random.default_rng(0)
    config = BatcherConfig(
        row_tokens=8192,
        step_groups=STEP_GROUPS,
        max_age=MAX_AGE,
        budgets={"env0": 0.25, "env1": 0.25, "env2": 0.25, "env3": 0.25},
    )
    batcher, number = Batcher(config), 0
    offset = MAX_AGE + 1

    def add(count: int, version: int) -> None:
        nonlocal number
        for lengths in rng.integers(64, 512, (count, GROUP_SIZE)):
            batcher.add(make_info(number, version, lengths), entry_id=f"{number}-0", now=0.0)
            number += 1

    started = time.process_time()
    add(pool, offset)
    per_add = (time.process_time() - started) / pool
    steps, waits = [], []
    for step in range(offset + 1, offset + 1 + STEPS):
        add(STEP_GROUPS, step - 1)
        add(STALE_GROUPS, step - 2 - MAX_AGE)
        started = time.process_time()
        decision = batcher.next(step, world_size=8, now=0.0, rng=rng)
        batcher.dropped(decision.drops)
        if decision.plan is None or len(decision.drops) != STALE_GROUPS:
            raise RuntimeError(f"the benchmark's pool does not make a step: {decision.waiting}")
        batcher.committed(decision.plan)
        steps.append(time.process_time() - started)
        started = time.process_time()
        batcher.allowances(step + 1, world_size=8)
        waits.append(time.process_time() - started)
    return 1e3 * _typical(steps), 1e3 * _typical(waits), 1e3 * per_add


def _typical(seconds: list[float]) -> float:
    """The lower quartile: what a step costs when nothing else disturbs it, without the luck of a minimum."""
    return statistics.quantiles(seconds, n=4)[0]


def run(report: Report) -> None:
    """One line per pool, and the ratio of the largest to the smallest."""
    report.begin(
        "batcher",
        measures=f"next + dropped + committed of steps of {STEP_GROUPS} groups of {GROUP_SIZE} rollouts over 4 envs, "
        f"{STALE_GROUPS} stale groups swept per step; CPU time, lower quartile of {STEPS} steps",
        not_measured="the server, decoding metadata, the commit; memory",
    )
    results = {pool: measure(pool) for pool in POOLS}
    base = results[POOLS[0]][0]
    report.table(
        ["groups ready", "ms/step", "of the smallest", "ms/allowances", "ms/added group"],
        [
            [f"{pool:,}", f"{step:.2f}", f"{step / base:.2f}x", f"{wait:.3f}", f"{add:.3f}"]
            for pool, (step, wait, add) in results.items()
        ],
    )
    ratio = results[POOLS[-1]][0] / base
    name = f"a step over {POOLS[-1]:,} ready groups costs at most {MAX_RATIO} x one over {POOLS[0]:,}"
    report.line(f"\n{name}: {ratio:.2f} x, met: {report.target(name, ratio <= MAX_RATIO)}")
