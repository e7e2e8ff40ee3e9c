"""``vcopy``: four slots hold one to four digits, then filler; the answer is the digits, then the end token.

A random two-layer model learns it in about a hundred steps because the slots keep every digit at a fixed distance from
where it is answered: what remains to be found is when to stop. Reversed, sorted or slotless copies did not learn
reliably in the same time.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlbuffer.worker.envs.prompt import Prompt, Score
from rlbuffer.worker.envs.vocabulary import END, EQUALS, FILLER, VOCAB_SIZE, render, score_against

SLOTS = 4


class VCopy:
    """Prompts ``12__=`` (5 tokens), answers ``12$`` (2 to 5 tokens). 11,110 different prompts.

    Reward: share of positions right over the longer of answer and target, the end token included. Success ``exact``:
    all of them.
    """

    def __init__(self, *, name: str = "vcopy", seed: int = 0) -> None:
        self.name = name
        self.seed = seed
        self.vocab_size = VOCAB_SIZE
        self.eos_token_ids = (END,)
        self.max_new_tokens = SLOTS + 2
        """One more than the longest target, so that running on is possible and costs."""

    def prompt(self, number: int) -> Prompt:
        rng = np.random.default_rng([self.seed, number])
        digits = rng.integers(0, 10, size=int(rng.integers(1, SLOTS + 1)))
        answer = render(digits)
        filler = np.full(SLOTS - len(digits), FILLER)
        tokens = np.concatenate([digits, filler, [EQUALS]]).astype(np.int32)
        return Prompt(prompt_id=render(tokens), tokens=tokens, answer=answer)

    def score(self, prompt: Prompt, tokens: NDArray[np.int32], *, finish_reason: str) -> Score:
        return score_against(prompt.answer, tokens)

    def render(self, tokens: NDArray[np.int32]) -> str:
        return render(tokens)
