"""A column is refused at the first number that it may not hold, and a trained token outside of every span is found."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rlbuffer.errors import InvalidRollout
from rlbuffer.records.columns import as_column
from rlbuffer.records.spans import as_spans

_T = TypeVar("_T")
numbers = st.sampled_from([0.0, -1.5, 1e12, -1e12, 1.1e12, -3e38, math.inf, -math.inf, math.nan]) | st.floats(width=32)


def made(call: Callable[[], _T]) -> tuple[_T | None, str]:
    """What `call` returns, or the message of its refusal."""
    try:
        return call(), ""
    except InvalidRollout as error:
        return None, str(error)


def refusal(values: list[list[float]], kind: str) -> str:
    """The message for rows of numbers, looked at one after the other; "" for none."""
    label = f"{kind} x"
    for i, row in enumerate(values):
        if not all(math.isfinite(value) for value in row):
            return f"{label}: not finite at position {i}"
    for i, row in enumerate(values):
        if kind == "column" and any(abs(value) > 1e12 for value in row):
            return f"{label}: the number at position {i} is beyond the limit of 1e+12, either sign"
    return ""


@settings(max_examples=100, deadline=None)
@given(
    values=st.lists(st.lists(numbers, min_size=2, max_size=2), max_size=6),
    dtype=st.sampled_from(["<f2", "<f4", "<f8", ">f4"]),
    kind=st.sampled_from(["column", "attachment"]),
)
def test_the_first_number_that_a_column_may_not_hold_is_named(values: Any, dtype: str, kind: str) -> None:
    with np.errstate(over="ignore"):
        given_array = np.array(values, dtype).reshape(-1, 2)
    column, message = made(lambda: as_column("x", given_array, kind=kind))
    assert message == refusal(given_array.tolist(), kind)
    if column is not None:
        assert column.dtype == np.dtype(dtype).newbyteorder("<")
        assert np.array_equal(column, given_array)
        assert not np.shares_memory(column, given_array)


@settings(max_examples=100, deadline=None)
@given(mask=st.lists(st.booleans(), min_size=1, max_size=12), cuts=st.sets(st.integers(0, 12), max_size=6))
def test_the_first_trained_token_in_no_span_is_named(mask: list[bool], cuts: set[int]) -> None:
    bounds = sorted(cut for cut in cuts if cut <= len(mask))
    spans = [(7, start, end) for start, end in zip(bounds[::2], bounds[1::2], strict=False)]
    covered = {i for _, start, end in spans for i in range(start, end)}
    bare = [i for i, trained in enumerate(mask) if trained and i not in covered]
    expected = f"version_spans: the trained token at position {bare[0]} is in no span" if bare else ""
    if not spans:
        expected = "version_spans: at least one is required"
    found, message = made(lambda: as_spans(spans, np.array(mask)))
    assert message == expected
    assert found is None or [tuple(span) for span in found] == spans
