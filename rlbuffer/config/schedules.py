"""Learning rates over a run, counted in optimizer updates from 1.

A schedule gives the share of the full rate at update u of n, after w updates of warm-up, which rise as u / w:

=========  ==========================================================================
constant   1
linear     1 - (u - w) / (n - w)
cosine     (1 + cos(pi (u - w) / (n - w))) / 2
wsd_sqrt   1 until `stable`, then 1 - sqrt((u - stable) / (n - stable))
=========  ==========================================================================

The rate is min + (full - min) x share; in the warm-up it is full x u / w.

Source: cosine: SGDR, arXiv 1608.03983, equation 5; warm-up, stable, decay with the square root: Hägele et al. 2024,
"Scaling laws and compute-optimal training beyond fixed training durations", arXiv 2405.18392, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from rlbuffer.config.settings import TrainerSettings
from rlbuffer.errors import ConfigError

Schedule = Callable[[float, float], float]
"""(u - start, n - start) -> share of the full rate; `start` is where the warm-up, or the stable part, ends."""

SCHEDULES: dict[str, Schedule] = {
    "constant": lambda done, planned: 1.0,
    "linear": lambda done, planned: 1 - done / planned,
    "cosine": lambda done, planned: (1 + math.cos(math.pi * done / planned)) / 2,
    "wsd_sqrt": lambda done, planned: 1 - math.sqrt(done / planned),
}
"""Every schedule by its name in ``trainer.schedule``."""


def planned_updates(settings: TrainerSettings) -> int:
    """Updates of the whole run. A step with fewer micro-batches than `updates_per_pass` makes fewer."""
    return settings.steps * settings.passes * settings.updates_per_pass


def mistakes(settings: TrainerSettings) -> Iterator[ConfigError]:
    """Finds settings that cannot be meant: a minimum above the rate, a wsd_sqrt without a stable part or an end."""
    if settings.min_learning_rate > settings.learning_rate:
        yield ConfigError(
            f"trainer.min_learning_rate = {settings.min_learning_rate:g} is above trainer.learning_rate = "
            f"{settings.learning_rate:g}",
            setting="trainer.min_learning_rate",
        )
    planned = planned_updates(settings)
    if settings.schedule == "wsd_sqrt" and not settings.warmup_updates <= settings.stable < planned:
        yield ConfigError(
            f"trainer.stable = {settings.stable}: with schedule = wsd_sqrt the rate falls from that update on, so it "
            f"must be at least trainer.warmup_updates = {settings.warmup_updates} and less than the {planned} planned "
            "updates",
            setting="trainer.stable",
        )


def check_schedule(settings: TrainerSettings) -> None:
    """Refuses the first of the :func:`mistakes`.

    Raises:
        ConfigError: says which.
    """
    for mistake in mistakes(settings):
        raise mistake


def learning_rate_at(update: int, settings: TrainerSettings) -> float:
    """The learning rate of the given update, counted from 1."""
    full, low, warmup = settings.learning_rate, settings.min_learning_rate, settings.warmup_updates
    if update < warmup:
        return full * update / warmup
    start = settings.stable if settings.schedule == "wsd_sqrt" else warmup
    planned = planned_updates(settings) - start
    if settings.schedule == "constant" or update <= start:
        return full
    # A run that is longer than planned goes on at the minimum.
    share = SCHEDULES[settings.schedule](update - start, planned) if update - start < planned else 0.0
    return low + (full - low) * share
