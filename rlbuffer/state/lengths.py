"""Whether what is trained is as long as what is sampled: long rollouts take longer, and are too old more often.

Steps that pass while a group is sampled make it older. Where `max_age` steps take less time than the slowest groups,
those are never trained, whatever the order: a run forgets its longest answers, and nothing else shows it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection

import numpy as np
from numpy.typing import ArrayLike

REMEMBERED = 1000
"""Groups of an env whose fate is remembered."""
LEAST = 100
"""Groups from which on a verdict is given: ten of them are the longest tenth."""
LEAST_DISTANCE = 0.05
"""Distance below which nothing is said. Steps that wait for slow groups come to 0.01."""
CERTAIN = 1.63
"""Kolmogorov and Smirnov's critical value at 1 %."""
LONG = 0.9
"""Quantile from which on a group counts as long."""


def distance(trained: ArrayLike, sampled: ArrayLike) -> float:
    """Kolmogorov and Smirnov's: the largest difference between the shares of both that are at most so long, 0-1.

    Example:
        >>> distance([1, 2, 3], [1, 2, 3, 40])
        0.25
    """
    points = np.unique(np.asarray(sampled, np.float64))
    shares = []
    for lengths in (trained, sampled):
        ordered = np.sort(np.asarray(lengths, np.float64))
        shares.append(np.searchsorted(ordered, points, side="right") / max(1, len(ordered)))
    return float(np.abs(shares[0] - shares[1]).max(initial=0.0))


class Lengths:
    """The last groups of an env: their mean tokens a rollout, and whether they were trained or came too late."""

    def __init__(self) -> None:
        self._groups: deque[tuple[float, bool]] = deque(maxlen=REMEMBERED)

    def add(self, lengths: Collection[float], *, is_trained: bool) -> None:
        """Takes in groups by the mean tokens of their rollouts."""
        self._groups += [(length, is_trained) for length in lengths]

    @property
    def distance(self) -> float | None:
        """Of what is trained from what is sampled; None where nothing was trained."""
        trained = [length for length, is_trained in self._groups if is_trained]
        return distance(trained, [length for length, _ in self._groups]) if trained else None

    @property
    def long_trained(self) -> float | None:
        """Trained share of the longest tenth; None where there are no groups."""
        if not self._groups:
            return None
        least = float(np.quantile([length for length, _ in self._groups], LONG))
        return float(np.mean([is_trained for length, is_trained in self._groups if length >= least]))

    @property
    def are_lost(self) -> bool:
        """True when long groups are lost, and not by chance: half as many of the longest tenth train as of all."""
        distance, long_trained = self.distance, self.long_trained
        if distance is None or long_trained is None or len(self._groups) < LEAST:
            return False
        share = float(np.mean([is_trained for _, is_trained in self._groups]))
        by_chance = CERTAIN * math.sqrt((1.0 - share) / (share * len(self._groups)))
        return distance >= max(LEAST_DISTANCE, by_chance) and long_trained <= share / 2
