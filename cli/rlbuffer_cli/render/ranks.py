"""The ranks of a trained step side by side: the slow one stands out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlbuffer_cli.render.text import sparkline

SLOW_SHARE = 1.25
"""A rank is called slow when its passes take this many times as long as the middle rank's passes; of an even number the
faster one of the two in the middle: of two ranks the slow one is not the middle."""
SLOW_PASS_SECONDS = 0.01
"""Seconds by which they must also be longer: a smaller difference is chance."""


def rank_line(ranks: Sequence[Mapping[str, float]]) -> str:
    """A bar for each rank's own seconds: its passes, without what it waits for others. Those far above are `slow`."""
    own = [rank.get("forward", 0.0) + rank.get("backward", 0.0) for rank in ranks]
    most, usual = max(own) or 1.0, sorted(own)[(len(own) - 1) // 2]
    slow = [seconds > SLOW_SHARE * usual and seconds - usual > SLOW_PASS_SECONDS for seconds in own]
    return "ranks " + " ".join(
        f"{rank} {sparkline([seconds / most])}{' slow' if is_slow else ''}"
        for rank, (seconds, is_slow) in enumerate(zip(own, slow, strict=True))
    )
