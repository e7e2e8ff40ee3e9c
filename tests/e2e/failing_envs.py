"""Envs of which no group can be made, each for another reason."""

from __future__ import annotations

import sys
import time

import numpy as np

from rlbuffer.worker.envs import Prompt, Score


class Sound:
    """An env in which nothing fails; the others differ from it in one thing. A score takes so many seconds."""

    vocab_size, eos_token_ids, max_new_tokens = 13, (12,), 2

    def __init__(self, seconds=0.0):
        self.seconds = seconds

    @property
    def name(self):
        return type(self).__name__.lower()

    def prompt(self, number):
        return Prompt(prompt_id=str(number), tokens=np.array([number % 10], np.int32))

    def score(self, prompt, tokens, *, finish_reason):
        time.sleep(self.seconds)
        return Score(reward=1.0)

    def render(self, tokens):
        return ""


class Raises(Sound):
    def score(self, prompt, tokens, *, finish_reason):
        return Score(reward={}["verdict"])


class Hangs(Sound):
    def score(self, prompt, tokens, *, finish_reason):
        time.sleep(3600)


class SometimesRaises(Sound):
    def score(self, prompt, tokens, *, finish_reason):
        if int(prompt.prompt_id) % 2:
            return Score(reward=[][0])
        return Score(reward=1.0)


class CallsExit(Sound):
    def score(self, prompt, tokens, *, finish_reason):
        sys.exit("no judge")


class NotMade(Sound):
    def __init__(self):
        raise PermissionError("the judge's key")


class NoPrompt(Sound):
    def prompt(self, number):
        raise FileNotFoundError("prompts.jsonl")


class PromptHangs(Sound):
    def prompt(self, number):
        time.sleep(3600)


class Judge(Sound):
    async def score(self, prompt, tokens, *, finish_reason):
        raise ConnectionError("the judge is away")


class Plays(Sound):
    score = None

    async def play(self, prompt, episode):
        await episode.sample()
        episode.extend(["a word"])


class Silent(Sound):
    async def play(self, prompt, episode):
        return Score(reward=1.0)
