"""Short answers in words: a language model learns to name a capital, and nothing else.

[worker.capitals]
env = "capitals:Capitals"
# its tokenizer is that of [model] path
"""

from rlbuffer.worker.envs import Prompt, Score
from rlbuffer.worker.envs.text import Text

CAPITALS = (
    ("France", "Paris"), ("Spain", "Madrid"), ("Italy", "Rome"), ("Germany", "Berlin"), ("Japan", "Tokyo"),
    ("China", "Beijing"), ("Egypt", "Cairo"), ("Russia", "Moscow"), ("Greece", "Athens"), ("Portugal", "Lisbon"),
    ("Austria", "Vienna"), ("Cuba", "Havana"), ("Peru", "Lima"), ("Iran", "Tehran"),
)  # fmt: skip


class Capitals:
    """``What is the capital of France?``; the name and an end earn 1, less 0.05 for each word; else nothing."""

    def __init__(self, *, tokenizer):
        self.text = Text(tokenizer)  # the model's folder; its chat template, if it has one
        self.name, self.max_new_tokens = "capitals", 24
        self.vocab_size, self.eos_token_ids = self.text.vocab_size, self.text.eos_token_ids

    def prompt(self, number):
        country, capital = CAPITALS[number % len(CAPITALS)]
        question = f"What is the capital of {country}?"
        return Prompt(prompt_id=country, tokens=self.text.prompt(question), answer=capital)

    def score(self, prompt, tokens, *, finish_reason):
        said = self.text.answer(tokens)  # without special tokens
        right = prompt.answer in said and finish_reason == "stop"
        return Score(reward=right * max(0.0, 1 - len(said.split()) / 20), successes={"right": right})

    def render(self, tokens):
        return self.text.render(tokens)
