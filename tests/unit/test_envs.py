"""The built-in envs: fixed prompts, dense rewards; and how an env is found by name."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlbuffer.errors import ConfigError
from rlbuffer.state.vocabulary import END, SYMBOLS, VOCAB_SIZE, encode, positions_right, render
from rlbuffer.worker.envs import BUILT_IN, Prompt, Score, make_env
from rlbuffer.worker.envs.digits import VCopy


class Constant:
    """A user's env, made by a factory named on the command line."""

    name = "constant"
    vocab_size = 3
    eos_token_ids = (2,)
    max_new_tokens = 1

    def __init__(self, *, token: int = 0) -> None:
        self.token = token

    def prompt(self, number: int) -> Prompt:
        return Prompt(prompt_id=str(number), tokens=np.array([self.token], np.int32))

    def score(self, prompt: Prompt, tokens: np.ndarray, *, finish_reason: str) -> Score:
        return Score(reward=1.0)

    def render(self, tokens: np.ndarray) -> str:
        return " ".join(map(str, tokens))


class Nameless(Constant):
    name = "has spaces"


@pytest.mark.parametrize("name", BUILT_IN)
def test_prompts_are_the_same_in_every_process_and_differ_by_number_and_seed(name: str) -> None:
    one, other, reseeded = make_env(name), make_env(name), make_env(name, seed=1)
    numbers = range(50)
    texts = [one.prompt(n).prompt_id for n in numbers]
    assert texts == [other.prompt(n).prompt_id for n in reversed(numbers)][::-1]
    assert len(set(texts)) > 10
    assert texts != [reseeded.prompt(n).prompt_id for n in numbers]


def test_the_first_prompts_never_change_between_releases() -> None:
    assert [make_env("vcopy").prompt(n).prompt_id for n in range(6)] == [
        "6523=",
        "895_=",
        "0242=",
        "898_=",
        "84__=",
        "385_=",
    ]
    assert [make_env("repeat").prompt(n).prompt_id for n in range(6)] == ["65=", "83=", "05=", "83=", "83=", "34="]


@pytest.mark.parametrize("name", ["vcopy", "repeat"])
def test_every_answer_fits_and_earns_exactly_one(name: str) -> None:
    env = make_env(name)
    for number in range(200):
        prompt = env.prompt(number)
        assert prompt.tokens.dtype == np.int32
        assert 0 <= prompt.tokens.min() <= prompt.tokens.max() < env.vocab_size == VOCAB_SIZE
        completion = encode(prompt.answer + "$")
        assert len(completion) < env.max_new_tokens
        score = env.score(prompt, completion, finish_reason="stop")
        assert score.reward == 1.0
        assert score.successes == {"exact": True}


@pytest.mark.parametrize(
    ("target", "answer", "reward"),
    [
        ("12$", "12$", 1.0),
        ("12$", "13$", 2 / 3),
        ("12$", "12", 2 / 3),
        ("12$", "12_", 2 / 3),
        ("12$", "123$", 2 / 4),
        ("12$", "$", 0.0),
        ("12$", "1$", 1 / 3),
        ("1$", "1$", 1.0),
        ("1$", "234567", 0.0),
    ],
)
def test_reward_is_the_share_of_positions_right_over_the_longer(target: str, answer: str, reward: float) -> None:
    assert positions_right(encode(target), encode(answer)) == pytest.approx(reward)


def test_rendering_writes_foreign_ids_as_question_marks() -> None:
    assert render(range(len(SYMBOLS))) == SYMBOLS
    assert render([END, len(SYMBOLS), -1]) == "$??"


def test_one_kind_of_env_can_serve_under_two_names() -> None:
    assert make_env("vcopy", name="vcopy-eval").name == "vcopy-eval"


def test_an_env_made_from_a_built_in_one_keeps_its_name_unless_it_says_another() -> None:
    class Mine(VCopy):
        pass

    assert (Mine().name, Mine(name="other").name) == ("vcopy", "other")


def test_a_factory_of_the_users_own_gets_the_options() -> None:
    env = make_env(f"{__name__}:Constant", token=7)
    assert env.prompt(0).tokens.tolist() == [7]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vcop", {}),
        ("math", {}),
        ("nowhere_at_all:make", {}),
        ("math:make", {}),
        ("math:pi", {}),
        (":make", {}),
        ("builtins:dict", {}),
        (f"{__name__}:Nameless", {}),
        ("repeat", {"sead": 1}),
        ("jsonl", {}),
    ],
)
def test_an_env_that_cannot_be_made_is_refused_with_the_reason(name: str, options: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as error:
        make_env(name, **options)
    assert error.value.setting in ("env", "env_options")


@pytest.mark.parametrize("made", [3, SimpleNamespace(name="a")])
def test_a_factory_that_returns_no_env_is_told_with_its_place(monkeypatch: pytest.MonkeyPatch, made: Any) -> None:
    module = ModuleType("factories_of_a_test")
    vars(module)["make"] = lambda: made
    monkeypatch.setitem(sys.modules, "factories_of_a_test", module)
    with pytest.raises(ConfigError, match=r"its factory returned .*, which lacks .*vocab_size") as error:
        make_env("factories_of_a_test:make")
    assert f"({__file__}:" in str(error.value)


def test_a_factory_whose_signature_cannot_be_read_is_called_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Constant, "__signature__", "none", raising=False)
    assert make_env(f"{__name__}:Constant", token=7).name == "constant"
