"""Records of experts: what is one, in what dtype, and which one counts where an engine has read tokens again."""

from __future__ import annotations

import numpy as np
import pytest

from rlbuffer.errors import InvalidRollout
from rlbuffer.records.routed import is_record, joined, routed_column


def rows(*values: list[int], dtype: str = "u1") -> np.ndarray:
    """[T, 1 layer, K]."""
    return np.array(values, dtype)[:, None]


def test_a_row_of_different_experts_is_a_record() -> None:
    given = rows([2, 0], [0, 0], [-1, -1], [-1, 3], [3, 3], dtype="i2")
    assert is_record(given)[:, 0].tolist() == [True, False, False, False, False]


@pytest.mark.parametrize(
    ("values", "dtype"), [([0, 255], "u1"), ([0, 256], "<u2"), ([-1, 255], "<i2"), ([-1, 40_000], "<i4")]
)
def test_a_record_has_the_smallest_dtype_that_holds_it(values: list[int], dtype: str) -> None:
    assert routed_column(rows(values, dtype="i8"), 1).dtype == np.dtype(dtype)


def test_tokens_at_the_end_that_no_engine_took_in_have_no_record() -> None:
    column = routed_column(rows([1, 2], [2, 0]), 4)
    assert column[:, 0].tolist() == [[1, 2], [2, 0], [0, 0], [0, 0]]


@pytest.mark.parametrize("wrong", [np.zeros((2, 2), int), np.zeros((1, 1, 2)), np.zeros((5, 1, 2), int), "text"])
def test_what_is_no_record_of_these_tokens_is_refused(wrong: object) -> None:
    with pytest.raises(InvalidRollout, match="column routed_experts: expected integers"):
        routed_column(wrong, 4)
    with pytest.raises(InvalidRollout, match="no experts"):
        routed_column(np.full((1, 1, 2), 2**40), 4)


def test_the_later_record_counts_where_it_is_one() -> None:
    before, again = rows([1, 2], [3, 4], [0, 0]), rows([2, 1], [0, 0], [5, 300], [7, 8], dtype="u2")
    column = joined([(3, before), (4, again), (6, rows([6, 7], [0, 0]))], 6)
    assert column is not None
    assert column[:, 0].tolist() == [[2, 1], [3, 4], [5, 300], [7, 8], [6, 7], [0, 0]]
    assert joined([], 4) is None
    with pytest.raises(InvalidRollout, match="in one sequence"):
        joined([(2, np.zeros((2, 2, 2), np.uint8)), (4, again)], 4)
