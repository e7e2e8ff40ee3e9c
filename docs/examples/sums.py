"""Text in, text out: sums, asked and answered in words of a tokenizer, in the model's own chat template.

[worker.sums]
env = "sums:Sums"
env_options = { tokenizer = "models/qwen3" }
"""

import numpy as np

from rlbuffer.worker.envs import Prompt, Score
from rlbuffer.worker.envs.text import Text


class Sums:
    """``What is 3 + 4?``; the answer is the number alone."""

    def __init__(self, *, tokenizer, most=20, system="Answer with the number alone."):
        self.text = Text(tokenizer, system=system)  # the model's folder; its chat template, if it has one
        self.most = most
        self.name = "sums"
        self.vocab_size = self.text.vocab_size
        self.eos_token_ids = self.text.eos_token_ids
        self.max_new_tokens = 16

    def prompt(self, number):
        a, b = np.random.default_rng(number).integers(0, self.most, 2).tolist()
        return Prompt(prompt_id=f"{a}+{b}", tokens=self.text.prompt(f"What is {a} + {b}?"), answer=str(a + b))

    def score(self, prompt, tokens, *, finish_reason):
        said = self.text.answer(tokens).strip()  # without special tokens
        right = said == prompt.answer
        return Score(reward=float(right), successes={"right": right}, metadata={"said": said[:100]})

    def render(self, tokens):
        return self.text.render(tokens)
