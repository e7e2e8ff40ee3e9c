"""Group-relative advantage estimators, by name.

An advantage compares a rollout with the others of its prompt. It is computed once, over all valid rollouts of a closed
group and before any of them is left out, and is the same for every trained token of a rollout. With r the rewards of a
group of n rollouts and r̄ their mean:

========== ============================================ ================================================================
name       advantage                                    source
========== ============================================ ================================================================
rloo       r_i - mean of the others                     Ahmadian et al. 2024, arXiv 2402.14740, section 3
grpo       (r_i - r̄) / (std + e), std over n - 1        Shao et al. 2024 (DeepSeekMath), arXiv 2402.03300, section 4.1
dr_grpo    r_i - r̄                                      Liu et al. 2025, arXiv 2503.20783, section 3
max_rl     (r_i - r̄) / r̄, 0 where r̄ = 0, for r >= 0     Tajwar et al. 2026 (MaxRL), arXiv 2602.02710
opo        r_i - mean weighted by sampled length        Hao et al. 2025, arXiv 2505.23585, section 3
reinforce  r_i                                          Williams 1992, without a baseline
========== ============================================ ================================================================

``length_penalty`` is rloo of rewards that a long answer has less of: r_i (1 - a s(z_i)) where r_i > 0, and r_i itself
elsewhere, so that being short never pays for a wrong answer. s is the sigmoid, a = 0.1, and z_i how many standard
deviations the rollout is longer than the mean of the rollouts with a positive reward. Source: Arora and Zanette 2025,
Training language models to reason efficiently, arXiv 2502.04463, section 3.1.

What guards a division is relative to the size of the rewards, which is the largest of them, either sign: e is 1e-6,
times the size where that is below 1. So rewards a thousandth as large have the same `grpo`. Rewards within 1e-6 of the
size of each other count as equal, and up to 1e-6 of it as 0: `grpo` gives 0 to equal ones, and a positive reward above
is one beyond that. ``max_rl`` divides by the mean, which means nothing where rewards of both signs cancel: it refuses
negative ones by name, and the group is dropped.

A group of one has nothing to be compared with and gets 0, but in ``reinforce``, which compares nothing: its reward.

An estimator of the user's own is a callable named by a dotted path, ``package.module:name`` (a class is called without
arguments first)::

    def estimator(rewards: numpy.ndarray, lengths: numpy.ndarray, group: Mapping[str, Any]) -> numpy.ndarray: ...

It gets copies of the rewards and of the sampled tokens, [n] float64 both, and what the batcher knows of the group (see
`rlbuffer.batcher.step_plan.group_facts`), and gives [n] finite numbers. It must be deterministic: the same group must
get the same advantages wherever the batcher runs, or a standby that takes over would plan another step. It runs in the
batcher and sees no payloads. One that fails, or gives another number of numbers, is a ConfigError, which stops the
batcher, and every rank hears it. Where a number is not finite or beyond :data:`MAX_ADVANTAGE`, whoever computed it, the
group cannot be trained: it is dropped, and the others go on. Where it fails for a group of one, or its number there is
not finite (a deviation of one, a mean of no others), it is one that compares: that group gets 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlbuffer.config.batcher import compares
from rlbuffer.config.imports import defined_at, failed_in, load, refused
from rlbuffer.errors import ConfigError, InvalidRollout
from rlbuffer.records.checks import MAX_NUMBER
from rlbuffer.records.info import FLAT_WITHIN
from rlbuffer.state.text import did_you_mean, plural

GRPO_EPSILON = 1e-6
"""Added to the standard deviation; times the size of the rewards where that is below 1."""
BATCH_EPSILON = 1e-4
"""The same for the deviation of a step's rewards; TRL's."""
MAX_ADVANTAGE = 10 * MAX_NUMBER
"""Largest advantage, either sign: the difference of any two rewards is far below it."""
LENGTH_ALPHA = 0.1
"""Share of a reward that an answer of endless length loses; the source tries 0.05 to 0.4."""

Rewards = NDArray[np.float64]
Estimator = Callable[[Rewards, Rewards | None], Rewards]


def rloo(rewards: Rewards, lengths: Rewards | None = None) -> Rewards:
    """``r_i - (sum - r_i) / (n - 1)``: the mean of the others is an unbiased baseline."""
    others: Rewards = (rewards.sum(-1, keepdims=True) - rewards) / (rewards.shape[-1] - 1)
    return rewards - others


def grpo(rewards: Rewards, lengths: Rewards | None = None) -> Rewards:
    """``(r_i - mean) / (std + 1e-6 min(1, largest |r|))``, with the standard deviation over n - 1; zeros where the
    rewards count as equal: within 1e-6 of the largest of each other."""
    std = _deviation(rewards, GRPO_EPSILON)
    return np.divide(dr_grpo(rewards), std, out=np.zeros_like(rewards), where=std > 0)


def dr_grpo(rewards: Rewards, lengths: Rewards | None = None) -> Rewards:
    """``r_i - mean``: no division, so that easy and hard prompts are not weighted up."""
    mean: Rewards = rewards.mean(-1, keepdims=True)
    return rewards - mean


def max_rl(rewards: Rewards, lengths: Rewards | None = None) -> Rewards:
    """``(r_i - mean) / mean``, zeros where all are 0, NaN where one is negative: prompts count by the inverse of their
    pass rate."""
    mean: Rewards = rewards.mean(-1, keepdims=True)
    advantages = np.divide(rewards - mean, mean, out=np.zeros_like(rewards), where=mean > 0)
    return np.where(_are_negative(rewards), np.nan, advantages)


def opo(rewards: Rewards, lengths: Rewards | None = None) -> Rewards:
    """``r_i - sum(length_j r_j) / sum(length_j)``: the baseline of least variance when gradients grow with length."""
    if lengths is None:
        raise InvalidRollout("advantage opo: lengths are required")
    total = float(lengths.sum())
    baseline = float(lengths @ rewards) / total if total > 0 else float(rewards.mean())
    return rewards - baseline


def reinforce(rewards: Rewards, lengths: Rewards | None = None) -> Rewards:
    """``r_i``: no baseline."""
    return rewards.copy()


def length_penalty(rewards: Rewards, lengths: Rewards | None = None) -> Rewards:
    """`rloo` of ``r_i (1 - 0.1 sigmoid((length_i - mean) / std))`` where r_i > 0; mean and std over those rollouts."""
    if lengths is None:
        raise InvalidRollout("advantage length_penalty: lengths are required")
    right = rewards > FLAT_WITHIN * _size(rewards)
    penalized = rewards.copy()
    if right.any():
        spread = float(lengths[right].std())
        z = (lengths[right] - float(lengths[right].mean())) / spread if spread > 0 else np.zeros(int(right.sum()))
        penalized[right] *= 1 - LENGTH_ALPHA / (1 + np.exp(-z))
    return rloo(penalized)


ESTIMATORS: dict[str, Estimator] = {
    "rloo": rloo,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "max_rl": max_rl,
    "opo": opo,
    "reinforce": reinforce,
    "length_penalty": length_penalty,
}
"""Every estimator by its name in ``batcher.advantage``."""
POSITIVE = frozenset({"max_rl"})
"""Those whose formula needs rewards that are not negative."""
BY_ROWS = frozenset({"rloo", "grpo", "dr_grpo", "max_rl", "reinforce"})
"""Those that take many groups of one size at once, [groups, n], and give each what it gets alone, to the bit."""


OF_DIFFERENCES = frozenset({"rloo", "grpo", "dr_grpo", "opo"})
"""Those that give 0 to equal rewards. Where rewards differ, they give it to none, or to those at the mean."""


def over_batch(advantages: Rewards, rewards: Rewards) -> Rewards:
    """``advantages / (std of all of a step's rewards over n - 1, + 1e-4 min(1, largest |r|))``: every prompt by the
    same number.

    A group's own deviation weighs up prompts that are nearly solved, or nearly never; the batch's does not. Where all
    rewards are flat nothing is divided.

    Shapes: [n] and [n] float64, the rollouts of a step -> [n]. Source: TRL's ``scale_rewards = "batch"``; Liu et al.
    2025 (Lite PPO), arXiv 2508.08221, section 4.1; REINFORCE++, arXiv 2501.03262, section 3.2, normalises so, too.
    """
    std = float(_deviation(rewards, BATCH_EPSILON)[0]) if len(rewards) > 1 else 0.0
    return advantages / std if std > 0 else advantages


def _size(rewards: Rewards) -> Rewards:
    """The largest reward of each group, either sign."""
    size: Rewards = np.abs(rewards).max(-1, keepdims=True)
    return size


def _deviation(rewards: Rewards, epsilon: float) -> Rewards:
    """The divisor of each group: the standard deviation over n - 1, plus `epsilon`, less for small rewards; 0: flat."""
    size = _size(rewards)
    std: Rewards = rewards.std(-1, ddof=1, keepdims=True) + epsilon * np.minimum(size, 1.0)
    is_flat = np.ptp(rewards, axis=-1, keepdims=True) <= FLAT_WITHIN * size
    return np.where(is_flat, 0.0, std)


def _are_negative(rewards: Rewards) -> NDArray[np.bool_]:
    """True for each group with a reward below 0 that is not a rounded 0."""
    are: NDArray[np.bool_] = rewards.min(-1, keepdims=True) < -FLAT_WITHIN * _size(rewards)
    return are


Loaded = Callable[[Rewards, Rewards | None, Mapping[str, Any]], Rewards]
"""An estimator, built in or the user's own: rewards, lengths and facts of the group in, checked advantages out."""


def load_estimator(name: str, *, setting: str = "batcher.advantage") -> Loaded:
    """The estimator of this name.

    Args:
        name: of a built-in one, or ``package.module:name``.
        setting: where the name stands, for the message.

    Raises:
        ConfigError: there is none, or it cannot be imported.
    """
    built_in = ESTIMATORS.get(name)
    if built_in is not None:
        return lambda rewards, lengths, group: built_in(rewards, lengths)
    if ":" not in name:
        hint = did_you_mean(name, ESTIMATORS)
        raise ConfigError(f"advantage {name!r} is not an estimator: {', '.join(ESTIMATORS)}.{hint}", setting=setting)
    estimator = load(setting, name, "(rewards, lengths, group)")

    def checked(rewards: Rewards, lengths: Rewards | None, group: Mapping[str, Any]) -> Rewards:
        for_whom = f" for group {group['group_id']} of env {group['env']}" if "group_id" in group else ""
        try:
            # Copies: what it does with them must not change what is trained.
            given = estimator(rewards.copy(), None if lengths is None else lengths.copy(), dict(group))
            values = np.array(given, dtype=np.float64)
        except (Exception, SystemExit) as error:  # it is not our code
            if len(rewards) == 1:
                return np.zeros_like(rewards)
            raise refused(setting, name, f"failed{for_whom}: {failed_in(estimator, error)}") from error
        if values.shape != rewards.shape:
            what = f"numbers of shape {list(values.shape)}"
            whole = plural(len(rewards), "rollout")
            raise refused(
                setting, name, f"gave {what}{for_whom}: it must be one for each of {whole}{defined_at(estimator)}"
            )
        return values if len(rewards) > 1 else np.where(np.isfinite(values), values, 0.0)

    return checked


def advantage(name: str, rewards: ArrayLike, *, lengths: ArrayLike | None = None) -> Rewards:
    """The advantages of one group's rollouts.

    Shapes: ``rewards`` and ``lengths`` [n]; the result is [n] float64. ``lengths`` are sampled tokens (`opo` and
    `length_penalty` need them). An estimator of the user's own, named ``package.module:name``, gets no facts of a group
    here: there is none.

    Raises:
        ConfigError: no estimator has this name, or the user's own cannot be imported or failed.
        InvalidRollout: a reward is not finite, or of a sign that the estimator cannot take, shapes differ, an estimator
            that needs lengths got none, or an advantage is not finite or beyond 1e13, either sign.

    Example:
        >>> advantage("rloo", [0.0, 0.5, 1.0]).tolist()
        [-0.75, 0.0, 0.75]
    """
    return estimate(load_estimator(name), name, rewards, lengths, {})


def estimate(
    estimator: Loaded, name: str, rewards: ArrayLike, lengths: ArrayLike | None, group: Mapping[str, Any]
) -> Rewards:
    """The advantages by an estimator that is loaded; otherwise as :func:`advantage`."""
    values = np.asarray(rewards, dtype=np.float64)
    check_rewards(name, values)
    weights = None if lengths is None else np.asarray(lengths, dtype=np.float64)
    if weights is not None and weights.shape != values.shape:
        raise InvalidRollout(f"advantage {name}: {weights.size} lengths do not match {len(values)} rewards")
    if not len(values) or (len(values) == 1 and compares(name)):
        return np.zeros_like(values)
    with np.errstate(all="ignore"):  # its results are checked below
        advantages = estimator(values, weights, group)
    check_advantages(name, advantages)
    return advantages


def check_rewards(name: str, rewards: Rewards) -> None:
    """Raises InvalidRollout unless they are finite numbers of shape [n], of a sign that estimator `name` can take."""
    if rewards.ndim != 1 or not np.isfinite(rewards).all():
        raise InvalidRollout(f"advantage {name}: rewards must be finite numbers of shape [n], got {rewards.tolist()!r}")
    if name in POSITIVE and len(rewards) > 1 and _are_negative(rewards)[0]:
        raise InvalidRollout(
            f"advantage {name}: it divides by the mean reward, so no reward may be negative, got "
            f"{float(rewards.min()):g}. Shift the rewards, or choose another estimator, such as rloo"
        )


def check_advantages(name: str, advantages: Rewards) -> None:
    """Raises InvalidRollout when one of them is not finite, or beyond :data:`MAX_ADVANTAGE`."""
    usable = np.abs(advantages) <= MAX_ADVANTAGE
    if not usable.all():
        odd = float(advantages[~usable][0])
        raise InvalidRollout(
            f"advantage {name} is {odd!r}: it must be finite and at most {MAX_ADVANTAGE:g}, either sign"
        )
