"""``arithmetic``: sums and products with a calculator that the policy may call.

A call is sampled as ``<3+4>``; the calculator's answer follows as tokens of its own, ``7=``, and the policy goes on.
The answer is the digits, then the end token. Nothing is tokenised again: what is sampled stays as it was sampled, and
what the calculator says is masked out.

    37*46=   <37*46>   1702=   1702$
    prompt   sampled   tool    sampled
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, validate_call

from rlbuffer.errors import PromptTooLong
from rlbuffer.worker.envs.prompt import Prompt, Score
from rlbuffer.worker.envs.vocabulary import END, SYMBOLS, encode, positions_right, render

if TYPE_CHECKING:
    from rlbuffer.worker.envs.episode import Episode

CLOSE = SYMBOLS.index(">")
ERROR = "_="
"""Answer of the calculator when it understands nothing."""
EXPRESSION = re.compile(r"-?[0-9]{1,9}(?:[+*-][0-9]{1,9}){0,7}")


def calculate(expression: str) -> int:
    """Value of up to eight numbers of up to nine digits with ``+``, ``-`` and ``*``; products first.

    Raises:
        ValueError: it is no such expression.

    Example:
        >>> calculate("2+3*4-1")
        13
    """
    if not EXPRESSION.fullmatch(expression):
        raise ValueError(f"{expression!r} is not an expression")
    total = 0
    for sign, product in re.findall(r"([+-]?)([0-9*]+)", expression):
        value = 1
        for factor in product.split("*"):
            value *= int(factor)
        total += -value if sign == "-" else value
    return total


class Arithmetic:
    """Prompts ``37*46=``: two numbers and an operator.

    Reward ``digits``: share of positions right over the longer of answer and target, the end token included. Reward
    ``call``: 1 for a calculator call that it understood. The metadata say how many ``calls`` were made, how many
    ``bad_calls`` of them it did not understand. An episode that ends without an answer has the reward of an empty one.

    Args:
        name: the env's name.
        seed: another order of prompts.
        digits: of the larger numbers, 1-9.
        operators: some of ``+-*``.
        max_calls: after so many the policy must answer; 0: no calculator.
        call_weight: weight of ``call`` beside that of ``digits``, which is 1. Above 0 it pays for the use of the
            calculator itself: a start for policies that never call it by chance.
    """

    @validate_call
    def __init__(
        self,
        *,
        name: str = "arithmetic",
        seed: int = 0,
        digits: Annotated[int, Field(ge=1, le=9)] = 2,
        operators: Annotated[str, Field(pattern=r"^[+*-]+$")] = "+-*",
        max_calls: Annotated[int, Field(ge=0)] = 2,
        call_weight: float = 0.0,
    ) -> None:
        self.name, self.seed = name, seed
        self.vocab_size = len(SYMBOLS)
        self.eos_token_ids = (END,)
        self.max_new_tokens = 2 * digits + 5
        """Of one turn: the longest call, ``<99*99>``, with one to spare; the longest answer is shorter."""
        self._digits, self._operators, self._max_calls = digits, operators, max_calls
        self._call_weight = call_weight

    def prompt(self, number: int) -> Prompt:
        rng = np.random.default_rng([self.seed, number])
        operator = self._operators[int(rng.integers(len(self._operators)))]
        left, right = (int(n) for n in rng.integers(0, 10 ** int(rng.integers(1, self._digits + 1)), size=2))
        text = f"{left}{operator}{right}"
        return Prompt(prompt_id=text + "=", tokens=encode(text + "="), answer=str(calculate(text)))

    async def play(self, prompt: Prompt, episode: Episode) -> Score:
        """Turns until an end token, a turn that is neither call nor answer, or a full context."""
        calls = bad = 0
        answer = np.zeros(0, np.int32)
        try:
            while True:
                stops = (CLOSE,) if calls < self._max_calls else ()
                turn = (await episode.sample(stop_token_ids=stops)).tokens
                if not stops or turn[-1] != CLOSE:
                    answer = turn
                    break
                said, calls = self._calculator(self.render(turn)), calls + 1
                bad += said == ERROR
                episode.extend(encode(said), role="tool")
        except PromptTooLong:
            pass  # the context is full: what was said until then counts, and the rollout as truncated
        digits = positions_right(encode(f"{prompt.answer}$"), answer)
        called = float(calls > bad)
        return Score(
            reward=digits + self._call_weight * called,
            rewards={"digits": digits, "call": called},
            successes={"exact": digits == 1.0},
            metadata={"calls": calls, "bad_calls": bad},
        )

    def render(self, tokens: NDArray[np.int32]) -> str:
        return render(tokens)

    def _calculator(self, turn: str) -> str:
        """The calculator's answer to a turn that ends with ``>``."""
        _, opened, expression = turn[:-1].rpartition("<")
        try:
            return f"{calculate(expression)}=" if opened else ERROR
        except ValueError:
            return ERROR
