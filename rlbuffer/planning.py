"""The planner: lengths in, rows per micro-step and rank out.

Data-parallel ranks wait for each other after every micro-step, so a step takes the *sum over micro-steps of the
costliest rank*. Against the ideal (all cost spread evenly, no padding) that sum is the **span**: 1.0 is perfect. Two
things make it larger, rows that are not full and micro-steps that are not level, and they pull in opposite
directions: filling rows by tokens leaves uneven costs, because attention makes a long rollout dearer than several
short ones of the same total.

1. *Fill.* Best-fit decreasing: near the fewest rows possible, but all the slack ends up in the last, cheap rows.
2. *Level.* Only the cheapest 1, 2, 4 or 16 micro-steps are dealt anew, costliest rollout first into the cheapest row
   with room, at the same number of rows: level where there is slack, and the full rows stay full. The best span wins.
3. *Round up* to a multiple of world size x rows per micro-batch: the tail takes the empty rows while it has rollouts
   to fill them, then the costliest rows are split, and only then are there dummies.
4. *Deal.* Rows sorted by cost and cut into micro-steps have the smallest possible sum of maxima; inside each, the
   least loaded rank gets the costliest part.

Everything is integer arithmetic with ties broken by index, so the same lengths give the same plan on every machine.
O(n log n): 2,048 rollouts in 3 ms, 32,768 in 35 ms of one core (docs/log.md).

Source: best-fit decreasing and longest-processing-time-first are textbook (Johnson 1974; Graham 1969); the lower
bound is L2 of Martello and Toth, Discrete Applied Mathematics 28 (1990).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlbuffer.batches import Plan, Row
from rlbuffer.errors import PackingError

Ints = NDArray[np.int64]

TAIL_MICRO_STEPS = (1, 2, 4, 16)
"""How many of the cheapest micro-steps are tried for re-levelling; more never paid on the benchmark's workloads."""
TAIL_ROLLOUTS = 8192
"""Rollouts at most in a re-levelled tail of more than one micro-step: bounds the plan's time on huge steps."""


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
    row_of, rows = _fill(sizes, kinds, capacity)
    per_step = world_size * rows_per_micro_batch
    if rows:
        row_of, rows = _round_up(row_of, rows, sizes, costs, kinds, capacity, (world_size, rows_per_micro_batch))
    total = -(-rows // per_step) * per_step
    return Plan(
        rows=_deal(order, row_of, _row_costs(row_of, costs, total), (world_size, rows_per_micro_batch)),
        world_size=world_size,
        row_tokens=row_tokens,
        rows_per_micro_batch=rows_per_micro_batch,
        pad_to_multiple_of=pad_to_multiple_of,
    )


def redeal(plan: Plan, world_size: int) -> Plan:
    """Deals the rows of `plan` to another number of ranks: the same rollouts in the same rows.

    A trainer that resumes with more or fewer ranks uses it on a committed step. Lengths are not known here, but a plan
    lists its micro-steps costliest first, so consecutive rows cost about the same: they make the new micro-steps, and
    every other one is dealt backwards, so that no rank always gets the costlier end. Dummies come last.

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
    rows = [row for step in plan.rows for micro_batch in step for row in micro_batch if row]
    width = world_size * deep
    rows += [()] * (-len(rows) % width)
    steps = []
    for number, start in enumerate(range(0, len(rows), width)):
        # Rank r takes rows r, r + W, ... of the level, so that inside a micro-batch, too, costs are mixed.
        level = [tuple(rows[start + rank : start + width : world_size]) for rank in range(world_size)]
        steps.append(tuple(level if number % 2 == 0 else level[::-1]))
    return Plan(
        rows=tuple(steps),
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


# -- rows --------------------------------------------------------------------------------------------------------------
def _fill(sizes: Ints, kinds: Ints | None, capacity: int) -> tuple[Ints, int]:
    """Best-fit decreasing, per adapter. -> (row of each rollout, number of rows)."""
    if kinds is None:
        row_of = _best_fit(sizes, capacity)
        return row_of, int(row_of.max(initial=-1)) + 1
    row_of, rows = np.empty(len(sizes), np.int64), 0
    for kind in range(int(kinds.max()) + 1):
        members = np.flatnonzero(kinds == kind)
        row_of[members] = _best_fit(sizes[members], capacity) + rows
        rows = int(row_of[members].max()) + 1
    return row_of, rows


def _best_fit(sizes: Ints, capacity: int) -> Ints:
    """Puts each rollout, longest first, into the fullest row that still holds it.

    Open rows are one sorted list of integers ``room << bits | row``, so that finding a row is one `bisect` call.
    """
    bits = len(sizes).bit_length()
    mask = (1 << bits) - 1
    open_rows: list[int] = []
    row_of: list[int] = []
    rows = 0
    smallest = int(sizes[-1]) << bits if len(sizes) else 0
    for size in (sizes << bits).tolist():
        at = bisect_left(open_rows, size)
        if at < len(open_rows):
            row = open_rows.pop(at) - size
        else:
            row = (capacity << bits) - size | rows
            rows += 1
        row_of.append(row & mask)
        if row >= smallest:
            insort(open_rows, row, 0, at)
    return np.array(row_of, dtype=np.int64)


def _spread(sizes: Ints, costs: Ints, rows: int, capacity: int) -> Ints | None:
    """Puts each rollout, costliest first, into the cheapest of `rows` rows with room. None where that does not fit."""
    bits = rows.bit_length()
    mask = (1 << bits) - 1
    room = [capacity - size for size in sizes[:rows].tolist()]
    smallest = int(sizes[-1])
    cheapest = [cost << bits | row for row, cost in enumerate(costs[:rows].tolist()) if room[row] >= smallest]
    heapify(cheapest)
    row_of = list(range(rows))
    # Rows looked at in vain; where capacity is that tight, best fit is the better answer anyway.
    patience = 4 * len(sizes) + 64
    for size, cost in zip(sizes[rows:].tolist(), (costs[rows:] << bits).tolist(), strict=True):
        passed: list[int] = []
        while cheapest and room[cheapest[0] & mask] < size:
            passed.append(heappop(cheapest))
        patience -= len(passed)
        if not cheapest or patience < 0:
            return None
        row = cheapest[0] & mask
        room[row] -= size
        row_of.append(row)
        if room[row] >= smallest:
            heapreplace(cheapest, cheapest[0] + cost)
        else:
            heappop(cheapest)
        for other in passed:
            heappush(cheapest, other)
    return np.array(row_of, dtype=np.int64)


def _row_costs(row_of: Ints, costs: Ints, rows: int) -> Ints:
    total = np.zeros(rows, np.int64)
    np.add.at(total, row_of, costs)
    return total


def _round_up(
    row_of: Ints, rows: int, sizes: Ints, costs: Ints, kinds: Ints | None, capacity: int, shape: tuple[int, int]
) -> tuple[Ints, int]:
    """Brings the rows to a multiple of ``shape`` (world size, rows per micro-batch) and levels the cheap ones."""
    width = shape[0] * shape[1]
    total = -(-rows // width) * width
    row_costs = _row_costs(row_of, costs, total)
    by_cost = np.argsort(-row_costs, kind="stable")
    place = np.empty(total, np.int64)
    place[by_cost] = np.arange(total)
    place_of = place[row_of]  # rows numbered by cost, costliest first: a tail is a slice; empty rows are at its end
    best_row_of, best_rows = _split_costliest(place_of, rows, total, costs)
    best = _span(_row_costs(best_row_of, costs, total), shape)
    for micro_steps in sorted({min(t, total // width) for t in TAIL_MICRO_STEPS}):
        first = total - micro_steps * width
        tail = np.flatnonzero(place_of >= first)
        if micro_steps > 1 and len(tail) > TAIL_ROLLOUTS:
            break
        candidate = place_of.copy()
        used = _level_tail(candidate, tail, (first, rows, total), sizes, costs, kinds, capacity)
        if used is None:
            continue
        candidate, used = _split_costliest(candidate, used, total, costs)
        span = _span(_row_costs(candidate, costs, total), shape)
        if span < best:
            best, best_row_of, best_rows = span, candidate, used
    return best_row_of, best_rows


def _level_tail(
    row_of: Ints,
    tail: Ints,
    bounds: tuple[int, int, int],
    sizes: Ints,
    costs: Ints,
    kinds: Ints | None,
    capacity: int,
) -> int | None:
    """Deals the rollouts `tail` anew over rows ``first`` to ``total``, in place; None when no adapter could be dealt.

    `bounds` = (first, rows, total): rows from ``rows`` on are empty so far. -> number of rows used.
    """
    first, rows, total = bounds
    members = [tail] if kinds is None else [tail[kinds[tail] == kind] for kind in np.unique(kinds[tail])]
    counts = [len(np.unique(row_of[m])) if kinds is not None else rows - first for m in members]
    # The empty rows go, one by one, to the adapter whose rows cost most on average and that can fill one more.
    sums = [int(costs[m].sum()) for m in members]
    extra = total - rows
    wanting = [(-sums[k] / counts[k], k) for k in range(len(members)) if len(members[k]) > counts[k]]
    heapify(wanting)
    wider = counts.copy()
    while extra and wanting:
        k = wanting[0][1]
        wider[k] += 1
        extra -= 1
        if len(members[k]) > wider[k]:
            heapreplace(wanting, (-sums[k] / wider[k], k))
        else:
            heappop(wanting)
    used, dealt = rows, False
    for m, count, wide in zip(members, counts, wider, strict=True):
        spread = _spread(sizes[m], costs[m], wide, capacity)
        if spread is None:
            continue
        held = np.arange(first, rows) if kinds is None else np.unique(row_of[m])
        names = np.concatenate((held, np.arange(used, used + wide - count)))
        row_of[m] = names[spread]
        used += wide - count
        dealt = True
    return used if dealt else None


def _split_costliest(row_of: Ints, rows: int, total: int, costs: Ints) -> tuple[Ints, int]:
    """Splits the costliest rows of several rollouts in two until there are `total`. -> (row of each, rows)."""
    if rows == total:
        return row_of, rows
    row_of = row_of.copy()
    row_costs = _row_costs(row_of, costs, rows)
    several = np.flatnonzero(np.bincount(row_of, minlength=rows) > 1)
    # A split touches at most as many of today's rows as there are splits: the costliest are enough.
    several = several[np.argsort(-row_costs[several], kind="stable")][: total - rows]
    heap = [(-int(row_costs[row]), row) for row in several.tolist()]
    heapify(heap)
    while rows < total and heap:
        _, row = heappop(heap)
        parts: tuple[list[int], list[int]] = ([], [])
        sums = [0, 0]
        for i in np.flatnonzero(row_of == row).tolist():
            lighter = int(sums[1] < sums[0])
            parts[lighter].append(i)
            sums[lighter] += int(costs[i])
        row_of[parts[1]] = rows
        for part, name, value in zip(parts, (row, rows), sums, strict=True):
            if len(part) > 1:
                heappush(heap, (-value, name))
        rows += 1
    return row_of, rows


# -- micro-steps and ranks ---------------------------------------------------------------------------------------------
def _micro_batches(row_costs: Ints, shape: tuple[int, int]) -> tuple[Ints, Ints]:
    """Cuts the rows into micro-steps by cost, and each micro-step into micro-batches of near-equal cost.

    -> rows [micro_steps, rows_per_micro_batch, world_size], cost [micro_steps, world_size].
    """
    world_size, deep = shape
    grid = np.argsort(-row_costs, kind="stable").reshape(-1, deep, world_size)
    sums = row_costs[grid[:, 0]]
    for layer in range(1, deep):
        # The costliest row of the layer joins the cheapest micro-batch so far.
        lightest = np.argsort(sums, axis=1, kind="stable")
        rows = np.empty_like(grid[:, layer])
        np.put_along_axis(rows, lightest, grid[:, layer], axis=1)
        grid[:, layer] = rows
        sums = sums + row_costs[rows]
    return grid, sums


def _span(row_costs: Ints, shape: tuple[int, int]) -> int:
    """Sum over micro-steps of the costliest micro-batch: what the ranks wait for."""
    if shape[1] == 1:
        return int(np.sort(row_costs)[:: -shape[0]].sum())
    return int(_micro_batches(row_costs, shape)[1].max(axis=1, initial=0).sum())


def _deal(
    order: Ints, row_of: Ints, row_costs: Ints, shape: tuple[int, int]
) -> tuple[tuple[tuple[Row, ...], ...], ...]:
    """Gives the micro-batches of each micro-step to the ranks, the costliest to the least loaded."""
    grid, costs = _micro_batches(row_costs, shape)
    dealt = np.empty_like(grid)
    load = np.zeros(shape[0], np.int64)
    by_cost = np.argsort(-costs, axis=1, kind="stable")
    sorted_costs = np.take_along_axis(costs, by_cost, axis=1)
    # Uneven micro-steps first: the even ones after them cannot level much, but cannot spoil much either.
    uneven_first = np.argsort(sorted_costs[:, -1] - sorted_costs[:, 0], kind="stable")
    for step in uneven_first.tolist():
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
