"""Payloads without further arrays, whose bytes were received where their arrays are trained, checked many at once.

Nothing is copied: tokens, loss mask and logprobs lie in a micro-batch, the rest in a block of memory beside it. All is
checked that :func:`~rlbuffer.wire.views.view_rollout` checks. A payload that is not sound, or not laid out as its size
suggests, gets None here: the caller joins its pieces and reads it the slower way, which says what is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlbuffer.errors import InvalidRollout, PayloadError
from rlbuffer.records.checks import MAX_COUNT
from rlbuffer.records.columns import REQUIRED_COLUMNS
from rlbuffer.records.spans import as_spans
from rlbuffer.wire.arrays import ARRAY_ALIGNMENT, Details
from rlbuffer.wire.bounded_msgpack import picked, picked_of_each
from rlbuffer.wire.checksum import crc32
from rlbuffer.wire.payload import HEADER_DTYPE, PAYLOAD_FORMAT, ROLLOUT
from rlbuffer.wire.payload_parts import HEADER_BYTES, MAX_DETAILS_BYTES

_SPANS = Details._fields.index("spans")
_CHECKSUM_AT = HEADER_BYTES - 4
_ITEMSIZES = [dtype.itemsize for dtype in REQUIRED_COLUMNS.values()]
Spans = tuple[Sequence[int], ...]
"""(policy version, start, end) of every stretch of a rollout that was sampled."""


Pieces = list[memoryview]
"""All bytes of a payload: header and details with the gap behind them, tokens, gap, loss mask, gap, logprobs."""


def gaps(lengths: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Bytes between tokens and loss mask, and between loss mask and logprobs, of payloads of so many tokens."""
    tokens, mask, _ = (-lengths * size % ARRAY_ALIGNMENT for size in _ITEMSIZES)
    return tokens, mask


def head_sizes(sizes: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Bytes before the tokens, of payloads of these sizes and numbers of tokens that have no further arrays and no
    text; 0 where the size shows that a payload has some."""
    heads = sizes - lengths * sum(_ITEMSIZES) - sum(gaps(lengths))
    most = HEADER_BYTES + MAX_DETAILS_BYTES + ARRAY_ALIGNMENT
    is_plain = (lengths > 0) & (heads > HEADER_BYTES) & (heads % ARRAY_ALIGNMENT == 0) & (heads < most)
    return np.where(is_plain, heads, 0)


def checksum_of(payload: Sequence[memoryview]) -> int:
    """The checksum that a payload of these pieces should carry; -1 of a single piece: none is in place."""
    head, *others = payload
    if not others:
        return -1
    checksum = crc32(head[HEADER_BYTES:], crc32(head[:_CHECKSUM_AT]))
    for piece in others:
        checksum = crc32(piece, checksum)
    return checksum


def checked(
    payloads: Sequence[Pieces],
    checksums: Sequence[int],
    masks: Sequence[NDArray[np.bool_]],
    expected: NDArray[np.void],
) -> list[Spans | None]:
    """The version spans of each payload that is the one which `expected` announces; None where something is wrong or
    unusual.

    The values of tokens, marks and logprobs are not looked at: see :func:`~rlbuffer.wire.views.in_range`.

    Args:
        checksums: :func:`checksum_of` each.
        masks: the loss mask of each, [T], where its bytes are.
        expected: [n], with the whole numbers of :data:`~rlbuffer.records.info.ROW_DTYPE`.
    """
    if not payloads:
        return []
    headers = np.frombuffer(b"".join([pieces[0][:HEADER_BYTES] for pieces in payloads]), HEADER_DTYPE)
    ends = HEADER_BYTES + headers["details"].astype(np.int64)
    are_sound = (
        (headers["magic"] == ROLLOUT)
        & (headers["format"] == PAYLOAD_FORMAT)
        & (headers["arrays"] == len(REQUIRED_COLUMNS))
        & (ends <= HEADER_BYTES + MAX_DETAILS_BYTES)
        & (ends + -ends % ARRAY_ALIGNMENT == [len(pieces[0]) for pieces in payloads])
        & (headers["tokens"] == expected["length"])
        & (headers["total"] == expected["size"])
        & (headers["checksum"] == expected["checksum"])
        & (headers["checksum"] == checksums)
        & _are_marked_so(masks, expected)
    )
    sound = np.flatnonzero(are_sound).tolist()
    packed = [payloads[i][0][HEADER_BYTES:end] for i, end in zip(sound, ends[sound].tolist(), strict=True)]
    spans = _spans(packed, [masks[i] for i in sound], expected[sound])
    of_sound = dict(zip(sound, spans, strict=True))
    return [of_sound.get(i) for i in range(len(payloads))]


def _are_marked_so(masks: Sequence[NDArray[np.bool_]], expected: NDArray[np.void]) -> NDArray[np.bool_]:
    """True where as many tokens are trained as is announced, and the first of them is the one that is announced."""
    count_nonzero = np.count_nonzero
    prompts, trained = expected["prompt_tokens"], expected["loss_tokens"]
    counts = np.array([count_nonzero(mask) for mask in masks])
    firsts = np.where(counts > 0, [mask.argmax() for mask in masks], expected["length"])
    are_so: NDArray[np.bool_] = (counts == trained) & (firsts == prompts) & (prompts > 0)
    return are_so


def _spans(
    packed: Sequence[memoryview], masks: Sequence[NDArray[np.bool_]], expected: NDArray[np.void]
) -> list[Spans | None]:
    try:
        numbers = picked_of_each(packed, _SPANS, items=len(Details._fields))
    except PayloadError:  # of one of them: each is looked at alone
        numbers = [*map(_numbers, packed)]
    single = [i for i, its in enumerate(numbers) if type(its) is list and len(its) == 3]
    plain = {
        i
        for i, is_plain in zip(single, _are_plain([numbers[i] for i in single], expected[single]), strict=True)
        if is_plain
    }
    return [(its,) if i in plain else _several(its, masks[i], expected[i]) for i, its in enumerate(numbers)]


def _numbers(packed: memoryview) -> Any:
    try:
        return picked(packed, (_SPANS,), items=len(Details._fields))[0]
    except PayloadError:
        return None


def _are_plain(numbers: Sequence[list[Any]], expected: NDArray[np.void]) -> Sequence[bool]:
    """True for a single span up to the last token, as it should be: most rollouts have one."""
    if set(map(type, chain(*numbers))) != {int}:
        return [False] * len(numbers)
    try:
        version, start, end = np.array(numbers, np.int64).T
    except OverflowError:
        return [False] * len(numbers)
    are_plain: list[bool] = (
        (version >= 0)
        & (version <= MAX_COUNT)
        & (version.astype(np.uint64) == expected["min_version"])
        & (version.astype(np.uint64) == expected["max_version"])
        & (start >= 0)
        & (start < end)
        & (start <= expected["prompt_tokens"])
        & (end == expected["length"])
    ).tolist()
    return are_plain


def _several(numbers: Any, mask: NDArray[np.bool_], expected: np.void) -> Spans | None:
    """The spans of one rollout with several; None where they are not those announced."""
    if type(numbers) is not list:
        return None
    try:
        spans = as_spans(tuple(zip(*[iter(numbers)] * 3, strict=True)), mask)
    except (InvalidRollout, ValueError, TypeError, OverflowError):
        return None
    is_so = min(spans)[0] == expected["min_version"] and max(spans)[0] == expected["max_version"]
    return spans if is_so else None
