"""Lengths of rollouts as RL post-training sees them, drawn once and for all: seeded, so every run packs the same."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

COST = (24576, 1)
"""(a, b) of the cost a*L + b*L^2 for a 7B model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One step's rollouts and the machine they are packed for."""

    what: str
    lengths: NDArray[np.int64]
    """[n] tokens."""
    row_tokens: int
    world_size: int
    plan_ms: float | None = None
    """Stated target: CPU milliseconds of a plan, warm, best of five."""
    span: float | None = None
    """Stated target: sum over micro-steps of the costliest rank, over ideal."""


def lognormal(n: int, *, median: float, low: int, high: int, seed: int, sigma: float = 0.9) -> NDArray[np.int64]:
    """Lengths with the long tail of reasoning rollouts, clipped to ``low``..``high``."""
    draws = np.random.default_rng(seed).standard_normal(n)
    return np.clip(np.rint(median * np.exp(sigma * draws)), low, high).astype(np.int64)


def normal(n: int, *, mean: float, deviation: float, low: int, high: int, seed: int) -> NDArray[np.int64]:
    """Lengths around a mean: no short ones to fill gaps with."""
    draws = np.random.default_rng(seed).normal(mean, deviation, n)
    return np.clip(draws.round(), low, high).astype(np.int64)


WORKLOADS = {
    "a": Workload(
        what="2,048 rollouts, 8 ranks",
        lengths=lognormal(2048, median=2000, low=64, high=16384, seed=1),
        row_tokens=16384,
        world_size=8,
        plan_ms=3.0,
        span=1.005,
    ),
    "b": Workload(
        what="32,768 rollouts, 64 ranks",
        lengths=lognormal(32768, median=2000, low=64, high=16384, seed=2),
        row_tokens=16384,
        world_size=64,
        plan_ms=40.0,
        span=1.004,
    ),
    "c": Workload(
        what="1,024 long, 8 ranks",
        lengths=lognormal(1024, median=6000, low=64, high=32768, seed=3),
        row_tokens=32768,
        world_size=8,
        span=1.0068,
    ),
    "d": Workload(
        what="8,192 short, 16 ranks",
        lengths=lognormal(8192, median=300, low=16, high=8192, seed=4),
        row_tokens=8192,
        world_size=16,
        span=1.0034,
    ),
    "e": Workload(
        what="128 rollouts, 8 ranks",
        lengths=lognormal(128, median=2000, low=64, high=16384, seed=5),
        row_tokens=16384,
        world_size=8,
        span=1.1236,
    ),
    "f": Workload(
        what="1,024 near 6,500, 8 ranks",
        lengths=normal(1024, mean=6500, deviation=900, low=3000, high=16384, seed=6),
        row_tokens=16384,
        world_size=8,
    ),
}
