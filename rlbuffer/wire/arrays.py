"""The arrays of a payload: the table that describes them, and where each lies behind the details."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlbuffer.errors import PayloadError
from rlbuffer.records.columns import MAX_ARRAYS, MAX_DIMENSIONS, REQUIRED_COLUMNS
from rlbuffer.wire.metadata import MAX_PAYLOAD_BYTES
from rlbuffer.wire.payload_parts import CODES

ARRAY_ALIGNMENT = 8
"""Bytes: every array, and the text, begins at a multiple."""
DTYPES = {code: dtype for dtype, code in CODES.items()}
"""Name of a dtype in a table -> the dtype."""
_Table = dict[str, tuple[np.dtype[Any], tuple[int, ...]]]


class Details(NamedTuple):
    """The details list in order; :func:`encode_rollout` writes it."""

    rollout_id: Any
    reward: Any
    rewards: Any
    successes: Any
    finish_reason: Any
    is_truncated: Any
    spans: Any
    turns: Any
    columns: Any
    attachments: Any
    text_bytes: Any
    metadata: Any


class Cursor:
    """Walks the arrays behind the details; knows what is left, so that no shape can ask for more."""

    def __init__(self, data: bytes | memoryview, at: int) -> None:
        self.data = data
        self.at = at

    def skip(self, size: int) -> int:
        start = self.at + (-self.at % ARRAY_ALIGNMENT)
        if start + size > len(self.data):
            raise PayloadError(f"payload is too short: {size} bytes at {start} of {len(self.data)}")
        if any(self.data[self.at : start]):
            raise PayloadError(f"payload has bytes between its arrays at {self.at}")
        self.at = start + size
        return start

    def array(self, dtype: np.dtype[Any], shape: Sequence[int]) -> NDArray[Any]:
        count = math.prod(shape)
        start = self.skip(count * dtype.itemsize)
        if count == 0:
            return np.zeros(shape, dtype)
        return np.frombuffer(self.data, dtype, count, start).reshape(shape)


class PayloadContent(NamedTuple):
    """The content of a rollout's payload; arrays are views of its bytes."""

    details: Details
    required: dict[str, NDArray[Any]]
    """The columns tokens, loss_mask and logprobs, each [T]."""
    columns: dict[str, NDArray[Any]]
    """Further columns, [T, ...], in the order of the payload."""
    attachments: dict[str, NDArray[Any]]
    """Arrays of any shape, in the order of the payload."""
    text: str | None
    """Rendered transcript."""


def content_of(data: bytes | memoryview, details: Any, *, count: int, tokens: int, at: int) -> PayloadContent:
    """Takes a payload of `count` arrays apart, whose decoded `details` end at `at`.

    Raises:
        PayloadError: the details are not of this format, or do not fit the bytes behind them.
    """
    if not isinstance(details, list) or len(details) != len(Details._fields):
        raise PayloadError("invalid rollout payload: details are not the list of this format")
    d = Details(*details)
    tables = further_tables(d.columns, d.attachments, count, tokens)
    cursor = Cursor(data, at)
    required = {name: cursor.array(dtype, (tokens,)) for name, dtype in REQUIRED_COLUMNS.items()}
    columns, attachments = ({name: cursor.array(*layout) for name, layout in table.items()} for table in tables)
    text = None
    if d.text_bytes is not None:
        size = as_count("text", d.text_bytes)
        start = cursor.skip(size)
        try:
            text = str(data[start : start + size], "utf-8")
        except UnicodeDecodeError:
            raise PayloadError("invalid rollout payload: the text is not UTF-8") from None
    if cursor.at != len(data):
        raise PayloadError(f"payload has {len(data) - cursor.at} bytes too many")
    return PayloadContent(d, required, columns, attachments, text)


def further_tables(columns: Any, attachments: Any, count: int, tokens: int) -> tuple[_Table, _Table]:
    """Name -> dtype and shape of the columns, and of the attachments, of a payload with `count` arrays in all.

    Raises:
        PayloadError: they are not tables of this format, or name another number of arrays.
    """
    tables = _table("columns", columns, (tokens,)), _table("attachments", attachments, ())
    if count != len(REQUIRED_COLUMNS) + sum(len(table) for table in tables):
        raise PayloadError(f"invalid rollout payload: {count} arrays in the header, others in the table")
    return tables


def _table(name: str, rows: Any, leading: tuple[int, ...]) -> _Table:
    if not isinstance(rows, list) or len(rows) > MAX_ARRAYS:
        raise PayloadError(f"invalid rollout payload: table of {name}")
    table: _Table = {}
    for row in rows:
        if not isinstance(row, list) or len(row) < 2 or not all(isinstance(x, str) for x in row[:2]):
            raise PayloadError(f"invalid rollout payload: table of {name}")
        dtype = DTYPES.get(row[1])
        if dtype is None:
            raise PayloadError(f"invalid rollout payload: {row[0]!r} has the unknown dtype {row[1]!r}")
        shape = leading + tuple(as_count(row[0], n) for n in row[2:])
        if row[0] in table or len(shape) > MAX_DIMENSIONS:
            raise PayloadError(f"invalid rollout payload: table of {name}")
        table[row[0]] = dtype, shape
    return table


def as_count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_PAYLOAD_BYTES:
        raise PayloadError(f"invalid rollout payload: {name!r} has the size {value!r}")
    return value
