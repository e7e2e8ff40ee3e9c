"""Rows: rollouts filled into as few rows as possible, then levelled in cost and brought to the number wanted.

The steps 1 to 3 of :mod:`rlbuffer.packing.planner`. A rollout is named by its place in the order "longest first", so
every increasing subset is in that order too; a row is a number, and an assignment is the array ``row_of`` [n].
"""

from __future__ import annotations

from bisect import bisect_left, insort
from heapq import heapify, heappop, heappush, heapreplace

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

TAIL_MICRO_STEPS = (1, 2, 4, 16)
"""Numbers of the cheapest micro-steps that are tried for re-levelling; more never paid on the benchmark's workloads."""
TAIL_ROLLOUTS = 8192
"""Rollouts at most in a re-levelled tail of more than one micro-step: bounds the plan's time on huge steps."""


def fill(sizes: Ints, kinds: Ints | None, capacity: int) -> tuple[Ints, int]:
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


def cost_of_rows(row_of: Ints, costs: Ints, rows: int) -> Ints:
    """[rows] summed costs; 0 for rows that hold nothing."""
    total = np.zeros(rows, np.int64)
    np.add.at(total, row_of, costs)
    return total


def round_up(
    row_of: Ints, rows: int, sizes: Ints, costs: Ints, kinds: Ints | None, capacity: int, shape: tuple[int, int]
) -> tuple[Ints, int]:
    """Brings the rows to a multiple of ``shape`` (world size, rows per micro-batch) and levels the cheap ones."""
    width = shape[0] * shape[1]
    total = -(-rows // width) * width
    row_costs = cost_of_rows(row_of, costs, total)
    by_cost = np.argsort(-row_costs, kind="stable")
    place = np.empty(total, np.int64)
    place[by_cost] = np.arange(total)
    place_of = place[row_of]  # rows numbered by cost, costliest first: a tail is a slice; empty rows are at its end
    best_row_of, best_rows = _split_costliest(place_of, rows, total, costs)
    best = span_of(cost_of_rows(best_row_of, costs, total), shape)
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
        span = span_of(cost_of_rows(candidate, costs, total), shape)
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
    """Deals the rollouts `tail` again over rows ``first`` to ``total``, in place; None when no adapter could be dealt.

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
        own_rows = np.arange(first, rows) if kinds is None else np.unique(row_of[m])
        names = np.concatenate((own_rows, np.arange(used, used + wide - count)))
        row_of[m] = names[spread]
        used += wide - count
        dealt = True
    return used if dealt else None


def _split_costliest(row_of: Ints, rows: int, total: int, costs: Ints) -> tuple[Ints, int]:
    """Splits the costliest rows of several rollouts in two until there are `total`. -> (row of each, rows)."""
    if rows == total:
        return row_of, rows
    row_of = row_of.copy()
    row_costs = cost_of_rows(row_of, costs, rows)
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


def micro_batches(row_costs: Ints, shape: tuple[int, int]) -> tuple[Ints, Ints]:
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


def span_of(row_costs: Ints, shape: tuple[int, int]) -> int:
    """Sum over micro-steps of the costliest micro-batch: what the ranks wait for."""
    if shape[1] == 1:
        return int(np.sort(row_costs)[:: -shape[0]].sum())
    return int(micro_batches(row_costs, shape)[1].max(axis=1, initial=0).sum())
