"""The planner: what a plan must hold, what is refused, and how rows are dealt."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlbuffer.errors import PackingError, RlbufferError
from rlbuffer.packing.planner import fewest_rows, plan, redeal
from rlbuffer.records.step_plan import Plan


def rows_of(made: Plan) -> list[tuple[int, ...]]:
    return [row for step in made.rows for micro_batch in step for row in micro_batch]


def cost_of(lengths: Any, indices: Any, cost: tuple[int, int] = (24576, 1)) -> int:
    chosen = np.asarray(lengths)[list(indices)]
    return int((cost[0] * chosen + cost[1] * chosen * chosen).sum())


def waits(made: Plan, lengths: Any) -> list[int]:
    """Cost of the costliest rank in each micro-step."""
    return [max(sum(cost_of(lengths, row) for row in mb) for mb in step) for step in made.rows]


def test_costliest_row_is_split_first() -> None:
    # Best fit makes the rows of 9 + 1, 8 + 1 and 8 tokens; the fourth rank gets what the costliest one gives up.
    made = plan([9, 8, 8, 1, 1], row_tokens=10, world_size=4)
    assert sorted(rows_of(made)) == [(0,), (1, 4), (2,), (3,)]


def test_empty_rows_go_to_the_adapter_whose_rows_cost_most() -> None:
    made = plan([50, 50, 5, 5], row_tokens=100, world_size=3, adapters=["big", "big", "small", "small"])
    assert sorted(rows_of(made)) == [(0,), (1,), (2, 3)]


def test_micro_steps_come_costliest_first_and_ranks_end_up_with_equal_loads() -> None:
    lengths = np.random.default_rng(1).integers(1, 1000, 400)
    made = plan(lengths, row_tokens=1000, world_size=4)
    steps = [max(cost_of(lengths, row) for mb in step for row in mb) for step in made.rows]
    assert steps == sorted(steps, reverse=True)
    loads = [sum(cost_of(lengths, row) for step in made.rows for row in step[rank]) for rank in range(4)]
    assert max(loads) / (sum(loads) / 4) < 1.005


def test_rows_of_a_micro_step_are_paired_so_that_sums_are_level() -> None:
    # Four rows of cost 4, 3, 2, 1 (tokens only) for two ranks of two rows: 4 + 1 and 3 + 2.
    made = plan([4, 3, 2, 1], row_tokens=4, world_size=2, rows_per_micro_batch=2, cost=(1, 0))
    assert [sorted(sum(4 - i for row in mb for i in row) for mb in step) for step in made.rows] == [[5, 5]]


def test_cost_decides_and_not_the_number_of_tokens() -> None:
    lengths = [8, 4, 4, 2, 2, 2, 2]
    by_square = plan(lengths, row_tokens=24, world_size=2, cost=(0, 1))
    # 64 against 48: the long rollout is alone on its rank although the other has twice its tokens.
    assert sorted(rows_of(by_square), key=len) == [(0,), (1, 2, 3, 4, 5, 6)]


def lognormal(n: int, median: float, high: int, seed: int) -> Any:
    """Lengths with the long tail of reasoning rollouts."""
    draws = np.random.default_rng(seed).standard_normal(n)
    return np.clip(np.rint(median * np.exp(0.9 * draws)), 64, high).astype(np.int64)


@pytest.mark.parametrize(
    ("n", "median", "row_tokens", "seed", "rows", "span"),
    [
        (2048, 2000, 16384, 1, 368, 1.0040),  # without levelling 1.0108
        (1024, 6000, 32768, 3, 280, 1.0068),  # without levelling 1.0249
        (128, 2000, 16384, 5, 24, 1.1236),  # without levelling 1.2670
    ],
)
def test_ranks_wait_little_for_the_costliest_of_them(
    n: int, median: float, row_tokens: int, seed: int, rows: int, span: float
) -> None:
    lengths = lognormal(n, median, row_tokens, seed)
    made = plan(lengths, row_tokens=row_tokens, world_size=8)
    assert len(rows_of(made)) == rows
    assert sum(waits(made, lengths)) / (cost_of(lengths, range(n)) / 8) < span


def test_loads_of_the_ranks_are_equal_over_the_step_though_micro_steps_are_not() -> None:
    lengths = lognormal(1024, 6000, 32768, 3)
    made = plan(lengths, row_tokens=32768, world_size=8)
    loads = [sum(cost_of(lengths, row) for step in made.rows for row in step[rank]) for rank in range(8)]
    assert max(loads) / (sum(loads) / 8) < 1.0003


def test_row_passed_over_for_a_long_rollout_still_takes_a_shorter_one() -> None:
    # 81 + 4 + 1: forgetting a row that was full for one rollout, but not for the next, costs 90.
    made = plan([3, 9, 2, 8, 1, 1], row_tokens=12, world_size=2, cost=(0, 1))
    assert sum(waits_by_square(made, [3, 9, 2, 8, 1, 1])) == 86


def waits_by_square(made: Plan, lengths: list[int]) -> list[int]:
    return [max(sum(cost_of(lengths, row, (0, 1)) for row in mb) for mb in step) for step in made.rows]


@pytest.mark.parametrize(
    ("lengths", "options"),
    [
        ([3, 11], {}),
        ([9], {"pad_to_multiple_of": 4}),
        ([3, 0], {}),
        ([-1], {}),
        ([1.5], {}),
        ([[1]], {}),
        ([1], {"world_size": 0}),
        ([1], {"world_size": True}),
        ([1], {"row_tokens": 1.5}),
        ([1], {"rows_per_micro_batch": -1}),
        ([1], {"pad_to_multiple_of": 0}),
        ([1], {"adapters": []}),
        ([1], {"cost": (0, 0)}),
        ([1], {"cost": (1, -1)}),
        ([1], {"cost": 3}),
        ([10, 10], {"cost": (2**60, 0)}),
    ],
)
def test_what_cannot_be_planned_is_refused_with_the_values(lengths: Any, options: Any) -> None:
    with pytest.raises(PackingError) as caught:
        plan(lengths, **({"row_tokens": 10, "world_size": 2} | options))
    assert isinstance(caught.value, RlbufferError)
    assert isinstance(caught.value, ValueError)


def test_redeal_keeps_micro_steps_level_and_ranks_balanced() -> None:
    lengths = np.random.default_rng(2).integers(1, 1000, 800)
    for deep in (1, 2):
        made = plan(lengths, row_tokens=1000, world_size=8, rows_per_micro_batch=deep)
        for world_size in (1, 2, 3, 5, 16):
            other = redeal(made, world_size)
            assert all(len(micro_batch) == deep for step in other.rows for micro_batch in step)
            ideal = cost_of(lengths, range(800)) / world_size
            dealt = -(-len([r for r in rows_of(made) if r]) // (world_size * deep)) * world_size * deep
            slack = dealt / len([r for r in rows_of(made) if r])
            assert sum(waits(other, lengths)) / ideal < 1.03 * slack


def test_redeal_gives_no_rank_always_the_costlier_end() -> None:
    lengths = range(93, 101)  # each above half a row: a row of its own
    two = redeal(plan(list(lengths), row_tokens=100, world_size=8, cost=(1, 0)), 2)
    loads = [sum(cost_of(lengths, row, (1, 0)) for step in two.rows for row in step[rank]) for rank in (0, 1)]
    assert loads == [386, 386]


@pytest.mark.parametrize(
    ("lengths", "rows"),
    [
        ([], 0),
        ([10], 1),
        ([6, 6, 6], 3),
        ([5, 5, 5], 2),
        ([7, 7, 4, 4], 3),
        ([1] * 25, 3),
        ([6, 4, 6, 4], 2),
    ],
)
def test_fewest_rows_sees_what_cannot_share_a_row(lengths: list[int], rows: int) -> None:
    assert fewest_rows(lengths, 10) == rows
