"""Envs through the worker: tools masked out, prompts skipped, limits kept. Real scripts (memory://), a real sampler."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from worker_stage import Counting, Stage, eventually

from rlbuffer.config.settings import ModelSettings
from rlbuffer.errors import ConfigError
from rlbuffer.records.rollout import Rollout
from rlbuffer.records.waiting import Wait
from rlbuffer.worker import difficulty
from rlbuffer.worker.envs import Prompt, Score, Skip


def published(stage: Stage, directory: Path, *, vocab_size: int) -> Any:
    """Announces a fresh tiny model of as many tokens; -> the model."""

    from rlbuffer.weights.files import publish
    from rlbuffer.weights.model import TINY_QWEN3, build_model, config_of

    model = build_model(ModelSettings(config={**TINY_QWEN3, "vocab_size": vocab_size}), seed=0).eval()
    stage.announce(publish(directory, 0, state=model.state_dict(), config=config_of(model), keep=2))
    return model


def logprobs(model: Any, rollout: Rollout) -> np.ndarray:
    """Logprobs of every token but the first, by one forward pass over the whole rollout."""
    import torch

    ids = torch.from_numpy(rollout.tokens.astype(np.int64))[None]
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
    return torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0].numpy()


class Tool(Counting):
    """An env whose tool says two tokens behind each of three turns."""

    async def play(self, prompt: Prompt, episode: Any) -> Score:
        for said in range(3):
            await episode.sample()
            episode.extend([said, 11], role="tool")
        await episode.sample()
        return Score(reward=1.0)


def test_what_a_tool_says_is_in_the_rollout_and_masked_out(stage: Stage, tmp_path: Path) -> None:
    model = published(stage, tmp_path, vocab_size=13)
    stage.allow(2)
    stage.start(env=f"{__name__}:Tool", group_size=8, groups_in_flight=2, max_new_tokens=5)
    eventually(lambda: len(stage.groups()) == 2)
    stage.finish()
    assert stage.raised is None
    for rollout in (rollout for group in stage.rollouts() for rollout in group):
        tools = [turn for turn in rollout.turns if turn.role == "tool"]
        assert [rollout.tokens[turn.start : turn.end].tolist() for turn in tools] == [[0, 11], [1, 11], [2, 11]]
        assert not any(rollout.loss_mask[turn.start : turn.end].any() for turn in tools)
        # The next turn was sampled with the tool's tokens before it, and nothing was tokenised again.
        expected = logprobs(model, rollout)
        np.testing.assert_allclose(rollout.logprobs[1:], np.where(rollout.loss_mask[1:], expected, 0), atol=1e-4)


class Two(Counting):
    """Two prompts by turns: all rollouts solve the even one, half of them the odd one; some tickets are nothing."""

    def __init__(self, *, nothing: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.nothing = nothing
        self.scored = 0

    def prompt(self, number: int) -> Prompt:
        if number in self.nothing:
            raise Skip("too long")
        return Prompt(prompt_id=str(number % 2), tokens=np.array([number % 2], np.int32))

    def score(self, prompt: Prompt, tokens: np.ndarray, *, finish_reason: str) -> Score:
        self.scored += 1
        return Score(reward=1.0 if prompt.prompt_id == "0" else float(self.scored % 2))


def test_a_ticket_without_a_prompt_is_closed_and_the_others_go_on(stage: Stage) -> None:
    stage.env = Two(nothing=(0, 2))
    stage.allow(4)
    stage.announce(0)
    stage.start()
    eventually(lambda: len(stage.groups()) == 4)  # two more than its allowance, since two tickets were closed
    assert sorted(stage.groups()) == ["counting.1", "counting.3", "counting.4", "counting.5"]
    eventually(lambda: stage.heartbeat()["skipped"] == 2)
    stage.finish()
    assert stage.told("trouble") == []


def test_a_prompt_of_which_all_rollouts_had_one_reward_again_and_again_is_skipped(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.env = Two()
    stage.allow(8)
    stage.announce(0)
    monkeypatch.setattr(difficulty, "RETRIED_SHARE", 0.0)
    stage.start(groups_in_flight=1, skip_after=2)
    eventually(lambda: len(stage.groups()) == 8)
    stage.finish()
    numbers = sorted(int(group.split(".")[1]) for group in stage.groups())
    assert numbers == [0, 1, 2, 3, 5, 7, 9, 11]
    assert stage.store.visits("counting", ["0", "1", "2"]) == ["ee", "mm", ""]


def test_when_every_prompt_is_skipped_the_worker_says_so(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.store.note_visits("counting", "0", "ee")
    stage.store.note_visits("counting", "1", "ee")
    stage.env = Two()
    stage.allow(3)
    stage.announce(0)
    monkeypatch.setattr(difficulty, "RETRIED_SHARE", 0.0)
    stage.start(skip_after=2)
    eventually(lambda: any(e.kind == Wait.PROMPT for e in stage.told("waiting")))
    assert stage.told("waiting")[-1].env == "counting"
    assert stage.groups() == []


class Slow:
    """Plays episodes and counts how many at once."""

    name, vocab_size, eos_token_ids, max_new_tokens = "counting", 13, (12,), 4
    max_concurrent = 2

    def __init__(self, seconds: float = 0.005) -> None:
        self.seconds = seconds
        self.now = self.most = 0
        self.closed = False

    def prompt(self, number: int) -> Prompt:
        return Prompt(prompt_id=str(number), tokens=np.array([number], np.int32))

    def render(self, tokens: np.ndarray) -> str:
        return " ".join(map(str, tokens.tolist()))

    async def play(self, prompt: Prompt, episode: Any) -> Score:
        self.now += 1
        self.most = max(self.most, self.now)
        await episode.sample()
        await asyncio.sleep(self.seconds)
        self.now -= 1
        return Score(reward=1.0)

    async def close(self) -> None:
        self.closed = True


def test_no_more_episodes_are_played_at_once_than_the_env_bears(stage: Stage) -> None:
    env: Any = Slow()
    stage.env = env
    stage.allow(3)
    stage.announce(0)
    stage.start(group_size=4)
    eventually(lambda: len(stage.groups()) == 3)
    stage.finish()
    assert env.most == 2
    assert env.closed


def test_an_episode_that_waits_for_its_turn_does_not_spend_its_time(stage: Stage) -> None:
    env: Any = Slow(seconds=0.3)
    stage.env = env
    stage.allow(1)
    stage.announce(0)
    stage.start(group_size=20, rollout_timeout_seconds=1.0)  # the last two wait for 2.7 s
    eventually(lambda: stage.groups() == ["counting.0"])
    assert [rollout.failure for rollout in stage.rollouts()[0]] == [None] * 20


class Straggling(Slow):
    """Env of whose groups so many episodes never end."""

    max_concurrent = 0

    def __init__(self, *stuck: int) -> None:
        super().__init__()
        self.stuck = list(stuck)
        self.waiting = 0

    async def play(self, prompt: Prompt, episode: Any) -> Score:
        await episode.sample()
        number = int(prompt.prompt_id)
        if self.stuck[number] > 0:
            self.stuck[number] -= 1
            self.waiting += 1
            await asyncio.sleep(3600)
        self.now += 1
        return Score(reward=1.0)


def test_a_worker_that_stops_pushes_groups_of_which_more_than_half_is_there(stage: Stage) -> None:
    env: Any = Straggling(1, 2, 0)
    stage.env = env
    stage.allow(3)
    stage.announce(0)
    stage.start(group_size=4)
    eventually(lambda: (env.waiting, env.now, stage.groups()) == (3, 9, ["counting.2"]))
    stage.finish()
    assert stage.raised is None
    assert stage.groups() == ["counting.0", "counting.2"]
    assert [len(group) for group in stage.rollouts()] == [3, 4]
    (ended,) = stage.told("stopped")
    assert (ended.groups, ended.rollouts, ended.failed_groups) == (2, 7, 0)
    other = stage.buffer.writer("w-1")
    stage.allow(4)
    assert [ticket.number for ticket in other.take("counting", 2, timeout_seconds=0.0)] == [1, 3]


@pytest.mark.parametrize(("skips", "error"), [(True, ConfigError), (False, KeyError)])
def test_an_env_that_skips_its_first_prompts_is_misconfigured_and_one_that_raises_may_be_tried_again(
    stage: Stage, skips: bool, error: type[Exception]
) -> None:
    if skips:
        stage.env = Two(nothing=tuple(range(64)))
    else:
        stage.env.bad_prompts = set(range(64))
    stage.announce(0)
    stage.start(self_check="always")
    stage.thread.join(20)  # type: ignore[union-attr]
    assert type(stage.raised) is error


def test_a_worker_checks_its_sampler_with_the_first_prompt_that_there_is(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[list[int]] = []

    async def check(sampler: Any, policy: Any, prompt: np.ndarray, *_: Any) -> float:
        compared.append(prompt.tolist())
        return 0.0

    monkeypatch.setattr("rlbuffer.worker.samplers.selfcheck.check_sampler", check)
    stage.env.bad_prompts = {0, 1}
    stage.allow(3)
    stage.announce(0)
    stage.start(self_check="always")
    eventually(lambda: stage.raised or stage.groups() == ["counting.2"])
    stage.finish()
    assert (stage.raised, compared) == (None, [[2]])
