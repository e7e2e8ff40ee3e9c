"""Envs of which no group can be made, each for another reason."""

from __future__ import annotations

import asyncio
import time

import numpy as np

from rlbuffer.worker.envs import Prompt, Score


class Sound:
    """What all of them are but for one thing."""

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


class Silent(Sound):
    async def play(self, prompt, episode):
        return Score(reward=1.0)
