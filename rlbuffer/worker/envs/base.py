"""What an env is to a worker: prompts in a fixed order, and a score for whatever a policy answers.

An env speaks token ids only. Nothing is rendered to text and tokenised again between the sampler and the trainer: that
round trip is not the identity, and a logprob would then belong to a token that was never sampled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What a group shares."""

    prompt_id: str
    """Names the prompt to people; the same prompt met again has the same id."""
    tokens: NDArray[np.int32]
    """[P] int32, P >= 1; what the policy is given."""
    answer: Any = None
    """Reference answer; msgpack types only."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The env's own; msgpack types only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What one completion earned."""

    reward: float
    """Finite scalar."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Named components."""
    successes: Mapping[str, bool] = field(default_factory=dict)
    """Named verdicts."""


class Env(Protocol):
    """A named source of tasks. Ticket n of the env samples ``prompt(n)``, on whichever worker holds it.

    An instance serves one worker process; `score` may be slow, and an exception from it costs that group only.
    """

    @property
    def name(self) -> str:
        """`[A-Za-z0-9_.-]{1,64}`: budgets, tickets and the ledger go by it."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below this; a model with a smaller vocabulary is refused."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Sampling one of these ends a completion; it is part of it."""

    @property
    def max_new_tokens(self) -> int:
        """Longest completion, in tokens, unless the worker's settings say otherwise."""

    def prompt(self, number: int) -> Prompt:
        """The prompt of ticket `number` (from 0): the same in every process, so that a ticket can be taken over."""

    def score(self, prompt: Prompt, tokens: NDArray[np.int32], *, finish_reason: str) -> Score:
        """Scores one completion.

        Shapes: ``tokens`` [C] int32, the end token included when ``finish_reason`` is ``stop``; not included (and
        never sampled) when it is ``length``.
        """

    def render(self, tokens: NDArray[np.int32]) -> str:
        """Tokens as text for people; nothing computes with it."""
