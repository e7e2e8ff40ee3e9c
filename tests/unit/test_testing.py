from __future__ import annotations

import pytest

from rlbuffer.testing import FakeClock, make_group


def test_a_made_group_is_the_same_for_the_same_arguments_and_another_for_every_seed() -> None:
    assert make_group(seed=1) == make_group(seed=1)
    assert make_group(seed=1).group_id != make_group(seed=2).group_id
    assert make_group(seed=1).rollouts[0] != make_group(seed=2).rollouts[0]


def test_a_made_group_has_the_rewards_lengths_and_version_asked_for() -> None:
    group = make_group(env="math", rewards=[0.0, None, 2.0], lengths=[1, 2, 40], version=6, planned_size=5)
    assert group.planned_size == 5
    assert [r.reward for r in group.rollouts] == [0.0, None, 2.0]
    assert [(r.length, r.prompt_tokens, r.loss_tokens) for r in group.rollouts] == [(1, 1, 0), (2, 1, 1), (40, 10, 30)]
    assert {r.min_policy_version for r in group.rollouts} == {r.max_policy_version for r in group.rollouts} == {6}


def test_a_made_group_of_two_or_more_has_variance_in_reward() -> None:
    assert {r.reward for r in make_group(size=2).rollouts} == {0.0, 1.0}


def test_unequal_sequences_are_refused() -> None:
    with pytest.raises(ValueError, match="longer"):
        make_group(rewards=[0.0, 1.0], lengths=[8])


def test_a_fake_clock_moves_only_forward_and_only_when_told() -> None:
    clock = FakeClock(now=1.0)
    assert (clock(), clock.now) == (1.0, 1.0)
    clock.advance(0.5)
    assert clock() == 1.5
    with pytest.raises(ValueError, match="a clock cannot go back by 1 s"):
        clock.advance(-1)
