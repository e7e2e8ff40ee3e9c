"""The arithmetic env: its calculator, and episodes with calls in them, token by token."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import numpy as np
import pytest

from rlbuffer.errors import ConfigError, PromptTooLong
from rlbuffer.records.spans import VersionSpan
from rlbuffer.worker.envs import Score, make_env
from rlbuffer.worker.envs.arithmetic import calculate
from rlbuffer.worker.envs.episode import Episode
from rlbuffer.worker.envs.vocabulary import SYMBOLS, encode
from rlbuffer.worker.samplers import Completion, Sampling


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("7", 7),
        ("2+3*4-1", 13),
        ("2*3*4", 24),
        ("-3*2+10", 4),
        ("5-7", -2),
        ("007+1", 8),
        ("999999999*999999999", 999999998000000001),
        ("1+1+1+1+1+1+1+1", 8),
    ],
)
def test_the_calculator_knows_products_before_sums(expression: str, value: int) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression", ["", "+", "1+", "+1", "1**2", "1--2", "1 + 1", "1+1=", "1/2", "1e9", "1234567890", "1+" * 8 + "1"]
)
def test_the_calculator_refuses_what_is_no_expression(expression: str) -> None:
    with pytest.raises(ValueError, match="is not an expression"):
        calculate(expression)


def played(*turns: str | Exception, number: int = 0, **options: Any) -> tuple[Score, Episode, list[Sampling]]:
    """An episode in which the policy says `turns`, one after the other."""
    env: Any = make_env("arithmetic", **options)
    script, samplings = list(turns), []

    async def ask(tokens: np.ndarray, sampling: Sampling) -> Completion:
        samplings.append(sampling)
        said = script.pop(0)
        if isinstance(said, Exception):
            raise said
        ids = encode(said)
        return Completion(
            tokens=ids,
            logprobs=np.full(len(ids), -0.5, np.float32),
            finish_reason="stop" if said[-1] in "$>" else "length",
            version_spans=(VersionSpan(0, 0, len(ids)),),
        )

    sampling = Sampling(max_new_tokens=env.max_new_tokens, stop_token_ids=env.eos_token_ids)
    prompt = env.prompt(number)
    episode = Episode(prompt.tokens, ask, sampling)
    score = asyncio.run(env.play(prompt, episode))
    assert script == []
    return score, episode, samplings


def test_prompts_are_sums_with_their_answer_and_share_the_symbols_of_the_other_envs() -> None:
    env = make_env("arithmetic")
    assert env.vocab_size == len(SYMBOLS) == 18
    assert [env.prompt(n).prompt_id for n in range(4)] == ["51*26=", "99-55=", "2*4=", "95-86="]
    for number in range(200):
        prompt = env.prompt(number)
        assert prompt.answer == str(calculate(prompt.prompt_id[:-1]))
        assert len(f"<{prompt.prompt_id[:-1]}>") < env.max_new_tokens
        assert env.render(prompt.tokens) == prompt.prompt_id


def test_an_answer_without_a_call_is_scored_at_once() -> None:
    score, episode, samplings = played("1326$")
    assert score == Score(
        reward=1.0,
        rewards={"digits": 1.0, "call": 0.0},
        successes={"exact": True},
        metadata={"calls": 0, "bad_calls": 0},
    )
    assert make_env("arithmetic").render(episode.tokens) == "51*26=1326$"
    assert samplings[0].stop_token_ids == (12, SYMBOLS.index(">"))


def test_a_call_is_answered_and_only_what_was_sampled_is_trained() -> None:
    score, episode, _ = played("<51*26>", "1326$", call_weight=0.1)
    rollout = episode.rollout(score)
    render = make_env("arithmetic").render
    assert render(rollout.tokens) == "51*26=<51*26>1326=1326$"
    assert render(rollout.tokens[rollout.loss_mask]) == "<51*26>1326$"
    assert [(t.role, render(rollout.tokens[t.start : t.end])) for t in rollout.turns] == [
        ("user", "51*26="),
        ("assistant", "<51*26>"),
        ("tool", "1326="),
        ("assistant", "1326$"),
    ]
    assert (rollout.reward, rollout.rewards) == (1.1, {"digits": 1.0, "call": 1.0})


@pytest.mark.parametrize("call", [">", "12>", "<>", "<1+>", "<<1+>", "<1=1>"])
def test_a_call_that_is_not_understood_says_so_and_earns_nothing(call: str) -> None:
    score, episode, _ = played(call, "1$", call_weight=0.5)
    assert "_=1$" in make_env("arithmetic").render(episode.tokens)
    assert (score.rewards["call"], score.metadata) == (0.0, {"calls": 1, "bad_calls": 1})


def test_after_the_last_call_an_answer_is_due_and_no_call_ends_a_turn() -> None:
    score, _, samplings = played("<1+1>", "<1+1>", "<1+1>", max_calls=2)
    assert score.metadata["calls"] == 2
    assert [len(s.stop_token_ids) for s in samplings] == [2, 2, 1]
    assert score.rewards["digits"] == 0.0


def test_a_full_context_ends_the_episode_with_nothing_answered() -> None:
    score, episode, _ = played("<51*26>", PromptTooLong("no room"), call_weight=0.5)
    assert (score.reward, score.rewards["digits"], episode.finish_reason) == (0.5, 0.0, "length")


@pytest.mark.parametrize(
    "option",
    [{"digits": 0}, {"digits": 10}, {"digits": "two"}, {"operators": "+/"}, {"operators": ""}, {"max_calls": -1}],
)
def test_options_out_of_range_are_refused_by_name(option: dict[str, Any]) -> None:
    ((name, value),) = option.items()
    with pytest.raises(ConfigError, match=f"env_options.{name} = {re.escape(repr(value))}: ") as refused:
        make_env("arithmetic", **option)
    assert refused.value.setting == f"env_options.{name}"
