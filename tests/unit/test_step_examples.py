"""A step's record and its part about single rollouts and single ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rlbuffer.packing.pack import pack
from rlbuffer.records.micro_batch import MicroBatch
from rlbuffer.records.rollout import Rollout
from rlbuffer.trainer.reports.examples import MOST_TOKENS, examples_of


def sampled(rollout_id: str, reward: float | None, tokens: Sequence[int]) -> MicroBatch:
    """A micro-batch of one rollout; its group is what its id says."""
    rollout = Rollout.from_completion(
        prompt_ids=[1, 2], token_ids=list(tokens), logprobs=[-0.5] * len(tokens), reward=reward, policy_version=3
    )
    made = pack([rollout], [0.25], row_tokens=512)
    named = replace(made.samples[0], rollout_id=rollout_id, group_id=rollout_id.partition("/")[0], env="math")
    return replace(made, segments=replace(made.segments, samples=lambda: (named,)))


def one(reward: float | None, tokens: Sequence[int]) -> Any:
    """A step of one rollout."""
    return [sampled("a/0", reward, tokens)]


def words(tokens: Sequence[int]) -> str:
    return "-".join(map(str, tokens))


def test_the_group_whose_rewards_lie_furthest_apart_is_shown() -> None:
    step: Any = [
        sampled("a/0", 0.9, [5]),
        sampled("a/1", 1.0, [6]),
        sampled("b/0", 0.2, [7, 8]),
        sampled("b/1", 0.6, [9]),
    ]
    assert examples_of(step, words) == [
        {
            "name": name,
            "group_id": "b",
            "rollout_id": rollout_id,
            "env": "math",
            "reward": reward,
            "advantage": 0.25,
            "tokens": len(tokens),
            "token_ids": tokens,
            "text": words(tokens),
        }
        for name, rollout_id, reward, tokens in (("best", "b/1", 0.6, [9]), ("worst", "b/0", 0.2, [7, 8]))
    ]


def test_one_rollout_is_shown_once_and_one_without_a_reward_not_at_all() -> None:
    assert [e["name"] for e in examples_of(one(0.5, [5]), words)] == ["best"]
    assert examples_of(one(None, [5]), words) == []


def test_of_a_long_rollout_the_end_is_shown() -> None:
    (example,) = examples_of(one(1.0, range(300)), words)
    assert example["tokens"] == 300
    assert example["token_ids"] == list(range(300 - MOST_TOKENS, 300))
