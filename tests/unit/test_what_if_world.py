"""The world of what-if: when a run counts as one that makes no further step, and what it says of how far it is."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

import rlbuffer
from rlbuffer.errors import ConfigError
from rlbuffer.records.info import GroupInfo
from rlbuffer.testing import make_group
from rlbuffer.what_if import world
from rlbuffer.what_if.world import World
from rlbuffer.wire.payload import encode_push

STEP_GROUPS, STEPS = 60, 3
INFO = encode_push(make_group(env="a", size=1, lengths=[8], rewards=[1.0])).info


def task(env: str, number: int, version: int) -> tuple[float, GroupInfo]:
    """A group of one rollout that is there at once."""
    rollouts = tuple(
        rollout.changed(min_version=version, max_version=version, rollout_id=f"{env}.{number}/{place}")
        for place, rollout in enumerate(INFO.rollouts)
    )
    return 0.001, replace(INFO, group_id=f"{env}.{number}", prompt_id=str(number), rollouts=rollouts)


def made(**batcher: Any) -> World:
    """Steps of many short groups, which take long to train."""
    config = rlbuffer.BatcherConfig(64, **{"step_groups": STEP_GROUPS, "max_age": 4, "flat": "keep", **batcher})
    return World(
        config,
        task,
        ["a"] * 8,
        train_seconds=500.0,
        turn_seconds=0.02,
        world_size=1,
        steps=STEPS,
        step_groups=STEP_GROUPS,
        seed=0,
        needs_advantage=False,
    )


def test_a_step_that_is_made_is_a_step_further_however_many_groups_the_next_one_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(world, "PATIENCE", 0.9)  # of a step's groups, that bring nothing
    outcome = made().run()
    assert outcome.dropped == 0.0


def test_a_run_that_makes_no_step_ends_after_so_many_steps_worth_of_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "PATIENCE", 5)
    monkeypatch.setattr(world, "LEAST_GROUPS", 0)
    run, told = made(min_group_size=2), list[tuple[int, int]]()
    with pytest.raises(ConfigError, match=r"step 1 is never made.* small"):
        run.run(lambda steps, groups: told.append((steps, groups)))
    steps, groups = told[-1]
    assert steps == 0
    assert world.PATIENCE * STEP_GROUPS - world.TOLD_GROUPS <= groups <= world.PATIENCE * STEP_GROUPS + 1


def test_a_run_says_how_far_it_is_with_each_step_and_within_one() -> None:
    told = list[tuple[int, int]]()
    made().run(lambda steps, groups: told.append((steps, groups)))
    assert [steps for steps, _ in told] == sorted(steps for steps, _ in told)
    assert {steps for steps, _ in told} == {*range(STEPS + 1)}
    assert max(later - earlier for (_, earlier), (_, later) in pairwise(told)) <= world.TOLD_GROUPS
