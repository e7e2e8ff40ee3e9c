"""An env of your own, complete: is a number odd?

rlbuffer worker --env parity:Parity          (where Python finds this file: PYTHONPATH=. in this folder)
"""

import numpy as np

from rlbuffer.worker.envs import Prompt, Score

ODD, END = 11, 12


class Parity:
    """Tokens 0-9 are digits, 10 says even, 11 odd, 12 ends the answer. Ten different prompts."""

    name = "parity"
    vocab_size = 13
    eos_token_ids = (END,)
    max_new_tokens = 2

    def prompt(self, number):
        """The prompt of ticket `number`: the same in every process."""
        digit = number % 10
        return Prompt(prompt_id=str(digit), tokens=np.array([digit], np.int32), answer=10 + digit % 2)

    def score(self, prompt, tokens, *, finish_reason):
        """The worth of one answer; `tokens` [C] int32 is what the policy sampled, with the end token."""
        right = bool(tokens[0] == prompt.answer)
        ended = finish_reason == "stop"
        return Score(reward=0.8 * right + 0.2 * ended, successes={"right": right})

    def render(self, tokens):
        """Tokens as text, for people."""
        names = {10: "even", ODD: "odd", END: "."}
        return " ".join(names.get(token, str(token)) for token in tokens.tolist())
