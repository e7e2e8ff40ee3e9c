"""Learning rates over a run, counted in planned optimizer updates from 1.

Each step takes the same share of the plan: one that makes fewer updates than planned stretches no schedule.

A schedule gives the share of the full rate at update u of n, after w updates of warm-up, which rise as u / w:

=========  ==========================================================================
constant   1
linear     1 - (u - w) / (n - w)
cosine     (1 + cos(pi (u - w) / (n - w))) / 2
wsd_sqrt   1 until s = `decay_from_update`, then 1 - sqrt((u - s) / (n - s))
=========  ==========================================================================

The rate is min + (full - min) x share; in the warm-up it is full x u / w.

Source: cosine: SGDR, arXiv 1608.03983, equation 5; warm-up, stable, decay with the square root: Hägele et al. 2024,
"Scaling laws and compute-optimal training beyond fixed training durations", arXiv 2405.18392, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from rlbuffer.config.trainer import TrainerSettings

Schedule = Callable[[float, float], float]
"""(u - start, n - start) -> share of the full rate; `start` is where the warm-up, or the stable part, ends."""

SCHEDULES: dict[str, Schedule] = {
    "constant": lambda done, planned: 1.0,
    "linear": lambda done, planned: 1 - done / planned,
    "cosine": lambda done, planned: (1 + math.cos(math.pi * done / planned)) / 2,
    "wsd_sqrt": lambda done, planned: 1 - math.sqrt(done / planned),
}
"""Every schedule by its name in ``trainer.optimizer.schedule``."""


def planned_updates(trainer: TrainerSettings, steps: float | None = None) -> float:
    """Updates that are planned for so many `steps`, whole or in part; None: for the run."""
    planned = trainer.steps if steps is None else steps
    return planned * trainer.optimizer.passes * trainer.optimizer.updates_per_pass


def learning_rate_at(update: float, trainer: TrainerSettings) -> float:
    """The learning rate of the given planned update, counted from 1.

    Example:
        >>> from rlbuffer.config.trainer import OptimizerSettings, TrainerSettings
        >>> optimizer = OptimizerSettings(learning_rate=0.01, warmup_updates=2, schedule="linear")
        >>> trainer = TrainerSettings(steps=10, optimizer=optimizer)
        >>> [learning_rate_at(update, trainer) for update in (1, 2, 6, 10)]
        [0.005, 0.01, 0.005, 0.0]
    """
    optimizer = trainer.optimizer
    full, low, warmup = optimizer.learning_rate, optimizer.min_learning_rate, optimizer.warmup_updates
    if update < warmup:
        return full * update / warmup
    start = optimizer.decay_from_update if optimizer.schedule == "wsd_sqrt" else warmup
    planned = planned_updates(trainer) - start
    if optimizer.schedule == "constant" or update <= start:
        return full
    # A run that is longer than planned goes on at the minimum.
    share = SCHEDULES[optimizer.schedule](update - start, planned) if update - start < planned else 0.0
    return low + (full - low) * share
