"""The records of an env: a prompt, its score, a skip."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The prompt that a group shares."""

    prompt_id: str
    """Names the prompt to people; the same prompt met again has the same id."""
    tokens: NDArray[np.int32]
    """[P] int32, P >= 1; what the policy is given."""
    answer: Any = None
    """Reference answer; msgpack types only."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The env's own; msgpack types only."""
    place: str = ""
    """Where people find it, such as a file and its line, for messages alone."""

    @property
    def name(self) -> str:
        """Its id and its place."""
        return f"{self.prompt_id} ({self.place})" if self.place else self.prompt_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The earnings of one completion."""

    reward: float | None
    """Finite scalar; None when a scorer adds it: the worker's `needs` then has ``reward``."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Named components."""
    successes: Mapping[str, bool] = field(default_factory=dict)
    """Named verdicts."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """For people who look at the rollout; msgpack types only."""
