"""The result of an evaluation in words. An older one lacks what came with several rollouts of a prompt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlbuffer.state.text import plural

APART = {"timed_out": "timed out", "too_long": "too long for the context", "failed": "failed and not counted"}
"""Number of a result -> what is said of so many rollouts."""


def mean_of(result: Mapping[str, Any]) -> str:
    """The mean reward, with its standard error where there is one.

    Example:
        >>> mean_of({"reward/mean": 0.5, "reward/error": 0.1, "samples": 1}), mean_of({"reward/mean": 1, "samples": 4})
        ('mean 0.500 ± 0.100', 'mean@4 1.000')
    """
    samples = result.get("samples", 1)
    name = "mean" if samples == 1 else f"mean@{samples}"
    error = f" ± {result['reward/error']:.3f}" if "reward/error" in result else ""
    return f"{name} {result['reward/mean']:.3f}{error}"


def counts_of(result: Mapping[str, Any]) -> str:
    """What the mean is over, what of it ran into a limit, what failed, and pass@k for the largest k.

    Example:
        >>> counts_of({"prompts": 8, "samples": 1, "rollouts": 8, "pass@1/exact": 0.5})
        '8 prompts'
        >>> counts = {"prompts": 8, "samples": 4, "rollouts": 31, "failed": 1, "timed_out": 3}
        >>> counts_of({"pass@1/exact": 0.5, "pass@4/exact": 0.75, **counts})
        '8 prompts, 31 rollouts, 3 timed out, 1 failed and not counted, pass@4/exact 0.750'
    """
    samples, rollouts = result.get("samples", 1), result.get("rollouts", 0)
    prompts = result.get("prompts", rollouts)
    parts = [plural(prompts, "prompt"), *([plural(rollouts, "rollout")] if rollouts != prompts else [])]
    parts += [f"{result[name]} {words}" for name, words in APART.items() if result.get(name)]
    if samples != 1:
        parts += [f"{name} {value:.3f}" for name, value in result.items() if name.startswith(f"pass@{samples}/")]
    return ", ".join(parts)
