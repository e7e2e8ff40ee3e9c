"""The drift of the policy from the one that sampled, over all trained tokens of a step and all ranks.

Mean and extremes are exact. The 99th percentile comes from a histogram with 16 bins per power of ten, so that ranks
exchange a hundred counts instead of every token: it is the upper edge of its bin, at most 15.5 % too far from 0 (nats).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

BINS_PER_DECADE = 16
SMALLEST, DECADES = 1e-5, 6
EDGES = SMALLEST * 10 ** (torch.arange(BINS_PER_DECADE * DECADES + 1, dtype=torch.float64) / BINS_PER_DECADE)
"""[97] nats; upper edges of the bins but the last, which is open: above 10 nats."""


class Ratios:
    """Ratios, probability under the policy over probability under the inference policy, of one rank's tokens."""

    def __init__(self) -> None:
        self._count = 0
        self._sum = 0.0
        self._least, self._most = math.inf, -math.inf
        self._bins = torch.zeros(len(EDGES) + 1, dtype=torch.int64)

    def add(self, difference: Tensor) -> None:
        """Takes in tokens. Shapes: [N], logprob less inference logprob. Units: nats."""
        if not len(difference):
            return
        drift = difference.detach().double().cpu()
        self._count += len(drift)
        self._sum += float(drift.exp().sum())
        self._least, self._most = min(self._least, float(drift.min())), max(self._most, float(drift.max()))
        self._bins += torch.bincount(torch.bucketize(drift.abs(), EDGES), minlength=len(self._bins))

    def counts(self) -> dict[str, Any]:
        """The counts that the ranks exchange. JSON types."""
        return {
            "count": self._count,
            "sum": self._sum,
            "extremes": [self._least, self._most] if self._count else [],
            "bins": self._bins.tolist(),
        }


def ratios_of(counts: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Mean, min and max of the ratio over all ranks, and p99, the factor that 99 % of tokens stay within; {} of none.

    Example, where 99 % of ratios are between 1 / 1.002 and 1.002:
        >>> ratios = Ratios()
        >>> ratios.add(torch.tensor([0.0, 0.002, -0.002]))
        >>> {name: round(value, 4) for name, value in ratios_of([ratios.counts()]).items()}
        {'mean': 1.0, 'min': 0.998, 'max': 1.002, 'p99': 1.002}
    """
    total = sum(c["count"] for c in counts)
    if not total:
        return {}
    bins = torch.tensor([c["bins"] for c in counts]).sum(0).cumsum(0)
    index = int(torch.searchsorted(bins, math.ceil(0.99 * total)))
    extremes = [c["extremes"] for c in counts if c["extremes"]]
    least, most = min(e[0] for e in extremes), max(e[1] for e in extremes)
    p99 = min(float(EDGES[index]) if index < len(EDGES) else math.inf, max(abs(least), abs(most)))
    return {
        "mean": sum(c["sum"] for c in counts) / total,
        "min": _exp(least),
        "max": _exp(most),
        "p99": _exp(p99),
    }


def _exp(nats: float) -> float:
    return math.exp(min(nats, 700.0))
