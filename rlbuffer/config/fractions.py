"""Settings that several rooms ask for by name: a fraction of something, fixed or along the run's steps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

Points = tuple[tuple[int, float], ...]
"""A fraction scheduled over steps: (step, fraction), linear in between, constant before the first and after the last
one."""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(value: Any) -> float:
    """`value` as a float; a variable of the environment writes one as text. NaN where it is none."""
    try:
        return float(value) if isinstance(value, str) or _is_number(value) else math.nan
    except ValueError:
        return math.nan


def read_flat(value: Any) -> str | float:
    """`keep`, `drop` or a fraction."""
    if value in ("keep", "drop"):
        return str(value)
    number = _number(value)
    if not 0 <= number <= 1:
        raise ValueError("must be keep, drop or a fraction between 0 and 1")
    return number


def read_budget(value: Any) -> float | Points:
    """A fraction, or points of one."""
    number = _number(value)
    if not math.isnan(number):
        if not 0 < number <= 1:
            raise ValueError("must be above 0 and at most 1")
        return number
    points = list(value) if isinstance(value, list | tuple) else []
    if not points or not all(map(_is_point, points)):
        raise ValueError("must be a fraction, or a list of [step, fraction]")
    steps, fractions = zip(*points, strict=True)
    if steps[0] < 1 or any(later <= step for step, later in itertools.pairwise(steps)):
        raise ValueError("must name steps from 1 on, in ascending order")
    if not all(0 <= fraction <= 1 for fraction in fractions):
        raise ValueError("must hold fractions between 0 and 1")
    if not any(fractions):
        raise ValueError("is 0 at every step: leave the env out")
    return tuple((int(step), float(fraction)) for step, fraction in points)


def _is_point(value: Any) -> bool:
    is_pair = isinstance(value, list | tuple) and len(value) == 2 and all(map(_is_number, value))
    return is_pair and math.isfinite(value[0]) and value[0] == int(value[0])


def fraction_at(budget: float | Sequence[Sequence[float]], step: int) -> float:
    """The value of a budget, fixed or scheduled, at a step.

    Example:
        >>> [fraction_at(((10, 0.2), (20, 0.4)), step) for step in (1, 10, 15, 99)]
        [0.2, 0.2, 0.30000000000000004, 0.4]
    """
    if isinstance(budget, int | float):
        return float(budget)
    before, after = budget[0], budget[-1]
    for point in budget:
        if point[0] <= step:
            before = point
        else:
            after = point
            break
    if before[0] >= after[0] or step <= before[0]:
        return float(before[1])
    return float(before[1] + (after[1] - before[1]) * (step - before[0]) / (after[0] - before[0]))


def budgets_at(budgets: Mapping[str, float | Sequence[Sequence[float]]], step: int) -> dict[str, float]:
    """env -> fraction at `step`."""
    return {env: fraction_at(budget, step) for env, budget in budgets.items()}
