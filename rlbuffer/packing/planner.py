"""The planner: lengths in, rows per micro-step and rank out.

Data-parallel ranks wait for each other after every micro-step, so a step takes the *sum over micro-steps of the
costliest rank*. Against the ideal (all cost spread evenly, no padding) that sum is the **span**: 1.0 is perfect. Two
things make it larger, rows that are not full and micro-steps that are not level, and they pull in opposite
directions: filling rows by tokens leaves uneven costs, because attention makes a long rollout dearer than several
short ones of the same total.

1. *Fill.* Best-fit decreasing: near the fewest rows possible, but all the slack ends up in the last, cheap rows.
2. *Level.* Only the cheapest 1, 2, 4 or 16 micro-steps are dealt again, costliest rollout first into the cheapest row
   with room, at the same number of rows: level where there is slack, and the full rows stay full. The best span wins.
3. *Round up* to a multiple of world size x rows per micro-batch: the tail takes the empty rows while it has rollouts
   to fill them, then the costliest rows are split, and only then are there dummies.
4. *Deal.* Rows sorted by cost and cut into micro-steps have the smallest possible sum of maxima; inside each, the
   least loaded rank gets the costliest part.

Everything is integer arithmetic with ties broken by index, so the same lengths give the same plan on every machine.
O(n log n): 2,048 rollouts in 2.5 ms, 32,768 in 30 ms of one core (docs/log.md).

Source: best-fit decreasing and longest-processing-time-first are textbook (Johnson 1974; Graham 1969); the lower
bound is L2 of Martello and Toth, Discrete Applied Mathematics 28 (1990).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from rlbuffer.errors import PackingError
from rlbuffer.packing.rows import Ints, cost_of_rows, fill, micro_batches, round_up
from rlbuffer.records.step_plan import Plan, Row


def plan(
    lengths: ArrayLike,
    *,
    row_tokens: int,
    world_size: int,
    rows_per_micro_batch: int = 1,
    cost: tuple[int, int] = (24576, 1),
    adapters: Sequence[str] | None = None,
    pad_to_multiple_of: int = 1,
) -> Plan:
    """Plans which rollout goes into which row, of which micro-step, of which rank.

    Every rollout is in exactly one row; no row exceeds `row_tokens`, padding to `pad_to_multiple_of` included; a row
    holds one adapter; every rank has the same number of micro-batches, of near-equal cost per micro-step. Micro-steps
    come costliest first. No rollouts give a plan of no micro-steps.

    Shapes: ``lengths`` [n] integers; ``adapters`` n names, None when there are none.
    Units: tokens; `cost` = (a, b) makes a rollout of L tokens cost ``a * L + b * L * L``.

    Raises:
        PackingError: a rollout is empty or longer than a row; an argument is out of range.

    Example:
        >>> made = plan([7, 5, 4, 2], row_tokens=9, world_size=2)
        >>> made.rows
        ((((0, 3),), ((1, 2),)),)
    """
    for name, value in (
        ("row_tokens", row_tokens),
        ("world_size", world_size),
        ("rows_per_micro_batch", rows_per_micro_batch),
        ("pad_to_multiple_of", pad_to_multiple_of),
    ):
        _positive(name, value)
    capacity = row_tokens // pad_to_multiple_of * pad_to_multiple_of
    sizes = _checked_lengths(lengths, capacity, row_tokens, pad_to_multiple_of)
    costs = _costs(sizes, cost)
    if adapters is not None and len(adapters) != len(sizes):
        raise PackingError(f"plan: {len(adapters)} adapters do not match {len(sizes)} rollouts")

    # From here on a rollout is its place in the order "longest first": sorted subsets need no sorting again.
    order = np.argsort(-sizes, kind="stable")
    sizes, costs = sizes[order], costs[order]
    kinds = _kinds(adapters, order)
    row_of, rows = fill(sizes, kinds, capacity)
    per_step = world_size * rows_per_micro_batch
    if rows:
        row_of, rows = round_up(row_of, rows, sizes, costs, kinds, capacity, (world_size, rows_per_micro_batch))
    total = -(-rows // per_step) * per_step
    return Plan(
        rows=_deal(order, row_of, cost_of_rows(row_of, costs, total), (world_size, rows_per_micro_batch)),
        world_size=world_size,
        row_tokens=row_tokens,
        rows_per_micro_batch=rows_per_micro_batch,
        pad_to_multiple_of=pad_to_multiple_of,
    )


def redeal(plan: Plan, world_size: int) -> Plan:
    """Deals the rows of `plan` to another number of ranks: the same rollouts in the same rows.

    A trainer that resumes with more or fewer ranks uses it on a committed step. Lengths are not known here, but a plan
    lists its micro-steps, and the rows inside a micro-batch, costliest first. So consecutive rows cost about the same:
    they make the new micro-steps, and every other layer of world size rows is dealt backwards, so that no rank always
    gets the costlier end. Dummies come last.

    Raises:
        PackingError: `world_size` is not positive.

    Example:
        >>> redeal(plan([7, 5, 4, 2], row_tokens=9, world_size=2), 1).rows
        ((((0, 3),),), (((1, 2),),))
    """
    _positive("world_size", world_size)
    if world_size == plan.world_size:
        return plan
    deep = plan.rows_per_micro_batch
    rows = [micro_batch[layer] for step in plan.rows for layer in range(deep) for micro_batch in step]
    rows = [row for row in rows if row]
    layers = -(-len(rows) // (world_size * deep)) * deep
    rows += [()] * (layers * world_size - len(rows))
    dealt = [rows[world_size * n : world_size * (n + 1)][:: -1 if n % 2 else 1] for n in range(layers)]
    return Plan(
        rows=tuple(tuple(zip(*dealt[n : n + deep], strict=True)) for n in range(0, layers, deep)),
        world_size=world_size,
        row_tokens=plan.row_tokens,
        rows_per_micro_batch=deep,
        pad_to_multiple_of=plan.pad_to_multiple_of,
    )


def fewest_rows(lengths: ArrayLike, row_tokens: int) -> int:
    """A lower bound on the rows that any plan needs (L2 of Martello and Toth), in O(n log n).

    For every threshold: rollouts that leave less room than the threshold have a row of their own, those above half a
    row can share only with smaller ones, and the rest must fit what is left.

    Raises:
        PackingError: a rollout is empty or longer than a row.
    """
    _positive("row_tokens", row_tokens)
    sizes = np.sort(_checked_lengths(lengths, row_tokens, row_tokens, 1))
    if not sizes.size:
        return 0
    before = np.concatenate(([0], np.cumsum(sizes)))
    small = int(np.searchsorted(sizes, row_tokens // 2, "right"))
    thresholds = np.unique(np.concatenate(([0], sizes[:small])))
    alone_from = np.searchsorted(sizes, row_tokens - thresholds, "right")
    counted_from = np.minimum(np.searchsorted(sizes, thresholds, "left"), small)
    large = alone_from - small
    room = large * row_tokens - (before[alone_from] - before[small])
    left_over = before[small] - before[counted_from] - room
    bound = sizes.size - small + np.maximum(0, -(-left_over // row_tokens))
    return int(bound.max())


# -- checks ------------------------------------------------------------------------------------------------------------
def _positive(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise PackingError(f"plan: {name} = {value!r} must be a positive integer")


def _checked_lengths(lengths: ArrayLike, capacity: int, row_tokens: int, multiple: int) -> Ints:
    values = np.asarray(lengths)
    if values.ndim != 1 or (values.size and values.dtype.kind not in "iu"):
        raise PackingError(f"plan: lengths must be [n] integers, got {list(values.shape)} {values.dtype}")
    sizes: Ints = values.astype(np.int64)
    if not sizes.size:
        return sizes
    if int(sizes.min()) < 1:
        worst = int(np.argmin(sizes))
        raise PackingError(f"plan: rollout {worst} has {sizes[worst]} tokens; a rollout has at least 1")
    if int(sizes.max()) > capacity:
        worst = int(np.argmax(sizes))
        why = "" if capacity == row_tokens else f" ({row_tokens} row_tokens in multiples of {multiple})"
        raise PackingError(f"plan: rollout {worst} has {sizes[worst]} tokens; a row holds {capacity}{why}")
    return sizes


def _costs(sizes: Ints, cost: tuple[int, int]) -> Ints:
    try:
        a, b = cost
        valid = all(isinstance(c, (int, np.integer)) and c >= 0 for c in (a, b)) and a + b > 0
    except (TypeError, ValueError):
        valid = False
    if not valid:
        raise PackingError(f"plan: cost = {cost!r} must be two integers >= 0, not both 0")
    longest = int(sizes.max(initial=0))
    # Sums and the keys of heaps (a cost and a row number in one integer) stay inside 64 bits.
    if 2 * len(sizes) * (int(a) + int(b) * longest) * longest >= 2**62:
        raise PackingError(f"plan: cost = {cost!r} is too large for {len(sizes)} rollouts of up to {longest} tokens")
    return int(a) * sizes + int(b) * sizes * sizes


def _kinds(adapters: Sequence[str] | None, order: Ints) -> Ints | None:
    """The adapter of each rollout as a number, in `order`; None when there is only one."""
    if adapters is None or len(set(adapters)) < 2:
        return None
    number: dict[str, int] = {}
    return np.array([number.setdefault(name, len(number)) for name in adapters], dtype=np.int64)[order]


def _deal(
    order: Ints, row_of: Ints, row_costs: Ints, shape: tuple[int, int]
) -> tuple[tuple[tuple[Row, ...], ...], ...]:
    """Gives the micro-batches of each micro-step to the ranks, the costliest to the least loaded."""
    grid, costs = micro_batches(row_costs, shape)
    dealt = np.empty_like(grid)
    load = np.zeros(shape[0], np.int64)
    by_cost = np.argsort(-costs, axis=1, kind="stable")
    sorted_costs = np.take_along_axis(costs, by_cost, axis=1)
    for step in range(len(grid)):
        ranks = load.argsort(kind="stable")
        dealt[step][:, ranks] = grid[step][:, by_cost[step]]
        load[ranks] += sorted_costs[step]
    flat = tuple(order[np.argsort(row_of, kind="stable")].tolist())
    ends = np.cumsum(np.bincount(row_of, minlength=len(row_costs))).tolist()
    rows = [flat[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    return tuple(
        tuple(tuple(rows[row] for row in micro_batch) for micro_batch in step)
        for step in dealt.transpose(0, 2, 1).tolist()
    )
