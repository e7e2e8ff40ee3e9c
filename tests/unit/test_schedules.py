"""Learning rates over a run, counted in planned updates."""

from __future__ import annotations

import math
from typing import Any

import pytest

from rlbuffer.config.schedules import SCHEDULES, learning_rate_at
from rlbuffer.config.trainer import OptimizerSettings, TrainerSettings


def settings(steps: int = 100, **values: Any) -> TrainerSettings:
    return TrainerSettings(steps=steps, optimizer=OptimizerSettings(**({"learning_rate": 2.0} | values)))


@pytest.mark.parametrize(
    ("update", "share"),
    [(1, 0.1), (9, 0.9), (10, 1.0), (50, 1.0), (51, 0.8586), (60, 0.5528), (75, 0.2929), (99, 0.0101), (100, 0.0)],
)
def test_warm_up_stable_decay_with_the_square_root(update: int, share: float) -> None:
    chosen = settings(schedule="wsd_sqrt", warmup_updates=10, decay_from_update=50)
    assert learning_rate_at(update, chosen) == pytest.approx(2 * share, abs=2e-4)


@pytest.mark.parametrize(
    ("schedule", "shares"),
    [
        ("constant", {1: 1.0, 37: 1.0, 100: 1.0}),
        ("linear", {1: 0.99, 50: 0.5, 100: 0.0}),
        ("cosine", {25: (1 + math.cos(math.pi / 4)) / 2, 50: 0.5, 100: 0.0}),
    ],
)
def test_a_schedule_has_the_shares_of_its_formula(schedule: str, shares: dict[int, float]) -> None:
    for update, share in shares.items():
        assert learning_rate_at(update, settings(schedule=schedule)) == pytest.approx(2 * share)


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_every_schedule_warms_up_and_ends_at_its_minimum(schedule: str) -> None:
    chosen = settings(schedule=schedule, warmup_updates=4, decay_from_update=20, min_learning_rate=0.5)
    assert [learning_rate_at(u, chosen) for u in (1, 2, 4)] == [0.5, 1.0, 2.0]
    rates = [learning_rate_at(u, chosen) for u in range(4, 101)]
    assert rates == sorted(rates, reverse=True)
    end = 2.0 if schedule == "constant" else 0.5
    assert learning_rate_at(100, chosen) == pytest.approx(end)
    assert learning_rate_at(150, chosen) == pytest.approx(end)


def test_schedules_count_updates_and_not_steps() -> None:
    several = settings(steps=10, passes=2, updates_per_pass=5, schedule="linear")
    assert learning_rate_at(50, several) == pytest.approx(1.0)
    assert learning_rate_at(100, several) == pytest.approx(0.0)
