"""Reward functions: each alone, several with weights, and what a length does to their sum."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from rlbuffer.errors import ConfigError, RewardFailed
from rlbuffer.worker.envs import Prompt, Score
from rlbuffer.worker.envs.rewards import Answered, Length, Rewards, exact_match, make_rewards, regex_match


def answered(text: str, *, answer: Any = "42", tokens: int = 4, **metadata: Any) -> Answered:
    return Answered(
        prompt=Prompt(prompt_id="p", tokens=np.array([1], np.int32), answer=answer, metadata=metadata),
        tokens=np.zeros(tokens, np.int32),
        finish_reason="stop",
        render=lambda _: text,
    )


def raising(_: Answered) -> float:
    raise KeyError("verdict")


def half(_: Answered) -> float:
    return 0.5


@pytest.mark.parametrize(
    ("text", "options", "reward"),
    [
        ("42", {}, 1.0),
        (" 42\n", {}, 1.0),
        (" 42", {"strip": False}, 0.0),
        ("4 2", {}, 0.0),
        ("", {}, 0.0),
        ("420", {}, 0.0),
    ],
)
def test_exact_match_compares_with_the_answer(text: str, options: dict[str, Any], reward: float) -> None:
    assert exact_match(**options)(answered(text)) == reward


def test_exact_match_may_ignore_case_and_compares_what_is_no_text_as_text() -> None:
    assert exact_match(ignore_case=True)(answered("PARIS", answer="Paris")) == 1.0
    assert exact_match()(answered("PARIS", answer="Paris")) == 0.0
    assert exact_match()(answered("7", answer=7)) == 1.0


@pytest.mark.parametrize("compare", [exact_match(), regex_match(r".+", compare=True)])
@pytest.mark.parametrize("answer", [None, ["None"], {"a": 1}])
def test_nothing_is_ever_compared_with_an_answer_that_is_not_there(compare: Any, answer: Any) -> None:
    with pytest.raises(RewardFailed, match="answer"):
        Rewards({"right": (compare, 1.0)}).score(answered(str(answer), answer=answer))


@pytest.mark.parametrize(
    ("pattern", "options", "text", "reward"),
    [
        (r"\d+", {}, "it is 7", 1.0),
        (r"\d+", {}, "seven", 0.0),
        (r"a.b", {}, "a\nb", 1.0),
        (r"\d+", {"compare": True}, "6 * 7 = 42", 1.0),
        (r"\d+", {"compare": True, "last": False}, "6 * 7 = 42", 0.0),
        (r"<a>(.*?)</a>", {"compare": True}, "<a> 42 </a>", 1.0),
        (r"<(a|b)>(?P<answer>.*?)<", {"compare": True}, "<b>42<", 1.0),
        (r"<(a|b)>(.*?)<", {"compare": True}, "<b>42<", 0.0),
        (r"<a>(x)?", {"compare": True}, "<a>", 0.0),
    ],
)
def test_regex_match_finds_and_compares(pattern: str, options: dict[str, Any], text: str, reward: float) -> None:
    assert regex_match(pattern, **options)(answered(text)) == reward


def test_rewards_are_summed_by_weight_and_kept_by_name() -> None:
    rewards = Rewards({"right": (exact_match(), 1.0), "half": (half, -0.5), "seen": (half, 0.0)}, success="right")
    assert rewards.score(answered("42")) == Score(
        reward=0.75, rewards={"right": 1.0, "half": 0.5, "seen": 0.5}, successes={"right": True}
    )
    assert rewards.score(answered("41")).successes == {"right": False}


@pytest.mark.parametrize(
    ("form", "lengths", "rewards"),
    [
        ("exact", (0, 8, 10, 11, 20), (0.9, 0.98, 1.0, 0.99, 0.9)),
        ("max", (0, 9, 10, 11, 59, 60, 61), (0.6, 0.51, 0.5, 0.49, 0.01, 0.0, 0.0)),
        ("clip", (0, 9, 10, 11, 20), (1.0, 1.0, 1.0, 0.0, 0.0)),
    ],
)
def test_a_length_shapes_the_reward_by_its_formula(
    form: Any, lengths: tuple[int, ...], rewards: tuple[float, ...]
) -> None:
    length = Length(form=form, target=10, coefficient=0.01)
    assert [length.applied(1.0, n) for n in lengths] == pytest.approx(rewards)


def test_a_wrong_answer_gains_nothing_by_its_length_where_the_form_multiplies() -> None:
    assert Length(form="max", target=10).applied(0.0, 1) == Length(form="clip", target=10).applied(0.0, 1) == 0.0
    assert Length(form="exact", target=10, coefficient=0.01).applied(0.0, 20) == pytest.approx(-0.1)


def test_what_the_length_changed_is_a_reward_of_its_own_name_and_a_prompt_may_name_its_target() -> None:
    rewards = Rewards({"right": (exact_match(), 2.0)}, length=Length(form="exact", target=4, coefficient=0.25))
    assert rewards.score(answered("42", tokens=6)) == Score(reward=1.5, rewards={"right": 1.0, "length": -0.5})
    assert rewards.score(answered("42", tokens=6, target_length=6)).reward == 2.0


def test_an_exception_costs_the_rollout_unless_it_is_to_count_as_zero() -> None:
    functions = {"right": (exact_match(), 1.0), "judge": (raising, 1.0)}
    with pytest.raises(RewardFailed, match=r"^reward judge: KeyError: 'verdict'$"):
        Rewards(functions).score(answered("42"))
    assert Rewards(functions, on_error="zero").score(answered("42")) == Score(
        reward=1.0,
        rewards={"right": 1.0, "judge": 0.0},
        metadata={"reward_errors": {"judge": "KeyError: 'verdict'"}},
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, "much", None])
def test_a_value_that_is_no_finite_number_is_an_exception(value: Any) -> None:
    with pytest.raises(RewardFailed, match="reward odd: "):
        Rewards({"odd": (lambda _: value, 1.0)}).score(answered("42"))


async def judge(_: Answered) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "rewards: at least one function is needed"),
        ({"exactly": 1.0}, "reward exactly: kind = 'exactly' must be one of exact, regex, "),
        ({"exact": "much"}, "reward exact: weight = 'much' is not a number"),
        ({"exact": math.inf}, "reward exact: weight inf is not finite"),
        ({"exact": {"stripp": True}}, "env_options.rewards.exact.stripp is not a setting. Did you mean strip?"),
        ({"exact": {"strip": "perhaps"}}, "env_options.rewards.exact.strip = 'perhaps': "),
        ({"regex": 1.0}, "env_options.rewards.regex.pattern is required"),
        ({"regex": {"pattern": "("}}, "reward pattern '(' is not a regular expression: missing ), "),
        ({"mine": {"kind": f"{__name__}:nobody"}}, "reward mine: cannot be imported: "),
        ({"mine": {"kind": f"{__name__}:half", "x": 1}}, f"reward mine: kind = '{__name__}:half' must be "),
        ({"mine": {"kind": f"{__name__}:judge"}}, "reward mine: a coroutine; "),
    ],
)
def test_rewards_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        make_rewards(options)
    assert str(error.value).startswith(message)


def test_settings_name_kinds_weights_and_functions_of_the_users_own() -> None:
    rewards = make_rewards(
        {
            "exact": 1.0,
            "tagged": {"kind": "regex", "pattern": "<b>", "weight": 0.25},
            "mine": {"kind": f"{__name__}:half"},
        }
    )
    score = rewards.score(answered("<b>42"))
    assert (score.reward, score.rewards) == (0.75, {"exact": 0.0, "tagged": 1.0, "mine": 0.5})
    assert score.successes == {"exact": False}
