"""Lengths of rollouts by powers of two, as the ledger counts what was trained and what was dropped."""

from __future__ import annotations

from collections.abc import Iterable


def bucket_of(length: int) -> int:
    """The exponent of the smallest power of two that is not below a length in tokens.

    Example:
        >>> [bucket_of(length) for length in (1, 2, 64, 65, 128)]
        [0, 1, 6, 7, 7]
    """
    return max(length - 1, 0).bit_length()


def by_bucket(lengths: Iterable[int]) -> dict[int, tuple[int, int]]:
    """Bucket -> (rollouts, tokens), the shortest first."""
    sums: dict[int, tuple[int, int]] = {}
    for length in lengths:
        bucket = bucket_of(length)
        rollouts, tokens = sums.get(bucket, (0, 0))
        sums[bucket] = rollouts + 1, tokens + length
    return dict(sorted(sums.items()))


def in_words(lengths: Iterable[int]) -> str:
    """The same as the server keeps it: bucket, rollouts and tokens of each, with a space between two of them."""
    return " ".join(f"{bucket} {rollouts} {tokens}" for bucket, (rollouts, tokens) in by_bucket(lengths).items())
