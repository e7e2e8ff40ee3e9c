"""One turn of a leader, as a pure function: what it tells the batcher, and whether it asks for a step.

The leader carries out what it answers; what-if answers it on a clock of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rlbuffer.batcher.batcher import Batcher
from rlbuffer.records.step_plan import Decision, Drop


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnResult:
    """What a leader does next."""

    drops: tuple[Drop, ...]
    """To be carried out first."""
    allowances: Mapping[str, int]
    """env -> tickets that may be out then."""
    decision: Decision | None
    """None where no step may be committed."""


def take_turn(
    batcher: Batcher,
    *,
    step: int,
    published: Mapping[str, int],
    under_way: Mapping[str, Mapping[int, int]],
    is_held: bool,
    world_size: int,
    now: float,
) -> TurnResult:
    """Decides about `step`, the one after the last committed.

    Args:
        published: adapter -> version that can be sampled from; -1 where none was announced.
        under_way: env -> number of a ticket that lives -> version with which it was taken; {} where nobody asks.
        is_held: the step may not be committed yet, or cannot be full.
        world_size: ranks that a plan deals rows to.
        now: seconds, on the batcher's clock.
    """
    for adapter in {"", *published}:
        batcher.set_published(published.get(adapter, -1), adapter)
    batcher.set_under_way(under_way)
    if is_held:
        return TurnResult(
            drops=batcher.sweep(step), allowances=batcher.allowances(step, world_size=world_size), decision=None
        )
    decision = batcher.next(step, world_size=world_size, now=now, rng=np.random.default_rng(step))
    return TurnResult(drops=decision.drops, allowances=decision.allowances, decision=decision)
