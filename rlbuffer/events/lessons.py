"""Whether the newest steps teach anything: the one place that says so of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from rlbuffer.events.history import Committed
from rlbuffer.narration import waiting

LAST_STEPS, LEAST_STEPS = 20, 10
"""Steps that are looked at, and from how many on something is said."""
MOST_FLAT = 0.9
"""Share of flat groups from which a run learns nothing."""


def last_steps(newest_first: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The newest steps among records of the history."""
    return list(islice((r for r in newest_first if r.get("event") == Committed.event), LAST_STEPS))


def mean_reward(steps: Iterable[Mapping[str, Any]]) -> float | None:
    """Mean over the rollouts of these steps; None where none is scored."""
    scored = [(r["reward"], r["rollouts"]) for r in steps if r["reward"] is not None]
    return sum(reward * rollouts for reward, rollouts in scored) / sum(n for _, n in scored) if scored else None


def nothing_to_learn(steps: Iterable[Mapping[str, Any]]) -> str:
    """The sentence about a run of whose newest steps nearly all groups are flat; "" of another one, and where it is not
    known. Takes :func:`last_steps`."""
    steps = [r for r in steps if isinstance(r.get("flat"), int)]
    flat, groups = sum(r["flat"] for r in steps), sum(r["groups"] for r in steps)
    if len(steps) < LEAST_STEPS or flat < MOST_FLAT * groups:
        return ""
    return waiting.for_flat(flat, groups, len(steps), mean_reward(steps))
