"""What a trainer remembers for a server that may forget it."""

from __future__ import annotations

import pytest

from rlbuffer.client.progress import (
    HANDED_BACK_GROUPS,
    HANDED_BACK_STEPS,
    MOST_HANDED_BACK_STEPS,
    TrainedSteps,
)
from rlbuffer.store.records import TrainedStep


def trained(step: int, groups: int) -> TrainedStep:
    names = tuple(f"a.{step}.{n}" for n in range(groups))
    return TrainedStep(step=step, digest=f"d{step}", group_ids=names, envs={"a": (groups, 10 * groups)})


@pytest.mark.parametrize(
    ("groups", "kept"),
    [
        (1, MOST_HANDED_BACK_STEPS),
        (64, HANDED_BACK_GROUPS // 64),
        (65, HANDED_BACK_GROUPS // 65),
        (5000, HANDED_BACK_STEPS),
    ],
)
def test_many_small_steps_are_remembered_and_few_large_ones(groups: int, kept: int) -> None:
    place = TrainedSteps()
    for number in range(1, 301):
        place = place.after(trained(number, groups))
        assert [step.step for step in place.steps] == list(range(number - len(place.steps) + 1, number + 1))
        assert len(place.steps) == min(number, kept)
    assert (place.step, place.digest) == (300, "d300")


def test_a_step_that_is_trained_again_takes_the_place_of_itself_and_of_what_came_after() -> None:
    place = TrainedSteps()
    for number in (1, 2, 3, 2):
        place = place.after(trained(number, 2))
    assert [step.step for step in place.steps] == [1, 2]
