"""The arrays of a pulled payload as views of the received bytes, with nothing of it decoded that is not trained.

Size, length and checksum that equal those of the push's metadata prove that the bytes are those that the writer
described: not damaged, not another payload. They prove nothing about the values, because whoever wrote the payload
wrote the metadata. So everything that is trained is checked here as :class:`~rlbuffer.records.rollout.Rollout` checks
it, except the ranges of tokens and logprobs, which cost less for many rollouts at once: :func:`in_range`, over a whole
micro-batch. What only people look at (turns, text, metadata, the payload's own copies of id and rewards) stays packed.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlbuffer.errors import InvalidRollout, PayloadError
from rlbuffer.records.checks import MAX_ITEMS, MAX_NUMBER
from rlbuffer.records.columns import REQUIRED_COLUMNS
from rlbuffer.records.info import RolloutInfo
from rlbuffer.records.rollout import MAX_LOGPROB, RolloutArrays, as_arrays, refuse_above_0
from rlbuffer.records.spans import as_spans
from rlbuffer.wire.arrays import ARRAY_ALIGNMENT, Cursor, Details, further_tables
from rlbuffer.wire.bounded_msgpack import picked
from rlbuffer.wire.payload import payload_checksum, unframed
from rlbuffer.wire.payload_parts import HEADER_BYTES, MAX_DETAILS_BYTES

_SPANS = (Details._fields.index("spans"),)
_SPANS_AND_TABLES = (*_SPANS, Details._fields.index("columns"), Details._fields.index("attachments"))
_TOKENS, _LOGPROBS = REQUIRED_COLUMNS["tokens"], REQUIRED_COLUMNS["logprobs"]
_NONE: Mapping[str, NDArray[Any]] = MappingProxyType({})


def view_rollout(data: bytes, expected: RolloutInfo) -> RolloutArrays | None:
    """The arrays of a payload that is the one which `expected` announces; read-only views of `data`.

    None: something is wrong or unusual, and :func:`~rlbuffer.wire.payload.decode_rollout` says what. The values of
    tokens and logprobs are not looked at: see :func:`in_range`.
    """
    if (len(data), payload_checksum(data)) != (expected.size, expected.checksum):
        return None
    try:
        return _viewed(data, expected)
    except (InvalidRollout, PayloadError, ValueError, TypeError, OverflowError):
        return None


def in_range(tokens: NDArray[np.int32], logprobs: NDArray[np.float32], vocabulary: int | None) -> bool:
    """True when all tokens are ids of a vocabulary of this size (None: any), and all logprobs can be trained."""
    return bool(
        tokens.min() >= 0
        and (vocabulary is None or tokens.max() < vocabulary)
        # False for what is not a number, too: it is the smallest and the largest of every array that has one.
        and logprobs.min() >= -MAX_NUMBER
        and logprobs.max() <= MAX_LOGPROB
    )


def _viewed(data: bytes, expected: RolloutInfo) -> RolloutArrays | None:
    count, length, end = unframed(data)
    if not length == expected.length > 0 or end > HEADER_BYTES + MAX_DETAILS_BYTES:
        return None
    at = end + -end % ARRAY_ALIGNMENT
    tokens = np.frombuffer(data, _TOKENS, length, at)
    at += tokens.nbytes
    at += -at % ARRAY_ALIGNMENT
    marks = np.frombuffer(data, np.uint8, length, at)
    mask = marks.view(np.bool_)
    first = data.find(1, at, at + length) - at
    at += length
    at += -at % ARRAY_ALIGNMENT
    logprobs = np.frombuffer(data, _LOGPROBS, length, at)
    further = count != len(REQUIRED_COLUMNS)
    numbers, *tables = picked(
        memoryview(data)[HEADER_BYTES:end],
        _SPANS_AND_TABLES if further else _SPANS,
        items=len(Details._fields),
        max_items=MAX_ITEMS,
    )
    if np.maximum.reduce(marks) > 1 or mask[0] or type(numbers) is not list or len(numbers) % 3:
        return None
    spans = as_spans([numbers[i : i + 3] for i in range(0, len(numbers), 3)], length, mask)
    if (
        np.count_nonzero(mask) != expected.loss_tokens
        or (first if first > 0 else length) != expected.prompt_tokens
        or min(numbers[::3]) != expected.min_version
        or max(numbers[::3]) != expected.max_version
    ):
        return None
    if not further:
        return RolloutArrays(tokens, mask, logprobs, spans, _NONE, _NONE, data)
    cursor = Cursor(data, at + logprobs.nbytes)
    columns, attachments = (
        MappingProxyType(as_arrays(kind, {name: cursor.array(*layout) for name, layout in table.items()}))
        for kind, table in zip(
            ("column", "attachment"), further_tables(tables[0], tables[1], count, length), strict=True
        )
    )
    for name, array in columns.items():
        if name.endswith("logprobs"):
            refuse_above_0(name, array)
    return RolloutArrays(tokens, mask, logprobs, spans, columns, attachments, data)
