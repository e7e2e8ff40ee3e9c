"""Group-relative advantage estimators, by name.

An advantage compares a rollout with the others of its prompt. It is computed once, over all valid rollouts of a closed
group and before any of them is left out, and is the same for every trained token of a rollout. With r the rewards of a
group of n rollouts and r̄ their mean:

========== ============================================ ================================================================
name       advantage                                    source
========== ============================================ ================================================================
rloo       r_i - mean of the others                     Ahmadian et al. 2024, arXiv 2402.14740, section 3
grpo       (r_i - r̄) / (std + 1e-6), std over n - 1     Shao et al. 2024 (DeepSeekMath), arXiv 2402.03300, section 4.1
dr_grpo    r_i - r̄                                      Liu et al. 2025, arXiv 2503.20783, section 3
max_rl     (r_i - r̄) / r̄, 0 where r̄ <= 0                Tajwar et al. 2026 (MaxRL), arXiv 2602.02710
opo        r_i - mean weighted by sampled length        Hao et al. 2025, arXiv 2505.23585, section 3
reinforce  r_i                                          Williams 1992, without a baseline
========== ============================================ ================================================================

A group of one gets 0 in all of them: there is nothing to compare it with.
"""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlbuffer.errors import ConfigError, InvalidRollout

GRPO_EPSILON = 1e-6
"""Added to the standard deviation, so that a nearly flat group does not explode."""

Rewards = NDArray[np.float64]
Estimator = Callable[[Rewards, Rewards | None], Rewards]


def rloo(rewards: Rewards, lengths: Rewards | None = None) -> Rewards:
    """r_i - (sum - r_i) / (n - 1): the mean of the others is an unbiased baseline."""
    others: Rewards = (rewards.sum() - rewards) / (len(rewards) - 1)
    return rewards - others


def grpo(rewards: Rewards, lengths: Rewards | None = None) -> Rewards:
    """(r_i - mean) / (std + 1e-6), with the standard deviation over n - 1."""
    std = float(rewards.std(ddof=1))
    return dr_grpo(rewards) / (std + GRPO_EPSILON)


def dr_grpo(rewards: Rewards, lengths: Rewards | None = None) -> Rewards:
    """r_i - mean: no division, so that easy and hard prompts are not weighted up."""
    return rewards - float(rewards.mean())


def max_rl(rewards: Rewards, lengths: Rewards | None = None) -> Rewards:
    """(r_i - mean) / mean, zeros where the mean is not positive: prompts count by the inverse of their pass rate."""
    mean = float(rewards.mean())
    return (rewards - mean) / mean if mean > 0 else np.zeros_like(rewards)


def opo(rewards: Rewards, lengths: Rewards | None = None) -> Rewards:
    """r_i - sum(length_j r_j) / sum(length_j): the baseline of least variance when gradients grow with length."""
    if lengths is None:
        raise InvalidRollout("advantage opo: lengths are required")
    total = float(lengths.sum())
    baseline = float(lengths @ rewards) / total if total > 0 else float(rewards.mean())
    return rewards - baseline


def reinforce(rewards: Rewards, lengths: Rewards | None = None) -> Rewards:
    """r_i: no baseline."""
    return rewards.copy()


ESTIMATORS: dict[str, Estimator] = {
    "rloo": rloo,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "max_rl": max_rl,
    "opo": opo,
    "reinforce": reinforce,
}
"""Every estimator by its name in ``batcher.advantage``."""


def advantage(name: str, rewards: ArrayLike, *, lengths: ArrayLike | None = None, **info: Any) -> Rewards:
    """The advantages of one group's rollouts.

    Shapes: ``rewards`` and ``lengths`` [n]; the result is [n] float64. ``lengths`` are sampled tokens (only `opo` looks
    at them). Further keywords are facts of the group for estimators that want them; the built-in ones do not.

    Raises:
        ConfigError: no estimator has this name.
        InvalidRollout: a reward is not finite, shapes differ, or `opo` got no lengths.

    Example:
        >>> advantage("rloo", [0.0, 0.5, 1.0]).tolist()
        [-0.75, 0.0, 0.75]
    """
    estimator = ESTIMATORS.get(name)
    if estimator is None:
        near = get_close_matches(name, ESTIMATORS, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ConfigError(
            f"advantage {name!r} is not an estimator: {', '.join(ESTIMATORS)}.{hint}", setting="batcher.advantage"
        )
    values = np.asarray(rewards, dtype=np.float64)
    if values.ndim != 1 or not np.isfinite(values).all():
        raise InvalidRollout(f"advantage {name}: rewards must be finite numbers of shape [n], got {rewards!r}")
    weights = None if lengths is None else np.asarray(lengths, dtype=np.float64)
    if weights is not None and weights.shape != values.shape:
        raise InvalidRollout(f"advantage {name}: {weights.size} lengths do not match {len(values)} rewards")
    if len(values) <= 1:
        return np.zeros_like(values)
    return estimator(values, weights)
