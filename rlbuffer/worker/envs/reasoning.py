"""``reasoning_gym``: the tasks of the reasoning-gym package, made offline from a seed.

A prompt is named by data set, seed and index, and is the same in every process. The policy answers between
``<answer>`` and ``</answer>``; the task's own scorer says how good that is, 0-1, in part for many tasks.

Source: Stojanovski and others 2025, "Reasoning Gym: Reasoning Environments for Reinforcement Learning with Verifiable
Rewards"; written against reasoning-gym 0.1.25.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, validate_call

from rlbuffer.config.table import Count, PathText
from rlbuffer.errors import ConfigError
from rlbuffer.worker.envs.order import Passes, PromptOrder
from rlbuffer.worker.envs.prompt import Prompt, Score
from rlbuffer.worker.envs.rewards import Answered, OptionalLength, Rewards
from rlbuffer.worker.envs.text import Text

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
INSTRUCTION = "Give your answer between <answer> and </answer>."
"""Follows every question, unless the options say otherwise."""


class ReasoningGym:
    """One data set of reasoning-gym.

    Rewards: ``score``, the task's own, of what stands between the last answer tags, or of the whole completion where
    there are none; ``format``, 1 when there are. A scorer that raises, as some do at nonsense, counts as 0, and the
    rollout's metadata says what it raised.

    Args:
        dataset: its name in reasoning-gym, such as ``chain_sum``.
        tokenizer: directory of the model's tokenizer.
        name: the env's name; "": the data set's.
        size: different prompts; an epoch.
        seed: of the prompts, and of their order.
        passes: how often every prompt is sampled before the env is done; 0: it has no end.
        config: the data set's own options.
        chat, system: how text becomes a prompt, see :class:`rlbuffer.worker.envs.text.Text`.
        instruction: follows every question; "": nothing.
        format_weight: weight of ``format`` beside that of ``score``, which is 1.
        length: a length reward: ``form``, ``target``, ``coefficient``, ``slack``.
        max_new_tokens: longest completion.

    Raises:
        ConfigError: reasoning-gym is not installed, has no such data set, or refuses its options.
    """

    @validate_call
    def __init__(
        self,
        *,
        dataset: str,
        tokenizer: PathText,
        name: str = "",
        size: Annotated[int, Field(ge=1)] = 10_000,
        seed: int = 0,
        passes: Passes = 0,
        config: Mapping[str, Any] | None = None,
        chat: bool | None = None,
        system: str = "",
        instruction: str = INSTRUCTION,
        format_weight: float = 0.0,
        length: OptionalLength = None,
        max_new_tokens: Count = 512,
    ) -> None:
        self.name = name or dataset
        self._dataset, self._seed, self._instruction = dataset, seed, instruction
        self._data: Any = _create(dataset, size=size, seed=seed, options=config or {})
        self._text = Text(tokenizer, chat=chat, system=system)
        self.vocab_size, self.eos_token_ids = self._text.vocab_size, self._text.eos_token_ids
        self.max_new_tokens = max_new_tokens
        self._order = PromptOrder(size, seed=seed, passes=passes)
        self.tickets = self._order.tickets
        of_data = {"env": "reasoning_gym", "dataset": dataset, "config": dict(config or {}), "seed": seed}
        self.identity = {**of_data, **self._order.identity}
        self._rewards = Rewards(
            {"score": (self._score, 1.0), "format": (_is_tagged, format_weight)},
            length=length,
            success="score",
            on_error="zero",
        )

    def prompt(self, number: int) -> Prompt:
        epoch, index = self._order.place(number)
        entry = self._data[index]
        question = f"{entry['question']}\n{self._instruction}" if self._instruction else str(entry["question"])
        return Prompt(
            prompt_id=f"{self._dataset}/{self._seed}/{index}",
            tokens=self._text.prompt(question),
            answer=None if entry["answer"] is None else str(entry["answer"]),
            metadata={"dataset": self._dataset, "index": index, "epoch": epoch},
        )

    def score(self, prompt: Prompt, tokens: NDArray[np.int32], *, finish_reason: str) -> Score:
        return self._rewards.score(
            Answered(prompt=prompt, tokens=tokens, finish_reason=finish_reason, render=self._text.answer)
        )

    def render(self, tokens: NDArray[np.int32]) -> str:
        return self._text.render(tokens)

    def _score(self, answered: Answered) -> float:
        entry = self._data[int(answered.prompt.metadata["index"])]
        return float(self._data.score_answer(without_tags(answered.text), entry))


def without_tags(text: str) -> str:
    """The text between the last answer tags, or all of it where there are none; white space around it removed.

    Example:
        >>> without_tags("so <answer> 7 </answer>")
        '7'
    """
    answers = ANSWER.findall(text)
    return str(answers[-1] if answers else text).strip()


def _is_tagged(answered: Answered) -> float:
    return float(bool(ANSWER.search(answered.text)))


def _create(dataset: str, *, size: int, seed: int, options: Mapping[str, Any]) -> Any:
    import reasoning_gym

    try:
        return reasoning_gym.create_dataset(dataset, size=size, seed=seed, **options)
    except (ValueError, TypeError, AssertionError, KeyError) as error:
        raise ConfigError(
            f"reasoning_gym: dataset {dataset!r} with {dict(options)} cannot be made: {error}",
            setting="env_options.dataset",
        ) from error
