import sys
from types import ModuleType

import numpy as np
import pytest
from batcher_calls import ask, batcher, drops_of, pending_tokens, put

from rlbuffer.batcher.advantages import BY_ROWS, ESTIMATORS, POSITIVE, advantage
from rlbuffer.config.batcher import EnvConfig, compares
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
        ("max_rl", [0, 0], None, [0, 0]),
        ("max_rl", [1, -1e-9], None, [1, -1]),
        ("reinforce", [1, 0.5], None, [1, 0.5]),
        ("grpo", [0.5, 0.5], None, [0, 0]),
        # Lengths 10 and 30 of the right ones are one deviation from their mean: they keep 0.973 and 0.927 of their 1.
        ("length_penalty", [1, 1, 0], [10, 30, 20], [0.50966, 0.44034, -0.95]),
        ("length_penalty", [1, 1], [7, 7], [0, 0]),
        ("length_penalty", [1, 0], [90, 1], [0.95, -0.95]),
        ("length_penalty", [0, 0], [1, 9], [0, 0]),
        ("length_penalty", [0, -1], [1, 9], [1, -1]),
    ],
)
def test_estimators_give_the_published_numbers(name, rewards, lengths, expected):
    np.testing.assert_allclose(advantage(name, rewards, lengths=lengths), expected, atol=1e-5)


@pytest.mark.parametrize("name", sorted(BY_ROWS))
def test_groups_that_are_looked_at_together_get_what_each_gets_alone_to_the_bit(name):
    rng = np.random.default_rng(0)
    for size in (2, 7, 8, 9, 16, 131):
        rewards = np.vstack([rng.normal(size=(5, size)), rng.integers(0, 2, (5, size)) / 3, np.zeros((1, size))])
        rewards = np.abs(rewards) if name in POSITIVE else rewards
        alone = np.stack([advantage(name, its) for its in rewards])
        with np.errstate(all="ignore"):
            assert ESTIMATORS[name](rewards, None).tobytes() == alone.tobytes(), size


ALONE = {"rloo": 0.0, "grpo": 0.0, "dr_grpo": 0.0, "max_rl": 0.0, "opo": 0.0, "length_penalty": 0.0, "reinforce": 1.0}
"""What a rollout that is alone in its group has of its reward."""


@pytest.mark.parametrize("reward", [0.7, -1.0, 0.0, 1e12])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_group_of_one_gets_its_reward_where_nothing_is_compared_and_else_zero(name, reward):
    assert advantage(name, [reward], lengths=[5]).tolist() == [ALONE[name] * reward]
    assert compares(name) == (ALONE[name] == 0.0)


@pytest.mark.parametrize("where", ["everywhere", "of the env"])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_step_of_groups_of_one_has_the_same_advantages(name, where):
    rewards = [0.7, 0.0, 2.0, 0.5]
    settings = {"advantage": name} if where == "everywhere" else {"envs": {"a": EnvConfig(advantage=name)}}
    made = batcher(step_groups=4, **settings)
    for i, reward in enumerate(rewards):
        put(made, f"g{i}", env="a", rewards=(reward,), lengths=(25,))
    step = ask(made).plan
    assert step.advantages.tolist() == pytest.approx([ALONE[name] * reward for reward in rewards])
    assert step.flat == (4 if compares(name) else 1)


def test_no_reward_of_one_alone_is_no_advantage():
    assert advantage("reinforce", []).tolist() == []
    with pytest.raises(InvalidRollout):
        advantage("reinforce", [float("nan")])


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_rewards_given_are_left_as_they_were(name):
    rewards = np.array([1.0, 0.0, 0.5])
    got = advantage(name, rewards, lengths=[1, 2, 3])
    got += 1
    assert rewards.tolist() == [1.0, 0.0, 0.5]


def test_an_unknown_name_is_refused_with_the_nearest_one():
    with pytest.raises(ConfigError):
        advantage("rlooo", [1.0, 0.0])


@pytest.fixture
def mine(monkeypatch):
    module = ModuleType("estimators_of_a_test")
    monkeypatch.setitem(sys.modules, "estimators_of_a_test", module)
    return module


def test_an_estimator_of_ones_own_is_told_of_the_group_and_may_spoil_what_it_gets(mine):
    seen = []

    def estimator(rewards, lengths, group):
        seen.append((rewards.dtype, lengths.tolist(), group))
        answer = rewards - lengths / 10
        rewards[:] = 0
        lengths[:] = 0
        return answer.tolist()

    mine.estimator = estimator
    made = batcher(step_groups=1, advantage="estimators_of_a_test:estimator", envs={"b": EnvConfig(advantage="rloo")})
    put(made, "g1", lengths=(20, 30), rewards=[1.0, 0.0], adapter="x")
    plan = ask(made).plan
    again = ask(made).plan
    loss_tokens = [ref.loss_tokens for ref in plan.rollouts]
    expected = np.array([1.0, 0.0]) - np.array(loss_tokens) / 10
    assert plan.advantages.tolist() == again.advantages.tolist() == expected.astype(np.float32).tolist()
    assert seen[0][:2] == (np.float64, [float(n) for n in loss_tokens])
    told = {name: seen[0][2][name] for name in ("group_id", "env", "prompt_id", "adapter", "rollout_ids", "lengths")}
    assert told == {
        "group_id": "g1",
        "env": "a",
        "prompt_id": "prompt-0",
        "adapter": "x",
        "rollout_ids": ("g1/0", "g1/1"),
        "lengths": (20, 30),
    }
    assert sorted(seen[0][2].keys() - told.keys()) == [
        "is_truncated",
        "max_policy_versions",
        "min_policy_versions",
        "prompt_tokens",
        "rewards",
    ]


def test_a_class_is_an_estimator(mine):
    class Halved:
        def __call__(self, rewards, lengths, group):
            return rewards / 2

    mine.Halved = Halved
    assert advantage("estimators_of_a_test:Halved", [1.0, 3.0]).tolist() == [0.5, 1.5]


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        (lambda r, n, g: r - 0.25, 0.75),
        (lambda r, n, g: r - np.median(r), 0.0),
        (lambda r, n, g: (r - r.mean()) / np.sqrt(((r - r.mean()) ** 2).mean()), 0.0),  # 0 / 0
        (lambda r, n, g: [x - (sum(r) - x) / 0 for x in r.tolist()], 0.0),
    ],
    ids=["a baseline of its own", "the group's", "nan", "fails"],
)
def test_an_estimator_of_ones_own_is_asked_about_a_group_of_one_and_zero_where_it_has_no_number(mine, own, expected):
    mine.own = own
    assert advantage("estimators_of_a_test:own", [1.0]).tolist() == [expected]
    made = batcher(step_groups=1, advantage="estimators_of_a_test:own")
    put(made, "g", env="a", rewards=(1.0,), lengths=(25,))
    step = ask(made).plan
    assert (step.advantages.tolist(), step.flat) == ([expected], int(expected == 0))


@pytest.mark.parametrize(
    "answer",
    [
        lambda r, n, g: r[1:],
        lambda r, n, g: 1.0,
        lambda r, n, g: g["score"],
        lambda r, n: r,
        lambda r, n, g: sys.exit(3),
        lambda r, n, g: ["a"] * 4,
        lambda r, n, g: None,
    ],
)
def test_an_estimator_whose_answer_cannot_be_used_is_named_with_env_and_group(mine, answer):
    mine.answer = answer
    made = batcher(step_groups=1, envs={"a": EnvConfig(advantage="estimators_of_a_test:answer")})
    put(made, "g")
    with pytest.raises(ConfigError, match="for group g of env a") as error:
        ask(made)
    assert error.value.setting == "batcher.envs.a.advantage"
    assert f"({__file__}:" in str(error.value)
    assert pending_tokens(made, "a") == 100  # nothing is dropped because of it


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        (lambda r, n, g: r / 0 * 0, "nan"),
        (lambda r, n, g: r + float("inf"), "inf"),
        (lambda r, n, g: r - 1e39, "-1e+39"),
        (lambda r, n, g: [10**300, 0, 0, 0], "1e+300"),
    ],
)
def test_a_group_whose_advantages_cannot_be_trained_is_dropped_and_others_take_its_place(mine, answer, number):
    asked = []

    def given(rewards, lengths, group):
        asked.append(group["group_id"])
        return answer(rewards, lengths, group) if group["group_id"] == "bad" else rewards

    mine.answer = given
    made = batcher(step_groups=2, advantage="estimators_of_a_test:answer")
    for name in ("good", "bad", "better"):
        put(made, name)
    decision = ask(made)
    assert asked.count("bad") == 1
    assert {*asked} == {"bad", "better", "good"}
    assert decision.plan.group_ids == ("good", "better")
    ((name, reason, detail, *_),) = drops_of(decision)
    assert (name, reason) == ("bad", "invalid")
    assert f"estimators_of_a_test:answer is {number}" in detail


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e9])
@pytest.mark.parametrize("rewards", [(1.0, -0.99), (1.0, np.nextafter(-1.0, 0.0)), (-1.0, 0.0), (-1.0, -2.0)])
def test_an_estimator_that_divides_by_the_mean_refuses_negative_rewards_by_name(rewards, scale):
    made = batcher(step_groups=1, advantage="max_rl")
    given = [reward * scale for reward in rewards]
    put(made, "bad", lengths=(25,) * 2, rewards=given)
    put(made, "good", lengths=(25,) * 2, rewards=[scale, 0.0])
    decision = ask(made)
    assert decision.plan.group_ids == ("good",)
    assert [drop[:2] for drop in drops_of(decision)] == [("bad", "invalid")]
    assert "max_rl" in drops_of(decision)[0][2]
    with pytest.raises(InvalidRollout):
        advantage("max_rl", given)


@pytest.mark.parametrize("scale", [1e-12, 1e-6, 1e-3, 1e3, 1e6, 1e11])
@pytest.mark.parametrize("name", [*ESTIMATORS])
def test_the_size_of_the_rewards_decides_nothing(name, scale):
    lengths = [10, 30, 20, 40]
    for rewards in ([1.0, 0.0, 0.5, 0.25], [1.0, 0.999, 1.0, 0.999], [1.0, 1.0, 1.0 - 1e-7, 1.0]):
        found = advantage(name, np.array(rewards) * scale, lengths=lengths)
        unit = 1.0 if name in ("grpo", "max_rl") else scale
        np.testing.assert_allclose(found / unit, advantage(name, rewards, lengths=lengths), rtol=3e-3, atol=1e-12)


def test_rewards_that_differ_by_rounding_have_no_advantage_under_a_deviation_of_their_own():
    noise = np.array([0.0, 1.0, -1.0, 0.5]) * 1e-8
    for size in (1e-9, 1.0, 1e9):
        assert advantage("grpo", size * (1 + noise)).tolist() == [0.0] * 4


def test_a_reward_that_is_a_rounded_0_is_no_right_answer():
    right = advantage("length_penalty", [1.0, 1.0, 0.0], lengths=[10, 30, 90])
    np.testing.assert_allclose(advantage("length_penalty", [1.0, 1.0, 1e-16], lengths=[10, 30, 90]), right)


@pytest.mark.parametrize("name", [*ESTIMATORS])
def test_rewards_at_the_limit_have_advantages_that_can_be_trained(name):
    low = 0.0 if name in POSITIVE else -1e12
    found = advantage(name, [1e12, low, 1e12], lengths=[1, 2**26, 3])
    assert np.isfinite(found.astype(np.float32)).all()


@pytest.mark.parametrize("path", ["no_such_package_at_all:f", "math:no_such_name", "math:pi"])
def test_an_estimator_that_cannot_be_had_is_refused_when_the_batcher_starts(path):
    with pytest.raises(ConfigError):
        batcher(advantage=path)
