"""Shares, fill, and what tickets let go to waste, over many seeds of the closed loop of workers and trainer."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from closed_loop import EnvSpeed, simulate

from rlbuffer.config.batcher import BatcherConfig

SHARES = {"a": 0.5, "b": 0.3, "c": 0.2}
SIZES = [{"step_groups": 32}, {"micro_batches_per_rank": 3, "step_groups": 0}]
LENGTHS = {"a": 100, "b": 60, "c": 200}
SPEEDS = list(itertools.permutations((1.0, 1 / 3, 1 / 10)))
"""Seconds per group of a, b and c: 1 : 3 : 10 in every order."""


def envs_of(seconds: tuple[float, ...], *, scale: float = 4.0) -> dict[str, EnvSpeed]:
    return {
        env: EnvSpeed(seconds=scale * each, workers=8, length=LENGTHS[env])
        for env, each in zip(SHARES, seconds, strict=True)
    }


@pytest.mark.parametrize(("seconds", "max_age"), [*zip(SPEEDS, (0, 1, 1, 0, 1, 0), strict=True)])
def test_three_envs_of_unequal_speed_keep_their_shares_and_fill_the_steps(
    seconds: tuple[float, ...], max_age: int
) -> None:
    config = BatcherConfig(row_tokens=2048, micro_batches_per_rank=3, step_groups=0, max_age=max_age, budgets=SHARES)
    outcome = simulate(config, envs_of(seconds), steps=20, seed=max_age)
    assert (outcome.stuck, outcome.steps) == ("", 20)
    assert outcome.drift <= outcome.largest  # after each of the 20 steps
    assert statistics.median(outcome.fills) >= 0.90


STRICT: dict[str, Any] = {"row_tokens": 2048, "max_age": 0, "lookahead": 0}


@pytest.mark.parametrize(
    ("seconds", "unit"),
    [*zip(SPEEDS[:3], ("groups", "rollouts", "groups"), strict=True)],
    ids=["last", "middle", "slow"],
)
def test_on_policy_a_step_of_so_many_groups_wastes_none(seconds: tuple[float, ...], unit: Any) -> None:
    config = BatcherConfig(**STRICT, step_groups=32, budgets=SHARES, unit=unit)
    outcome = simulate(config, envs_of(seconds), steps=20)
    assert (outcome.stuck, outcome.dropped) == ("", Counter())
    assert outcome.pushed == outcome.packed == 20 * 32


@pytest.mark.parametrize("budgets", [{}, {"a": 1.0}])
def test_on_policy_one_env_wastes_none(budgets: dict[str, float]) -> None:
    config = BatcherConfig(**STRICT, step_groups=32, budgets=budgets)
    outcome = simulate(config, {"a": EnvSpeed(seconds=4, workers=16)}, steps=20)
    assert (outcome.stuck, outcome.dropped["stale"]) == ("", 0)


def test_on_policy_in_tokens_only_the_doubt_about_sizes_is_wasted() -> None:
    """The env that gives the last group depends on the sizes of the ones before; nobody can know that."""
    config = BatcherConfig(**STRICT, step_groups=32, budgets=SHARES)
    stale = pushed = 0
    for seconds in SPEEDS[:3]:
        outcome = simulate(config, envs_of(seconds), steps=15)
        assert outcome.stuck == ""
        stale, pushed = stale + outcome.dropped["stale"], pushed + outcome.pushed
    assert stale <= 0.01 * pushed


@pytest.mark.parametrize("seconds", SPEEDS[:3], ids=["fast-last", "fast-middle", "slow-middle"])
def test_on_policy_rows_waste_at_most_one_group_per_env_and_step(seconds: tuple[float, ...]) -> None:
    """But once in some hundred steps: how long the groups on their way turn out, nobody can know."""
    config = BatcherConfig(**STRICT, micro_batches_per_rank=3, step_groups=0, budgets=SHARES)
    outcome = simulate(config, envs_of(seconds), steps=30)
    assert outcome.stuck == ""
    assert max(outcome.stale.values(), default=0) <= 2
    assert sum(groups > 1 for groups in outcome.stale.values()) <= 1  # of 3 x 31 chances
    assert outcome.stale_percent < 2


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("size", SIZES, ids=["groups", "rows"])
def test_one_step_off_policy_slow_generation_wastes_less_than_a_fifth(size: dict[str, int], lookahead: int) -> None:
    config = BatcherConfig(row_tokens=2048, max_age=1, lookahead=lookahead, budgets=SHARES, **size)
    outcome = simulate(config, envs_of(SPEEDS[lookahead], scale=20.0), steps=20, seed=lookahead)
    assert outcome.stuck == ""
    assert outcome.stale_percent < 20


@pytest.mark.parametrize("max_age", [0, 1, 2])
@pytest.mark.parametrize("size", SIZES, ids=["groups", "rows"])
def test_no_worker_idles_while_its_env_is_short(size: dict[str, int], max_age: int) -> None:
    config = BatcherConfig(row_tokens=2048, max_age=max_age, budgets=SHARES, **size)
    outcome = simulate(config, envs_of(SPEEDS[max_age]), steps=20, seed=max_age)
    assert (outcome.stuck, outcome.idle.total()) == ("", 0)
    # On policy the sentence rounds up what the tickets are exact about.
    assert max_age == 0 or outcome.thin.total() == 0


def test_tickets_of_workers_that_die_hold_no_step_up_for_longer_than_they_live() -> None:
    config = BatcherConfig(**STRICT, step_groups=16, budgets=SHARES)
    for seed in range(3):
        outcome = simulate(config, envs_of(SPEEDS[0]), steps=15, seed=seed, loss=0.05, ticket_seconds=20.0)
        assert (outcome.stuck, outcome.steps) == ("", 15)
        assert outcome.seconds <= 15 * (20.0 + 60.0)


LONG = {
    "quick": EnvSpeed(seconds=0.6, workers=8, length=40),
    "long": EnvSpeed(seconds=1.0, workers=8, length=60, slow=0.1),
}


@pytest.mark.parametrize("max_age", [0, 1, 2, 4])
@pytest.mark.parametrize("settings", [{}, {"budgets": {"quick": 0.3, "long": 0.7}}, {"unit": "groups"}], ids=str)
def test_steps_that_wait_for_slow_groups_train_lengths_as_they_are_sampled(max_age: int, settings: Any) -> None:
    config = BatcherConfig(8192, step_groups=8, max_age=max_age, slow="wait", **settings)
    outcome = simulate(config, LONG, steps=60, seed=max_age, spread=0.25)
    assert (outcome.stuck, outcome.lost_though_awaited) == ("", [])
    assert outcome.distance <= 0.02
    # Before the first groups came nobody knows what an env sends; one that is short of its share samples one too many.
    assert len(outcome.lost) <= 0.04 * outcome.pushed
    oldest = simulate(replace(config, slow="drop"), LONG, steps=60, seed=max_age, spread=0.25)
    assert max_age == 0 or oldest.distance > 0.02


def test_nobody_waits_for_workers_that_died_and_the_others_lose_nothing() -> None:
    config = BatcherConfig(8192, step_groups=8, max_age=1, slow="wait")
    for seed in range(3):
        outcome = simulate(config, LONG, steps=30, seed=seed, spread=0.25, loss=0.02, ticket_seconds=12.0)
        assert (outcome.stuck, outcome.lost_though_awaited) == ("", [])
        assert outcome.distance <= 0.03


def test_a_bound_that_is_too_short_loses_them_again() -> None:
    config = BatcherConfig(8192, step_groups=8, max_age=1, slow="wait", slow_wait_seconds=1.0)
    outcome = simulate(config, LONG, steps=60, seed=1, spread=0.25)
    assert outcome.lost
    assert outcome.lost_though_awaited == []
