import numpy as np
import pytest

from rlbuffer.advantages import ESTIMATORS, advantage
from rlbuffer.errors import ConfigError, InvalidRollout


@pytest.mark.parametrize(
    ("name", "rewards", "lengths", "expected"),
    [
        ("dr_grpo", [1, 0.5, 0.8], None, [0.23333, -0.26667, 0.03333]),
        ("rloo", [1, 0.5, 0.8], None, [0.35, -0.4, 0.05]),
        ("grpo", [1, 0.5, 0.8], None, [0.92717, -1.05962, 0.13245]),
        ("rloo", [0, 0.5, 1], None, [-0.75, 0, 0.75]),
        ("opo", [1, 0], [10, 30], [0.75, -0.25]),
        ("opo", [1, 0], [0, 0], [0.5, -0.5]),
        ("max_rl", [1, 0, 0, 0], None, [3, -1, -1, -1]),
        ("max_rl", [-1, 0], None, [0, 0]),
        ("max_rl", [1, -1], None, [0, 0]),
        ("reinforce", [1, 0.5], None, [1, 0.5]),
        ("grpo", [0.5, 0.5], None, [0, 0]),
    ],
)
def test_estimators_give_the_published_numbers(name, rewards, lengths, expected):
    np.testing.assert_allclose(advantage(name, rewards, lengths=lengths), expected, atol=1e-5)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_group_of_one_gets_zero(name):
    assert advantage(name, [0.7], lengths=[5]).tolist() == [0.0]


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_rewards_given_are_left_as_they_were(name):
    rewards = np.array([1.0, 0.0, 0.5])
    got = advantage(name, rewards, lengths=[1, 2, 3])
    got += 1
    assert rewards.tolist() == [1.0, 0.0, 0.5]


def test_an_unknown_name_is_refused_with_the_nearest_one():
    with pytest.raises(ConfigError) as error:
        advantage("rlooo", [1.0, 0.0])
    assert str(error.value) == (
        "advantage 'rlooo' is not an estimator: rloo, grpo, dr_grpo, max_rl, opo, reinforce. Did you mean rloo?"
    )


def test_rewards_that_are_not_finite_are_refused():
    with pytest.raises(InvalidRollout, match=r"advantage rloo: rewards must be finite numbers of shape \[n\]"):
        advantage("rloo", [1.0, float("nan")])


def test_lengths_must_match_and_opo_needs_them():
    with pytest.raises(InvalidRollout, match="2 lengths do not match 3 rewards"):
        advantage("rloo", [1, 0, 1], lengths=[1, 2])
    with pytest.raises(InvalidRollout, match="advantage opo: lengths are required"):
        advantage("opo", [1, 0])
