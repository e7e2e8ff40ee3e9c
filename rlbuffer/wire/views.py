"""The arrays of a payload as views of its bytes, with nothing of it decoded that is not trained.

Size, length and checksum that equal those of the push's metadata prove that the bytes are those that the writer
described: not damaged, not another payload. They prove nothing about the values, because whoever wrote the payload
wrote the metadata. So everything that is trained is checked here as :class:`~rlbuffer.records.rollout.Rollout` checks
it, except the ranges of values, which cost less for many rollouts at once: :func:`in_range`, over many micro-batches.
What only people look at (turns, text, metadata, the payload's own copies of id and rewards) stays packed.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlbuffer.errors import InvalidRollout, PayloadError
from rlbuffer.records.columns import REQUIRED_COLUMNS
from rlbuffer.records.info import RolloutInfo
from rlbuffer.records.rollout import MAX_LOGPROB, MIN_LOGPROB, RolloutArrays, as_arrays, check_logprobs
from rlbuffer.records.spans import as_spans
from rlbuffer.wire.arrays import ARRAY_ALIGNMENT, Cursor, Details, further_tables
from rlbuffer.wire.bounded_msgpack import picked
from rlbuffer.wire.payload import unframed
from rlbuffer.wire.payload_parts import HEADER_BYTES, MAX_DETAILS_BYTES

_SPANS = (Details._fields.index("spans"),)
_SPANS_AND_TABLES = (*_SPANS, Details._fields.index("columns"), Details._fields.index("attachments"))
_TOKENS, _MASK, _LOGPROBS = REQUIRED_COLUMNS.values()
_TOKEN_IDS = 2**31
_NONE: Mapping[str, NDArray[Any]] = MappingProxyType({})


def view_rollout(data: bytes, expected: RolloutInfo) -> RolloutArrays | None:
    """The arrays of a payload that is the one which `expected` announces: read-only views of `data`.

    None: something is wrong or unusual, and :func:`~rlbuffer.wire.payload.decode_rollout` says what. The values of
    tokens, marks and logprobs are not looked at: see :func:`in_range`.
    """
    if len(data) != expected.size:
        return None
    try:
        return _viewed(data, expected)
    except (InvalidRollout, PayloadError, ValueError, TypeError, OverflowError):
        return None


def in_range(
    tokens: NDArray[np.int32], loss_mask: NDArray[np.bool_], logprobs: NDArray[np.float32], vocabulary: int | None
) -> bool:
    """True when all tokens are ids of a vocabulary of this size (None: any), the mask's bytes are 0 and 1, and all
    logprobs can be trained."""
    return bool(
        # A negative one is above all others when its bits are taken for a number without a sign.
        tokens.view(np.uint32).max() < (_TOKEN_IDS if vocabulary is None else min(vocabulary, _TOKEN_IDS))
        and loss_mask.view(np.uint8).max() <= 1
        # False for what is not a number, too: it is the smallest and the largest of every array that has one.
        and logprobs.min() >= MIN_LOGPROB
        and logprobs.max() <= MAX_LOGPROB
    )


def _viewed(data: bytes, expected: RolloutInfo) -> RolloutArrays | None:
    count, length, end, checksum = unframed(data)
    if checksum != expected.checksum or not length == expected.length > 0 or end > HEADER_BYTES + MAX_DETAILS_BYTES:
        return None
    further = count != len(REQUIRED_COLUMNS)
    at = end + -end % ARRAY_ALIGNMENT
    tokens = np.frombuffer(data, _TOKENS, length, at)
    at += tokens.nbytes
    at += -at % ARRAY_ALIGNMENT
    mask = np.frombuffer(data, _MASK, length, at)
    at += length
    at += -at % ARRAY_ALIGNMENT
    logprobs = np.frombuffer(data, _LOGPROBS, length, at)
    numbers, *tables = picked(
        memoryview(data)[HEADER_BYTES:end],
        _SPANS_AND_TABLES if further else _SPANS,
        items=len(Details._fields),
    )
    trained = np.count_nonzero(mask)
    if (
        trained != expected.loss_tokens
        or not expected.prompt_tokens  # the first token is trained
        or (mask.argmax() if trained else length) != expected.prompt_tokens
        or type(numbers) is not list
    ):
        return None
    spans = as_spans(tuple(zip(*[iter(numbers)] * 3, strict=True)), mask)
    if min(spans)[0] != expected.min_version or max(spans)[0] != expected.max_version:
        return None
    if not further:
        return RolloutArrays(tokens, mask, logprobs, spans, _NONE, _NONE, data)
    cursor = Cursor(data, at + logprobs.nbytes)
    columns, attachments = (
        as_arrays(kind, {name: cursor.array(*layout) for name, layout in table.items()})
        for kind, table in zip(
            ("column", "attachment"), further_tables(tables[0], tables[1], count, length), strict=True
        )
    )
    for name, array in columns.items():
        if name.endswith("logprobs"):
            check_logprobs(name, array)
    return RolloutArrays(tokens, mask, logprobs, spans, columns, attachments, data)
