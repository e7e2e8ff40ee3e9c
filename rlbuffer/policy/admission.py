"""How many tickets may be out per env: enough to keep steps coming, few enough that little is thrown away.

A group sampled now by policy version v can serve steps up to v + 1 + max_age. Of the steps after the last committed one
that is a window of v + 1 + max_age - last_step, and there is no use for more groups than the window can train:

    tickets out + forming + ready <= G x window,     G = the env's share of a step / its mean group

Simulated over 200 steps, `max_age` + 1 steps' worth of groups in flight lost half of everything as stale; this rule
loses 0 % at max_age 0 and 4-13 % at 1 and 2 with one env. With two envs of which one holds up the steps, newest first,
the other one's surplus took that to 37 %; narrowing its window to one step while the step waits for another env brings
it to 3-9 % at the same speed (tests/property/closed_loop.py).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

START_TICKETS = 8
"""Groups of an env before any is known: enough to keep a few workers busy, few enough to be no loss."""
ANY_ENV = "*"
"""Key of the allowance of every env that is not named: an env without a budget is unknown until it sends a group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvSupply:
    """What an env has, and how far its data reaches."""

    window: int
    """Steps after the last committed one that a group sampled now can serve; <= 0: none."""
    pending: int
    """Groups forming or ready that can still train."""
    share: float
    """Fraction of a step, 0-1, in the budget's unit."""
    mean: tuple[float, float, float] | None
    """Mean group in (budget's unit, tokens, rollouts); None when not one is known."""


def window(*, version: int, max_age: int, last_step: int) -> int:
    """Steps after `last_step` that a group sampled now by `version` can still serve."""
    return version + 1 + max_age - last_step


def groups_per_step(
    supply: Mapping[str, EnvSupply], *, tokens: int, groups: int | None, rollouts: int | None
) -> dict[str, float]:
    """env -> groups of it that a step holds on average; START_TICKETS where nothing is known yet.

    A step is `groups` groups, or `rollouts` rollouts, or else `tokens` tokens.
    """
    known = {e: s.mean for e, s in supply.items() if s.mean is not None and s.share > 0}
    rates: dict[str, float] = {}
    for env, s in supply.items():
        mean = s.mean or _average(list(known.values()))
        if s.share > 0 and mean is not None:
            rates[env] = s.share / mean[0]
        elif s.share > 0 and groups is not None:
            rates[env] = s.share
    if groups is not None:
        unit, limit = dict.fromkeys(rates, 1.0), float(groups)
    else:
        index = 1 if rollouts is None else 2
        fallback = _average(list(known.values()))
        unit = {e: (supply[e].mean or fallback or (1.0, 1.0, 1.0))[index] for e in rates}
        limit = float(tokens if rollouts is None else rollouts)
    total = sum(rates[e] * unit[e] for e in rates)
    return {e: limit * rates[e] / total if e in rates else float(START_TICKETS) for e in supply if supply[e].share > 0}


def allowances(
    supply: Mapping[str, EnvSupply],
    per_step: Mapping[str, float],
    *,
    wanted: Collection[str] = (),
) -> dict[str, int]:
    """env -> tickets that may be out.

    `wanted` are the envs that the open step is waiting for: each gets at least one as long as a group sampled now can
    still train. That is what keeps a step from waiting for a group that nobody may sample, however wrong the means.
    """
    out = {}
    for env, s in supply.items():
        groups = math.ceil(per_step.get(env, 0.0) * s.window - 1e-9) - s.pending if s.window > 0 else 0
        least = 1 if env in wanted and s.window > 0 and s.share > 0 else 0
        out[env] = max(groups, least, 0)
    return out


def _average(means: list[tuple[float, float, float]]) -> tuple[float, float, float] | None:
    if not means:
        return None
    columns = [sum(column) / len(means) for column in zip(*means, strict=True)]
    return columns[0], columns[1], columns[2]
