"""Closes a step on a selection, with as many of the selected groups as fit into its rows.

The token sum bounds the step from above and costs nothing; one call of the planner settles it; where rows fragment, one
group is given back, and only then is the prefix searched. Closing before the group that needs another level fills
91-99 % of the rows; filling to a token count needs one more forward pass on every rank and fills 80-85 %.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlbuffer.batcher.group import PooledGroup, Rejected
from rlbuffer.batcher.selection import Ended, Limits, Trial
from rlbuffer.batcher.situation import Situation
from rlbuffer.batcher.step_plan import plan_groups
from rlbuffer.batcher.teaching import UNTRAINED, Teaching
from rlbuffer.packing.planner import fewest_rows
from rlbuffer.records.states import ClosedBy, Reason
from rlbuffer.records.step_plan import Plan

Planner = Callable[[Sequence[PooledGroup]], Plan]


@dataclass(frozen=True, slots=True)
class Closed:
    """A step that takes no more groups."""

    groups: Sequence[PooledGroup]
    """Groups in the order of selection."""
    laid_out: Sequence[PooledGroup]
    """The groups as the step holds them."""
    plan: Plan
    closed_by: ClosedBy


def close(trial: Trial, situation: Situation, limits: Limits, world_size: int) -> Closed | None:
    """The step that a trial fills; None when it stays open."""
    groups, config = trial.groups, situation.config
    if trial.ended is Ended.COUNT:
        closed_by = ClosedBy.GROUPS if limits.groups is not None else ClosedBy.ROLLOUTS
        laid_out = sorted(groups, key=_name)
        return Closed(groups, laid_out, plan_groups(laid_out, config, world_size), closed_by)
    if groups and trial.ended is Ended.SHORT and situation.patience.may_close(situation.pool.now, trial.short):
        return close_as_it_is(groups, situation, limits, world_size, ClosedBy.PARTIAL)
    if not limits.by_rows:
        return None
    is_full = trial.ended is Ended.FULL
    if not is_full and trial.balanced:
        some = groups[: trial.balanced]
        plan = plan_groups(some, config, world_size)
        if plan.micro_steps <= config.micro_batches_per_rank:
            return Closed(some, some, plan, ClosedBy.FILL)
        is_full = True
    # Any packing leaves at most one row of an adapter less than half full: below that there is always room.
    kinds = len({group.adapter for group in groups})
    if not is_full and 2 * trial.tokens > (limits.rows + 1 - kinds) * limits.row_tokens:
        is_full = needs_more_rows(groups, limits.row_tokens, limits.rows)
    return close_as_it_is(groups, situation, limits, world_size, ClosedBy.CAPACITY) if is_full else None


def close_as_it_is(
    groups: Sequence[PooledGroup], situation: Situation, limits: Limits, world_size: int, closed_by: ClosedBy
) -> Closed:
    """The step of as many of these groups as it holds."""
    config = situation.config

    def planner(some: Sequence[PooledGroup]) -> Plan:
        return plan_groups(some, config, world_size)

    if not limits.by_rows:
        return Closed(groups, groups, planner(groups), closed_by)
    count, plan = longest_fit(groups, planner, config.micro_batches_per_rank)
    kept = groups[:count]
    return Closed(kept, kept, plan, closed_by)


def useless(closed: Closed, teaching: Teaching) -> list[tuple[PooledGroup, Rejected]]:
    """The groups that go before a step is made of others: all, where no token of the step is trained, because it would
    divide by 0; the fresh ones of the last step, where it teaches nothing. None of a stream."""
    if teaching.is_trainers:
        return []
    if not any(map(teaching.trains, closed.groups)):
        return [(group, Rejected(Reason.FLAT, UNTRAINED)) for group in closed.groups]
    if closed.closed_by is not ClosedBy.END or not waits_to_learn(closed, teaching):
        return []
    fresh = [group for group in closed.groups if not group.used]
    return [(group, Rejected(Reason.FLAT, f"nothing more comes, and {teaching.flatness(group)}")) for group in fresh]


def waits_to_learn(closed: Closed, teaching: Teaching) -> bool:
    """True of a step that would only move the learning rate. One that is full may be flat: that is the setting's to
    say."""
    if teaching.is_trainers:
        return False
    return closed.closed_by in (ClosedBy.TIMEOUT, ClosedBy.END) and not any(map(teaching.of, closed.groups))


def _name(group: PooledGroup) -> tuple[str, int, str]:
    """Sort key of the groups of a step that closes at a count: by name, so that the same groups make the same step in
    whatever order they came. A step that closes otherwise keeps the order of selection."""
    return group.env, len(group.group_id), group.group_id


def longest_fit(groups: Sequence[PooledGroup], planner: Planner, micro_steps: int) -> tuple[int, Plan]:
    """The longest prefix of `groups` whose plan has at most `micro_steps` forward passes, and that plan.

    At least one group, even if it alone needs more: else a group larger than a step would block it for ever. More than
    two calls of the planner are made only where rows fragment badly.
    """
    count = len(groups)
    plan = planner(groups)
    if plan.micro_steps <= micro_steps or count == 1:
        return count, plan
    best, best_plan = 0, plan
    low, high = 1, count - 1
    back = 1
    while low <= high:
        # From the end, in steps that double: rows that fragment a little cost a few groups of many.
        middle = max(low, count - back) if not best else (low + high) // 2
        back *= 2
        plan = planner(groups[:middle])
        if plan.micro_steps <= micro_steps:
            best, best_plan, low = middle, plan, middle + 1
        else:
            high = middle - 1
    return (best, best_plan) if best else (1, planner(groups[:1]))


def needs_more_rows(groups: Sequence[PooledGroup], row_tokens: int, rows: int) -> bool:
    """True when no packing puts `groups` into `rows` rows: then the step is full although its tokens are not."""
    adapters: dict[str, list[int]] = {}
    for group in groups:
        adapters.setdefault(group.adapter, []).extend(group.lengths)
    return sum(_fewest_rows(np.array(lengths), row_tokens) for lengths in adapters.values()) > rows


def _fewest_rows(lengths: NDArray[np.int64], row_tokens: int) -> int:
    """The planner's bound, or the one of thirds and quarters where rollouts just above them fragment the rows.

    A rollout above 1/(k+1) of a row, as k to a row at most, weighs at least 1/k of one.
    Source: Fekete and Schepers 2001, New classes of fast lower bounds for bin packing problems, functions u(k).
    """
    bound = fewest_rows(lengths, row_tokens)
    for k in (2, 3, 4):
        whole, rest = np.divmod((k + 1) * lengths, row_tokens)
        weight = int(np.where(rest == 0, k * lengths, whole * row_tokens).sum())
        bound = max(bound, -(-weight // (k * row_tokens)))
    return bound
