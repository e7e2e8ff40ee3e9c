"""What a sampler is to a worker: policy versions in, token ids with the logprobs they were really sampled with out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rlbuffer.records import PolicyVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One sampled continuation of a prompt."""

    tokens: NDArray[np.int32]
    """[C] int32, C >= 1 unless aborted; with the end token when it was sampled."""
    logprobs: NDArray[np.float32]
    """[C] float32; log-probability of each token in the distribution it was drawn from, temperature included."""
    finish_reason: str
    """``stop`` (an end token), ``length`` (the limit), ``abort`` (told to stop: not to be trained on)."""
    policy_version: int
    """The version that sampled every token."""


class Sampler(Protocol):
    """Generates tokens with one policy version at a time. Used from one thread."""

    @property
    def version(self) -> int:
        """The policy version that serves now; -1 before the first load."""

    @property
    def vocab_size(self) -> int:
        """Token ids that the loaded model knows are below this; 0 before the first load."""

    def load(self, policy: PolicyVersion) -> None:
        """Serves `policy` from now on.

        Raises:
            WeightsError: the weights are missing, not those announced, or do not fit the model. Everything is checked
                before the model is touched: the version that served before goes on serving.
        """

    def sample(
        self,
        prompts: Sequence[NDArray[np.int32]],
        *,
        group_size: int,
        max_new_tokens: int,
        temperature: float,
        eos_token_ids: Sequence[int],
        stopped: Callable[[], bool] | None = None,
    ) -> list[list[Completion]]:
        """Samples `group_size` completions of every prompt, all together. -> one list per prompt, in order.

        Shapes: each prompt [P] int32, P >= 1, lengths may differ.

        `stopped` is asked now and then; once it says True the unfinished completions come back as ``abort``.
        """
