"""Lengths of rollouts by powers of two, as the ledger counts what was trained and what was dropped."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby


def bucket_of(length: int) -> int:
    """The exponent of the smallest power of two that is not below a length in tokens.

    Example:
        >>> [bucket_of(length) for length in (1, 2, 64, 65, 128)]
        [0, 1, 6, 7, 7]
    """
    return max(length - 1, 0).bit_length()


def by_bucket(lengths: Iterable[int]) -> dict[int, tuple[int, int]]:
    """Bucket -> (rollouts, tokens), the shortest first."""
    buckets = ((bucket, list(its)) for bucket, its in groupby(sorted(lengths), bucket_of))
    return {bucket: (len(its), sum(its)) for bucket, its in buckets}


def in_words(lengths: Iterable[int]) -> str:
    """The same as the server keeps it: bucket, rollouts and tokens of each, with a space between two of them."""
    return " ".join(f"{bucket} {rollouts} {tokens}" for bucket, (rollouts, tokens) in by_bucket(lengths).items())
