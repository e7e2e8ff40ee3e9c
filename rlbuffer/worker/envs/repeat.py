"""``repeat``: a symbol and a count; the answer is the symbol that many times, then the end token.

Shorter prompts than ``vcopy`` and other lengths, from the same vocabulary: a second env that one tiny model learns
beside the first. The count stands next to the equals sign; with the symbol there a run took half as many steps again to
pass 0.7. Counts up to five: six is markedly slower to learn.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlbuffer.worker.envs.prompt import Prompt, Score
from rlbuffer.worker.envs.vocabulary import END, EQUALS, VOCAB_SIZE, render, score_against

MOST_REPEATS = 5


class Repeat:
    """Prompts ``73=`` (3 tokens), answers ``777$`` (2 to 6 tokens). 50 different prompts.

    Reward: share of positions right over the longer of answer and target, the end token included. Success ``exact``:
    all of them.
    """

    def __init__(self, *, name: str = "repeat", seed: int = 0) -> None:
        self.name = name
        self.seed = seed
        self.vocab_size = VOCAB_SIZE
        self.eos_token_ids = (END,)
        self.max_new_tokens = MOST_REPEATS + 2
        """One more than the longest target, so that running on is possible and costs."""

    def prompt(self, number: int) -> Prompt:
        rng = np.random.default_rng([self.seed, number])
        count, symbol = int(rng.integers(1, MOST_REPEATS + 1)), int(rng.integers(0, 10))
        tokens = np.array([symbol, count, EQUALS], np.int32)
        return Prompt(prompt_id=render(tokens), tokens=tokens, answer=str(symbol) * count)

    def score(self, prompt: Prompt, tokens: NDArray[np.int32], *, finish_reason: str) -> Score:
        return score_against(prompt.answer, tokens)

    def render(self, tokens: NDArray[np.int32]) -> str:
        return render(tokens)
