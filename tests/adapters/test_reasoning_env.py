"""The tasks of reasoning-gym: made from a seed, scored by their own scorers, whatever those do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlbuffer.errors import ConfigError
from rlbuffer.worker.envs import make_env
from rlbuffer.worker.envs.reasoning import without_tags

TASKS = {
    "chain_sum": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1},
    "spell_backward": {},
    "gcd": {},
}


def tokens(env: Any, text: str) -> np.ndarray:
    tokenizer = env._text._tokenizer
    return np.asarray([*tokenizer.encode(text, add_special_tokens=False), *env.eos_token_ids], np.int32)


@pytest.mark.parametrize("dataset", TASKS)
def test_a_task_is_asked_answered_and_scored(dataset: str, tokenizer: Path) -> None:
    env: Any = make_env(
        "reasoning_gym", dataset=dataset, tokenizer=str(tokenizer), config=TASKS[dataset], size=20, seed=3
    )
    assert env.name == dataset
    for number in range(5):
        prompt = env.prompt(number)
        assert prompt.prompt_id == f"{dataset}/3/{prompt.metadata['index']}"
        assert env.render(prompt.tokens).endswith(
            "Give your answer between <answer> and </answer>.<|im_end|>\n<|im_start|>assistant\n"
        )
        right = env.score(prompt, tokens(env, f"so <answer>\n{prompt.answer} </answer>"), finish_reason="stop")
        assert (right.reward, right.rewards) == (1.0, {"score": 1.0, "format": 1.0})
        assert right.successes == {"score": True}
        bare = env.score(prompt, tokens(env, prompt.answer), finish_reason="stop")
        assert bare.rewards == {"score": 1.0, "format": 0.0}
        assert env.score(prompt, tokens(env, "<answer>no idea</answer>"), finish_reason="stop").reward < 1.0


def test_prompts_are_the_same_in_every_process_and_once_an_epoch(tokenizer: Path) -> None:
    make = {"dataset": "chain_sum", "tokenizer": str(tokenizer), "size": 7, "seed": 1}
    env, other = make_env("reasoning_gym", **make), make_env("reasoning_gym", **make)
    prompts = [env.prompt(n) for n in range(14)]
    assert [p.prompt_id for p in prompts] == [other.prompt(n).prompt_id for n in range(14)]
    assert [p.tokens.tolist() for p in prompts] == [other.prompt(n).tokens.tolist() for n in range(14)]
    assert len({p.prompt_id for p in prompts[:7]}) == len({p.prompt_id for p in prompts[7:]}) == 7


def test_a_scorer_that_raises_counts_as_zero_and_says_so(tokenizer: Path) -> None:
    env: Any = make_env("reasoning_gym", dataset="prime_factorization", tokenizer=str(tokenizer), size=3)
    score = env.score(env.prompt(0), tokens(env, "<answer>zzz</answer>"), finish_reason="stop")
    assert (score.reward, score.rewards["score"]) == (0.0, 0.0)
    assert score.metadata["reward_errors"]["score"].startswith("ValueError: ")


def test_the_format_may_count_and_a_length_may_shape_it(tokenizer: Path) -> None:
    env: Any = make_env(
        "reasoning_gym",
        dataset="gcd",
        name="math",
        tokenizer=str(tokenizer),
        size=3,
        format_weight=0.5,
        instruction="",
        length={"form": "clip", "target": 30},
    )
    prompt = env.prompt(0)
    assert env.name == "math"
    assert "answer>" not in env.render(prompt.tokens)
    tagged = f"<answer>{prompt.answer}</answer>"
    assert env.score(prompt, tokens(env, tagged), finish_reason="stop").reward == 1.5
    assert env.score(prompt, tokens(env, tagged + 30 * " "), finish_reason="stop").reward == 0.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("7", "7"),
        (" 7\n", "7"),
        ("<answer>7</answer>", "7"),
        ("<answer>6</answer> no, <answer> 7\n</answer> yes", "7"),
        ("<answer>7", "<answer>7"),
        ("<answer></answer>", ""),
    ],
)
def test_the_last_answer_between_tags_counts(text: str, answer: str) -> None:
    assert without_tags(text) == answer


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset": "chain_sums"}, "reasoning_gym: dataset 'chain_sums' with {} cannot be made: "),
        ({"dataset": "chain_sum", "config": {"terms": 3}}, "reasoning_gym: dataset 'chain_sum' with {'terms': 3} can"),
    ],
)
def test_a_data_set_that_cannot_be_made_is_refused(tokenizer: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        make_env("reasoning_gym", tokenizer=str(tokenizer), **options)
    assert str(error.value).startswith(message)
