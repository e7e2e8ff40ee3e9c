"""Mean and spread of values that come in parts: what is summed up once is not looked at again.

Source: Chan, Golub and LeVeque 1979, Updating formulae and a pairwise algorithm for computing sample variances.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import reduce

Moments = tuple[int, float, float]
"""Number of values, their mean, and the sum of squared distances from it."""
NOTHING: Moments = (0, 0.0, 0.0)


def moments_of(values: Sequence[float]) -> Moments:
    """The moments of some values.

    Example:
        >>> moments_of([1.0, 2.0, 3.0])
        (3, 2.0, 2.0)
    """
    if not values:
        return NOTHING
    mean = sum(values) / len(values)
    return len(values), mean, sum((value - mean) ** 2 for value in values)


def merged(parts: Iterable[Moments]) -> Moments:
    """The moments of all parts together.

    Example:
        >>> merged([moments_of([1.0]), moments_of([2.0, 3.0])])
        (3, 2.0, 2.0)
    """
    return reduce(_both, parts, NOTHING)


def spread(moments: Moments) -> float | None:
    """Standard deviation with n - 1; None of less than two values."""
    count, _, squares = moments
    return math.sqrt(squares / (count - 1)) if count > 1 else None


def _both(one: Moments, other: Moments) -> Moments:
    (n, mean, squares), (m, theirs, more) = one, other
    if not n or not m:
        return other if not n else one
    off = theirs - mean
    return n + m, mean + off * m / (n + m), squares + more + off * off * n * m / (n + m)
