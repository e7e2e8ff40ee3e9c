"""Envs of which no group can be made, each for another reason."""

from __future__ import annotations

import asyncio
import os
import sys
import time

import numpy as np

from rlbuffer import Rollout
from rlbuffer.worker.envs import Prompt, Score


class Sound:
    """An env in which nothing fails; the others differ from it in one thing."""

    vocab_size, eos_token_ids, max_new_tokens = 13, (12,), 2

    @property
    def name(self):
        return type(self).__name__.lower()

    def prompt(self, number):
        return Prompt(prompt_id=str(number), tokens=np.array([number % 10], np.int32))

    def score(self, prompt, tokens, *, finish_reason):
        return Score(reward=1.0)

    def render(self, tokens):
        return ""


class NotANumber(Sound):
    def score(self, prompt, tokens, *, finish_reason):
        return Score(reward=float("nan"))


class Raises(Sound):
    def score(self, prompt, tokens, *, finish_reason):
        return Score(reward={}["verdict"])


class Hangs(Sound):
    def score(self, prompt, tokens, *, finish_reason):
        time.sleep(3600)


class GivesAFloat(Sound):
    def score(self, prompt, tokens, *, finish_reason):
        return 1.0


class TextReward(Sound):
    def score(self, prompt, tokens, *, finish_reason):
        return Score(reward="1.0")


class TwoRewards(Sound):
    def score(self, prompt, tokens, *, finish_reason):
        return Score(reward=[1.0, 0.0])


class SometimesRaises(Sound):
    def score(self, prompt, tokens, *, finish_reason):
        if int(prompt.prompt_id) % 2:
            return Score(reward=[][0])
        return Score(reward=1.0)


class CallsExit(Sound):
    def score(self, prompt, tokens, *, finish_reason):
        sys.exit("no judge")


class EndsItsProcess(Sound):
    def score(self, prompt, tokens, *, finish_reason):
        os._exit(7)


class NotMade(Sound):
    def __init__(self):
        raise PermissionError("the judge's key")


class NoPrompt(Sound):
    def prompt(self, number):
        raise FileNotFoundError("prompts.jsonl")


class PromptHangs(Sound):
    def prompt(self, number):
        time.sleep(3600)


class GivesADict(Sound):
    def prompt(self, number):
        return {"tokens": [1, 2]}


class Vocabulary(Sound):
    def prompt(self, number):
        return Prompt(prompt_id=str(number), tokens=np.array([99], np.int32))


class PlainList(Sound):
    def prompt(self, number):
        return Prompt(prompt_id=str(number), tokens=["a", "b"])


class Judge(Sound):
    async def score(self, prompt, tokens, *, finish_reason):
        raise ConnectionError("the judge is away")


class JudgeBlocks(Sound):
    async def score(self, prompt, tokens, *, finish_reason):
        time.sleep(3600)


class Plays(Sound):
    score = None

    async def play(self, prompt, episode):
        await episode.sample()
        episode.extend(["a word"])


class PlayHangs(Sound):
    async def play(self, prompt, episode):
        await episode.sample()
        await asyncio.sleep(3600)


class NoTokens(Sound):
    score = None

    async def rollout(self, prompt, policy):
        empty = np.array([], np.float32)
        return Rollout.from_completion(
            prompt_ids=prompt.tokens, token_ids=[], logprobs=empty, reward=1.0, policy_version=0
        )


class Silent(Sound):
    async def play(self, prompt, episode):
        return Score(reward=1.0)
