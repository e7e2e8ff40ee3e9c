"""The arrays of a payload as views of its bytes, with nothing of it decoded that is not trained.

Size, length and checksum that equal those of the push's metadata prove that the bytes are those that the writer
described: not damaged, not another payload. They prove nothing about the values, because whoever wrote the payload
wrote the metadata. So everything that is trained is checked here as :class:`~rlbuffer.records.rollout.Rollout` checks
it, except the ranges of values, which cost less for many rollouts at once: :func:`in_range`, over many micro-batches.
What only people look at (turns, text, metadata, the payload's own copies of id and rewards) stays packed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import repeat
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlbuffer.errors import InvalidRollout, PayloadError
from rlbuffer.records.columns import REQUIRED_COLUMNS
from rlbuffer.records.info import ROW_DTYPE
from rlbuffer.records.rollout import MAX_LOGPROB, MIN_LOGPROB, RolloutArrays, as_arrays, check_logprobs
from rlbuffer.records.spans import VersionSpan, as_spans
from rlbuffer.wire.arrays import ARRAY_ALIGNMENT, Cursor, Details, further_tables
from rlbuffer.wire.bounded_msgpack import picked, picked_of_each
from rlbuffer.wire.checksum import crc32
from rlbuffer.wire.payload import HEADER_DTYPE, PAYLOAD_FORMAT, ROLLOUT, unframed
from rlbuffer.wire.payload_parts import HEADER_BYTES, MAX_DETAILS_BYTES

_SPANS = (Details._fields.index("spans"),)
_SPANS_AND_TABLES = (*_SPANS, Details._fields.index("columns"), Details._fields.index("attachments"))
_TOKENS, _MASK, _LOGPROBS = REQUIRED_COLUMNS.values()
_TOKEN_IDS = 2**31
_NONE: Mapping[str, NDArray[Any]] = MappingProxyType({})


class Announced(NamedTuple):
    """What a step's part says of a payload: the integers of :class:`~rlbuffer.records.info.RolloutInfo`."""

    length: int
    prompt_tokens: int
    loss_tokens: int
    min_version: int
    max_version: int
    size: int
    checksum: int


ANNOUNCED = np.dtype([(name, ROW_DTYPE[name]) for name in Announced._fields])
"""The same as a row."""


def view_rollouts(payloads: Sequence[bytes | None], announced: NDArray[np.void]) -> list[RolloutArrays | None]:
    """The same as :func:`view_rollout` of each payload and its row of :data:`ANNOUNCED`; faster for those without
    further arrays, which are most."""
    out: list[RolloutArrays | None] = [None] * len(payloads)
    sizes = announced["size"].tolist()
    whole = [i for i, data in enumerate(payloads) if data is not None and len(data) == sizes[i] >= HEADER_BYTES]
    for i, its in zip(whole, _views([payloads[i] or b"" for i in whole], announced[whole]), strict=True):
        out[i] = its or view_rollout(payloads[i] or b"", Announced(*announced[i].tolist()))
    return out


def view_rollout(data: bytes, expected: Announced) -> RolloutArrays | None:
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


def _views(payloads: Sequence[bytes], announced: NDArray[np.void]) -> Iterator[RolloutArrays | None]:
    """The arrays of each payload without further arrays; None: :func:`view_rollout` has to look at it."""
    headers = np.frombuffer(b"".join([data[:HEADER_BYTES] for data in payloads]), HEADER_DTYPE)
    lengths, ends = announced["length"].astype(np.int64), HEADER_BYTES + headers["details"].astype(np.int64)
    starts, behind = list[NDArray[np.int64]](), ends
    for dtype in REQUIRED_COLUMNS.values():
        starts.append(behind + -behind % ARRAY_ALIGNMENT)
        behind = starts[-1] + lengths * dtype.itemsize
    are_plain = (
        (headers["magic"] == ROLLOUT)
        & (headers["format"] == PAYLOAD_FORMAT)
        & (headers["arrays"] == len(REQUIRED_COLUMNS))
        & (headers["tokens"] == lengths)
        & (headers["total"] == announced["size"])
        & (headers["checksum"] == announced["checksum"])
        & (ends <= HEADER_BYTES + MAX_DETAILS_BYTES)
        & (behind <= announced["size"])
        & (announced["prompt_tokens"] > 0)
    ).tolist()
    try:
        packed = [
            data[HEADER_BYTES:end]
            for data, end, is_plain in zip(payloads, ends.tolist(), are_plain, strict=True)
            if is_plain
        ]
        spans = iter(picked_of_each(packed, *_SPANS, items=len(Details._fields)))
    except PayloadError:  # of one of them
        spans = repeat(None)
    places = zip(*(its.tolist() for its in starts), announced.tolist(), strict=True)
    for data, is_plain, place in zip(payloads, are_plain, places, strict=True):
        yield _plain(data, next(spans), *place) if is_plain else None


def _plain(
    data: bytes, numbers: Any, tokens_at: int, mask_at: int, logprobs_at: int, announced: Sequence[int]
) -> RolloutArrays | None:
    """A payload of a single span up to its last token, as nearly all have."""
    length, prompt_tokens, loss_tokens, oldest, newest, _, checksum = announced
    if type(numbers) is not list or [*map(type, numbers)] != [int, int, int]:
        return None
    version, start, end = numbers
    if not (oldest == newest == version and 0 <= start <= prompt_tokens and start < end == length):
        return None
    view = memoryview(data)
    if crc32(view[HEADER_BYTES:], crc32(view[: HEADER_BYTES - 4])) != checksum:
        return None
    mask = np.frombuffer(data, _MASK, length, mask_at)
    if np.count_nonzero(mask) != loss_tokens or (mask.argmax() if loss_tokens else length) != prompt_tokens:
        return None
    tokens = np.frombuffer(data, _TOKENS, length, tokens_at)
    logprobs = np.frombuffer(data, _LOGPROBS, length, logprobs_at)
    return RolloutArrays(tokens, mask, logprobs, (VersionSpan(version, start, end),), _NONE, _NONE, data)


def _viewed(data: bytes, expected: Announced) -> RolloutArrays | None:
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
