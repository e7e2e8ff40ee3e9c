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
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from rlbuffer.batcher import budget, slow
from rlbuffer.batcher.budget import Deficits
from rlbuffer.batcher.group import PooledGroup
from rlbuffer.batcher.selection import Limits, Trial
from rlbuffer.batcher.situation import Situation

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


def awaited_envs(situation: Situation, trial: Trial, step: int) -> list[str]:
    """Envs that the open step waits for: those that are short, else all that have nothing more to give."""
    if trial.short:
        return trial.short + trial.lent
    selected = {g.env for g in trial.groups}
    exhausted = [e for e in trial.exhausted if e not in situation.done]
    idle = situation.paused | situation.done | set(exhausted)
    envs = [e for e in situation.known() if e not in idle and not budget.is_off(situation.config, e, step)]
    unheard = [e for e in envs if e not in selected]
    return exhausted + [e for e in unheard if not situation.pool.env(e).ready_groups]


def allow(
    situation: Situation,
    step: int,
    limits: Limits,
    *,
    awaited: Collection[str] = (),
    taken: Collection[PooledGroup] = (),
) -> dict[str, int]:
    """env -> tickets that may be out while `step` is the next to be planned; ``*`` stands for envs not named.

    A ticket is an env's, and which adapter its group will have is the worker's to say. So the groups of all adapters
    count against it, each as long as it is kept, and the window is that of the adapter whose version reaches
    furthest: what is sampled now can train if it is of that one.

    Args:
        known: as after the step before.
        step: the one after the last committed, or planned.
        limits: of a step.
        awaited: envs that get at least one ticket as long as a group sampled now can still train.
        taken: groups that the step before has taken, which are not gone from the pool yet.
    """
    config = situation.config
    envs = situation.known()
    fractions = budget.shares(config, envs, None, step=step, paused=situation.absent)
    used = Counter(group.env for group in taken)
    supply = {}
    for env in fractions:
        window = _window(situation, env, step)
        if situation.short and env not in situation.short and config.order == "newest_first":
            # The step waits for another env. Newest first, whatever this one samples beyond a step's worth only
            # pushes its own older groups out of the next steps.
            window = min(window, 1)
        # What waits for a version of its own adapter takes room from what others sample; where none of them can train
        # what is sampled now, it stands in nobody's way.
        waited_for = situation.published if window > 0 else _NOTHING
        supply[env] = EnvSupply(
            window=window,
            pending=max(0, situation.pool.kept(env, situation.steps(step), waited_for) - used[env]),
            share=fractions[env],
            mean=situation.mean(env),
            owed=situation.accounts[env].deficit if env in situation.accounts else 0.0,
            spread=situation.spread(env),
            ready=max(0, situation.pool.env(env).ready_groups - used[env]),
            ready_mean=situation.ready_mean(env),
        )
    per_step = groups_per_step(supply, tokens=limits.tokens, groups=limits.groups, rollouts=limits.rollouts)
    if config.is_stream:
        # Its window counts versions, and a version takes many of its steps, which are a group each.
        most = max(situation.pace.groups_per_version, START_TICKETS)
        per_step = {env: groups * most for env, groups in per_step.items()}
    held = {env for env in supply if waits_for_scorers(situation, env, step)}
    open_step = _open_step(situation, supply, limits, situation.short - held)
    out = allowances(supply, per_step, awaited={*awaited} - held, open_step=open_step)
    if config.slow == "wait":
        out = slow.places(situation, step, out, groups=sum(per_step.values()), least={*awaited} - held, taken=taken)
    out.update(dict.fromkeys(situation.paused, 0))
    window = _window(situation, ANY_ENV, step)
    if budget.is_open(config, step) and window > 0:
        # Where groups are counted, and can serve the open step alone, an env gets all of it at once, and no more.
        is_exact = limits.groups is not None and window == 1 and not config.is_stream
        out[ANY_ENV] = limits.groups if is_exact and limits.groups else START_TICKETS
    return out


def waits_for_scorers(situation: Situation, env: str, step: int) -> bool:
    """True when some groups of the env wait for a scorer, and so many are here that one more would wait there, too, and
    then another one: it gets no ticket for being waited for, and is not silent because it sends nothing."""
    most = max(START_TICKETS, situation.config.step_groups)
    return (
        any(situation.pool.env(env).needs.values())
        and situation.pool.kept(env, situation.steps(step), situation.published) >= most
    )


def _open_step(
    situation: Situation, supply: Mapping[str, EnvSupply], limits: Limits, short: Collection[str]
) -> dict[str, int]:
    """env -> groups that the open step still lacks, of the envs that are on policy: they can serve no later one. It
    lacks at least one of those that are `short`."""
    config = situation.config
    if config.is_stream:
        return {}  # how many groups its trainer's open update still takes is not known
    on_policy = [e for e in supply if config.for_env(e).max_age == 0]
    # Nobody knows what an env without a budget will send; in place of an excused env the others are sampled.
    if (
        not on_policy
        or not all(budget.has_budget(config, e) for e in supply)
        or situation.patience.excused(situation.pool.now)
    ):
        return {}
    least = config.close_fill * limits.tokens
    needed = missing(supply, tokens=least, groups=limits.groups, rollouts=limits.rollouts)
    return {e: max(needed[e], e in short) for e in on_policy if e in needed}


def _window(situation: Situation, env: str, step: int) -> int:
    """Steps from `step` on that a group of `env` sampled now can serve at least, of the adapter that reaches furthest.

    An adapter's own steps are never more than the run's.
    """
    max_age, windows = situation.config.for_env(env).max_age, [0]
    for adapter in situation.sampled(env):
        own_step = situation.steps(step)(adapter)
        # Before anyone said what is published, assume the newest that there can be.
        version = situation.published.get(adapter, own_step - 1)
        if version >= 0:
            windows.append(window(version=version, max_age=max_age, last_step=own_step - 1))
    return max(windows)


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
