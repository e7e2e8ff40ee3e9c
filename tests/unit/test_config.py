"""Refusals of the batcher's settings: everything that can never make a batch, by the name of the setting."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgpack
import pytest

from rlbuffer.config.batcher import AdapterConfig, BatcherConfig, EnvConfig, EnvSettings
from rlbuffer.config.fractions import budgets_at
from rlbuffer.errors import ConfigError

AT_LEAST_ONE = (
    "row_tokens",
    "micro_batches_per_rank",
    "rows_per_micro_batch",
    "min_group_size",
    "max_uses",
    "step_rollouts",
)
SECONDS = (
    *("group_timeout_seconds", "spill_after_seconds", "env_dead_after_seconds", "max_age_seconds"),
    "fill_timeout_seconds",
)


def config(**settings: Any) -> BatcherConfig:
    return BatcherConfig(**({"row_tokens": 100} | settings))


@pytest.mark.parametrize(
    ("setting", "values"),
    [
        *((name, (0, -1, True, "x", 2**60)) for name in AT_LEAST_ONE),
        *((name, (-1, 0.5, 2**60)) for name in ("lookahead", "max_age", "step_groups")),
        *((name, (-0.01, 1.01, float("nan"))) for name in ("close_fill", "replay_fraction")),
        *((name, (0.0, float("inf"), float("nan"), 1e308)) for name in SECONDS),
        *((name, ("none of these",)) for name in ("spillover", "oversized", "on_dead_env", "truncated", "unit")),
        ("cost", ((0, 0), 1)),
        ("cost.1", ((1, -1), (1,), (1, 10**20))),
        ("budgets", ({"a": 0.7, "b": 0.4}, {"a": [[1, 0.2], [100, 0.8]], "b": 0.3}, 0.5)),
        ("budgets.a b", ({"a b": 0.5},)),
        *(
            ("budgets.a", ({"a": value},))
            for value in (0.0, 1.01, "half", True, [], [1, 0.5], [[1, 0.5, 2]], [[1.5, 0.5]], [["a", 0.5]], [[0, 0.5]])
        ),
        *(("budgets.a", ({"a": value},)) for value in ([[9, 0.5], [9, 0.6]], [[1, 1.5]], [[1, 0], [9, 0]])),
        ("flat", ("some", 1.01, -0.1, float("nan"), [])),
        ("remainder", ("a b", "")),
        ("order", ("random",)),
        ("advantage", ("gae", "my_package.adv", "my package:f", ":f", "a:b:c", "1a:f")),
        ("envs.a b", ({"a b": EnvConfig()},)),
        ("envs.a.max_age", ({"a": {"max_age": -1}},)),
        ("envs.a.max_age_seconds", ({"a": {"max_age_seconds": 0.0}},)),
        ("envs.a.min_group_size", ({"a": {"min_group_size": 0}},)),
        ("envs.a.advantage", ({"a": {"advantage": "gae"}},)),
        ("adapters.x.batch_size", ({"x": {"batch_size": "many"}}, {"x": {"batch_size": 0}})),
        ("adapters", ({"": AdapterConfig(batch_size=8)},)),
        (f"adapters.{'x' * 129}", ({"x" * 129: AdapterConfig(batch_size=8)},)),
    ],
)
def test_a_setting_that_can_never_make_a_batch_is_refused_by_name(setting: str, values: tuple[Any, ...]) -> None:
    for value in values:
        with pytest.raises(ConfigError) as caught:
            config(**{setting.partition(".")[0]: value})
        assert caught.value.setting == f"batcher.{setting}"


@pytest.mark.parametrize(
    ("settings", "setting"),
    [
        ({"step_rollouts": 8, "step_groups": 2}, "step_groups"),
        ({"advantage": "grpo", "advantage_scale": "batch"}, "advantage_scale"),
        ({"envs": {"a": EnvConfig(advantage="grpo")}, "advantage_scale": "batch"}, "advantage_scale"),
    ],
)
def test_settings_that_exclude_each_other_are_refused(settings: dict[str, Any], setting: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**settings)
    assert caught.value.setting == f"batcher.{setting}"


@pytest.mark.parametrize(
    "settings",
    [
        dict.fromkeys(AT_LEAST_ONE, 1),
        {"max_uses": 4},
        {"step_groups": 1},
        {"step_groups": 0, "step_rollouts": 8},
        {"lookahead": 0, "max_age": 0},
        {"close_fill": 0.0, "replay_fraction": 1.0},
        {"close_fill": 1.0, "replay_fraction": 0.0},
        {"cost": (0, 1)},
        {"budgets": {"a": 0.1, "b": 0.2, "c": 0.7}},
        {"budgets": {"a": 1.0}, "remainder": "a"},
        {"envs": {"a": EnvConfig(max_age=0, min_group_size=1)}},
        {"flat": 0.0},
        {"flat": 1.0},
        {"order": "mine.selectors:hardest"},
        {"budgets": {"a": ((1, 1.0), (2, 0.0)), "b": ((1, 0.0), (2, 1.0))}},
    ],
)
def test_a_setting_at_its_limit_is_taken(settings: dict[str, Any]) -> None:
    made = config(**settings)
    assert all(getattr(made, name) == value for name, value in settings.items())


@pytest.mark.parametrize(("env", "max_age", "least"), [("a", 0, 2), ("b", 3, 1), ("c", 3, 2)])
def test_an_env_has_its_override_or_the_batchers_own_value(env: str, max_age: int, least: int) -> None:
    made = config(max_age=3, min_group_size=2, envs={"a": EnvConfig(max_age=0), "b": EnvConfig(min_group_size=1)})
    assert made.for_env(env).max_age == max_age
    assert made.for_env(env).min_group_size == least


def test_settings_survive_the_record_that_the_run_keeps_of_them() -> None:
    made = config(
        budgets={"a": 0.5, "b": [[3, 0.5], [9, 0.1]]},
        flat=0.25,
        envs={"a": EnvConfig(max_age=2)},
        cost=(3, 1),
        max_age_seconds=60.0,
    )
    assert BatcherConfig(**msgpack.unpackb(msgpack.packb(made.as_dict()))) == made


@pytest.mark.parametrize("settings", [{"step_rollouts": 8}, {"step_groups": 0}, {}, {"step_groups": 7}])
def test_the_size_of_a_step_survives_the_record_too(settings: dict[str, int]) -> None:
    made = config(**settings)
    assert BatcherConfig(**made.as_dict()) == made
    assert dataclasses.replace(made, max_age=9).step_groups == made.step_groups


def test_a_run_of_an_older_checkout_that_closed_by_capacity_does_so_still() -> None:
    assert config(step_groups=None) == config(step_groups=0)


@pytest.mark.parametrize(("step", "fraction"), [(1, 0.2), (10, 0.2), (11, 0.25), (14, 0.4), (20, 0.1), (99, 0.1)])
def test_a_scheduled_budget_is_linear_between_its_points_and_constant_outside(step: int, fraction: float) -> None:
    made = config(budgets={"a": [[10, 0.2], [14, 0.4], [20, 0.1]], "b": 0.3})
    assert budgets_at(made.budgets, step) == {"a": pytest.approx(fraction), "b": 0.3}


def test_what_an_env_may_override_is_decided_for_every_env() -> None:
    made = config(max_age_seconds=9.0, advantage="grpo", envs={"a": EnvConfig(max_age_seconds=1.0)})
    names = [f.name for f in dataclasses.fields(EnvSettings)]
    assert names == [f.name for f in dataclasses.fields(EnvConfig)]
    assert made.for_env("a") == dataclasses.replace(made.for_env("b"), max_age_seconds=1.0)
    assert made.for_env("a") is made.for_env("a")
    assert [getattr(made.for_env("b"), name) for name in names] == [getattr(made, name) for name in names]
    assert config(**made.as_dict()) == made  # what was decided is no setting
