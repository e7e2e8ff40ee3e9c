"""Counts of values in fixed buckets, as Prometheus has them, and values as JSON has them."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

SECONDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
SHORT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
AGES = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0)
LENGTHS = (16.0, 64.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 32768.0, 65536.0)
REWARDS = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)


class Histogram:
    """Values by bucket, and their sum.

    Example:
        >>> histogram = Histogram((1.0, 2.0))
        >>> for value in (0.5, 1.0, 3.0):
        ...     histogram.add(value)
        >>> histogram.as_object()
        {'buckets': {'1.0': 2, '2.0': 2, '+Inf': 3}, 'sum': 4.5, 'count': 3}
    """

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Counts a value into the first bucket whose bound is not below it."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def add_all(self, values: Iterable[float]) -> None:
        """Counts several values, each distinct one once."""
        for value, times in Counter(values).items():
            self.add(value, times)

    @property
    def sum(self) -> float:
        """Sum of the values."""
        return self._sum

    def buckets(self) -> Iterator[tuple[str, int]]:
        """(bound, values up to it); the last bound is ``+Inf``."""
        return zip([*map(str, self._bounds), "+Inf"], accumulate(self._counts), strict=True)

    def as_object(self) -> dict[str, object]:
        """The same for JSON."""
        buckets = dict(self.buckets())
        return {"buckets": buckets, "sum": self._sum, "count": buckets["+Inf"]}


def as_json(value: Any) -> Any:
    """A value as JSON may hold it; a number that is not finite becomes None."""
    if isinstance(value, Histogram):
        return value.as_object()
    if isinstance(value, Mapping):
        return {str(name): as_json(inner) for name, inner in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
