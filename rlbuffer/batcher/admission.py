"""The number of tickets that may be out per env: enough to keep steps coming, so few that little is thrown away.

A group sampled now by policy version v can serve steps up to v + 1 + max_age. After the last committed step
that is a window of v + 1 + max_age - last_step steps, and there is no use for more groups than the window can train:

    tickets out + forming + ready <= G x window,     G = the env's share of a step / its mean group

On policy (`max_age` 0) nothing can be kept for a later step, and an average is not enough: there the open step is
selected in advance, and an env gets what it still lacks (:func:`missing`).

Simulated over 200 steps, `max_age` + 1 steps' worth of groups in flight lost half of everything as stale; this rule
loses 0 % at max_age 0 and 4-13 % at 1 and 2 with one env. With two envs of which one holds up the steps, newest first,
the other one's surplus took that to 37 %; narrowing its window to one step while the step waits for another env brings
it to 3-9 % at the same speed (tests/support/closed_loop.py).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from rlbuffer.batcher.budget import Deficits

START_TICKETS = 8
"""Groups of an env before any is known: enough to keep a few workers busy, few enough to be no loss."""
DOUBTS = 2.0
"""Standard deviations by which groups still being sampled may turn out larger than on average: the last ones of a step
are sampled once it is nearly certain that they are needed. In simulation (tests/property) without doubt 2.2 % of all
groups were too many, and 0.8 % at 2, for a tenth more time."""
ANY_ENV = "*"
"""Key of the allowance of every env that is not named: an env without a budget is unknown until it sends a group."""

_NOTHING: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvSupply:
    """The groups that an env has, and how far they reach."""

    window: int
    """Steps after the last committed one that a group sampled now can serve; <= 0: none."""
    pending: int
    """Groups forming or ready that can still train."""
    share: float
    """Fraction of a step, 0-1, in the budget's unit."""
    mean: tuple[float, float, float] | None
    """Mean group in (budget's unit, tokens, rollouts); None when not one is known."""
    owed: float = 0.0
    """The env's deficit, in the budget's unit."""
    spread: float = 0.0
    """Standard deviation of a group's tokens."""
    ready: int = 0
    """Those of `pending` that are ready, and so of known size."""
    ready_mean: tuple[float, float, float] | None = None
    """The mean of them, as `mean`."""


def window(*, version: int, max_age: int, last_step: int) -> int:
    """Steps after `last_step` that a group sampled now by `version` can still serve."""
    return version + 1 + max_age - last_step


def groups_per_step(
    supply: Mapping[str, EnvSupply], *, tokens: int, groups: int | None, rollouts: int | None
) -> dict[str, float]:
    """env -> groups of it that a step holds on average; START_TICKETS where nothing is known yet.

    A step is `groups` groups, or `rollouts` rollouts, or else `tokens` tokens.
    """
    fallback = _average([s.mean for s in supply.values() if s.mean is not None and s.share > 0])
    rates: dict[str, float] = {}
    for env, s in supply.items():
        mean = s.mean or fallback
        if s.share > 0 and mean is not None:
            rates[env] = s.share / mean[0]
        elif s.share > 0 and groups is not None:
            rates[env] = s.share
    if groups is not None:
        unit, limit = dict.fromkeys(rates, 1.0), float(groups)
    else:
        index = 1 if rollouts is None else 2
        unit = {e: (supply[e].mean or fallback or (1.0, 1.0, 1.0))[index] for e in rates}
        limit = float(tokens if rollouts is None else rollouts)
    total = sum(rates[e] * unit[e] for e in rates)
    return {e: limit * rates[e] / total if e in rates else float(START_TICKETS) for e in supply if supply[e].share > 0}


def missing(
    supply: Mapping[str, EnvSupply], *, tokens: float, groups: int | None, rollouts: int | None
) -> dict[str, int]:
    """env -> groups that the open step still needs of it, beyond those pending.

    The step is selected in advance, as :mod:`rlbuffer.batcher.selection` will do it, of groups of mean size. The
    average of a step (:func:`groups_per_step`) says nothing of what an env is owed from earlier steps, and rounding it
    up for every env samples a group too many for almost each of them. The order in which envs give their groups follows
    from the means alone: by the groups' real sizes the last groups would be asked now from this env, now from that one,
    and come from both. The step counts as full by what is there, and by what those on their way may at most turn out to
    be.

    A step is `groups` groups, or `rollouts` rollouts, or else from `tokens` tokens on.
    """
    envs = {env: s for env, s in supply.items() if s.share > 0}
    by_tokens = groups is None and rollouts is None
    average = _average([s.mean for s in envs.values() if s.mean is not None])
    if average is None and groups is None:
        return dict.fromkeys(envs, 1)
    means = {env: s.mean or average or (1.0, 1.0, 1.0) for env, s in envs.items()}
    limit = float(groups if groups is not None else rollouts if rollouts is not None else tokens)
    turns = Deficits({env: s.owed for env, s in envs.items()}, {env: s.share for env, s in envs.items()})
    for env, mean in means.items():
        turns.offer(env, mean[0])
    picked, filled, doubt = dict.fromkeys(envs, 0), 0.0, 0.0
    while filled + DOUBTS * math.sqrt(doubt) < limit and (turn := turns.turn()) is not None:
        is_there = picked[turn] < envs[turn].ready
        amounts = (is_there and envs[turn].ready_mean) or means[turn]
        filled += 1.0 if groups is not None else max(1.0, amounts[1 if rollouts is None else 2])
        if by_tokens and not is_there:
            doubt += envs[turn].spread ** 2
        picked[turn] += 1
        turns.charge(turn, means[turn][0])
    # Groups that nobody has seen yet may turn out several times as large: before they have, a few of every env.
    is_known = all(s.mean is not None for s in envs.values())
    most = {env: picked[env] if is_known else max(1, picked[env] // 4) for env in envs}
    return {env: max(0, min(most[env], picked[env] - s.pending)) for env, s in envs.items()}


def allowances(
    supply: Mapping[str, EnvSupply],
    per_step: Mapping[str, float],
    *,
    awaited: Collection[str] = (),
    open_step: Mapping[str, int] = _NOTHING,
) -> dict[str, int]:
    """env -> tickets that may be out.

    `awaited` are the envs that the open step is waiting for: each gets at least one as long as a group sampled now can
    still train. That is what keeps a step from waiting for a group that nobody may sample, however wrong the means.
    `open_step` is what :func:`missing` found, of the envs whose groups can serve the open step alone.
    """
    out, is_open = {}, any(open_step.values())
    awaited = frozenset(awaited)
    for env, s in supply.items():
        groups = math.ceil(per_step.get(env, 0.0) * s.window - 1e-9) - s.pending if s.window > 0 else 0
        is_awaited = env in awaited
        if env in open_step and s.window > 0:
            groups = open_step[env]
            is_awaited = is_awaited and not is_open
        least = 1 if is_awaited and s.window > 0 and s.share > 0 else 0
        out[env] = max(groups, least, 0)
    return out


def _average(means: list[tuple[float, float, float]]) -> tuple[float, float, float] | None:
    if not means:
        return None
    columns = [sum(column) / len(means) for column in zip(*means, strict=True)]
    return columns[0], columns[1], columns[2]
