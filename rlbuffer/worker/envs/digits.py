"""``vcopy`` and ``repeat``: two envs of a few digits, which one tiny model learns beside each other."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from pydantic import validate_call

from rlbuffer.state.vocabulary import (
    END,
    EQUALS,
    FILLER,
    SYMBOLS,
    VOCAB_SIZE,
    encode,
    positions_right,
    render,
)
from rlbuffer.worker.envs.prompt import Prompt, Score

SLOTS = 4
MOST_REPEATS = 5


class Digits:
    """An answer of digits and the end token.

    Reward: share of positions right over the longer of answer and target, the end token included. Success ``exact``:
    all of them.
    """

    name = ""
    vocab_size = VOCAB_SIZE
    eos_token_ids = (END,)
    max_new_tokens = 0
    """One more than the longest target, so that running on is possible and costs."""

    @validate_call
    def __init__(self, *, name: str = "", seed: int = 0) -> None:
        self.name = name or self.name
        self.seed = seed
        self.identity = {"env": type(self).__name__.lower(), "seed": seed}

    def score(self, prompt: Prompt, tokens: NDArray[np.int32], *, finish_reason: str) -> Score:
        reward = positions_right(encode(prompt.answer + SYMBOLS[END]), tokens)
        return Score(reward=reward, successes={"exact": reward == 1.0})

    def render(self, tokens: NDArray[np.int32]) -> str:
        return render(tokens)


class VCopy(Digits):
    """Prompts ``12__=`` (5 tokens): four slots hold one to four digits, then filler; answers ``12$`` (2 to 5 tokens).
    11,110 different prompts.

    A random two-layer model learns it in about a hundred steps because the slots keep every digit at a fixed distance
    from where it is answered: what remains to be found is when to stop. Reversed, sorted or slotless copies did not
    learn reliably in the same time.
    """

    name = "vcopy"
    max_new_tokens = SLOTS + 2

    def prompt(self, number: int) -> Prompt:
        rng = np.random.default_rng([self.seed, number])
        digits = rng.integers(0, 10, size=int(rng.integers(1, SLOTS + 1)))
        filler = np.full(SLOTS - len(digits), FILLER)
        tokens = np.concatenate([digits, filler, [EQUALS]]).astype(np.int32)
        return Prompt(prompt_id=render(tokens), tokens=tokens, answer=render(digits))


class Repeat(Digits):
    """Prompts ``73=`` (3 tokens), a symbol and a count; answers ``777$`` (2 to 6 tokens). 50 different prompts.

    Shorter prompts than those of ``vcopy`` and other lengths, from the same vocabulary. The count stands next to the
    equals sign; with the symbol there a run took half as many steps again to pass 0.7. Counts up to five: six is
    markedly slower to learn.
    """

    name = "repeat"
    max_new_tokens = MOST_REPEATS + 2

    def prompt(self, number: int) -> Prompt:
        rng = np.random.default_rng([self.seed, number])
        count, symbol = int(rng.integers(1, MOST_REPEATS + 1)), int(rng.integers(0, 10))
        tokens = np.array([symbol, count, EQUALS], np.int32)
        return Prompt(prompt_id=render(tokens), tokens=tokens, answer=str(symbol) * count)
