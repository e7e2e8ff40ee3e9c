"""What becomes of the groups of a run, recorded or estimated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from rlbuffer.records.info import GroupInfo
from rlbuffer.state.lengths import LONG, distance


@dataclass(frozen=True, slots=True)
class Fate:
    """One group, once it is decided."""

    tokens: int
    length: float
    """Mean tokens of its rollouts."""
    age: int | None = None
    """At the step that trained it; None of one that was dropped."""
    reason: str = ""
    """Why it was dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A run in figures."""

    steps_per_hour: float
    trained_tokens_per_hour: float
    dropped: float
    """Share of the groups."""
    tokens_wasted: float
    """Share of the tokens."""
    reasons: Mapping[str, int] = field(default_factory=dict)
    """Reason -> groups."""
    age: float
    """Mean over trained groups, in policy versions."""
    wait: float
    """Share of the time in which the trainer waits for a step."""
    distance: float
    """Of the lengths trained from those sampled (Kolmogorov-Smirnov)."""
    long_trained: float
    """Trained share of the longest tenth."""

    def as_object(self) -> dict[str, Any]:
        """As JSON may hold it."""
        return asdict(self) | {"reasons": dict(self.reasons)}


def oldest_of(infos: Sequence[GroupInfo]) -> int:
    """The oldest version of a token of these pushes."""
    return min(rollout.min_version for info in infos for rollout in info.rollouts)


def outcome_of(fates: Sequence[Fate], *, steps: int, seconds: float, waited: float) -> Outcome:
    """`waited` of `seconds` the trainer had nothing to train in."""
    trained, hours = [fate for fate in fates if fate.age is not None], max(seconds, 1e-9) / 3600
    lengths = [fate.length for fate in fates]
    least = float(np.quantile(lengths, LONG)) if lengths else 0.0
    long = [fate for fate in fates if fate.length >= least]
    tokens, all_tokens = sum(fate.tokens for fate in trained), sum(fate.tokens for fate in fates)
    return Outcome(
        steps_per_hour=steps / hours,
        trained_tokens_per_hour=tokens / hours,
        dropped=1 - len(trained) / max(1, len(fates)),
        tokens_wasted=1 - tokens / max(1, all_tokens),
        reasons=dict(Counter(fate.reason for fate in fates if fate.age is None)),
        age=float(np.mean([fate.age for fate in trained])) if trained else 0.0,
        wait=waited / max(seconds, 1e-9),
        distance=distance([fate.length for fate in trained], lengths),
        long_trained=sum(fate.age is not None for fate in long) / max(1, len(long)),
    )
