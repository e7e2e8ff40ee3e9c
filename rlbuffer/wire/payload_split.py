"""A payload taken apart so that the same bytes can be made of its parts again: what an archive keeps in columns.

The details stay packed as they came: maps and numbers have several encodings, and the checksum is of the one that the
writer chose.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlbuffer.errors import PayloadError
from rlbuffer.records.columns import REQUIRED_COLUMNS
from rlbuffer.wire.arrays import ARRAY_ALIGNMENT, Details, content_of
from rlbuffer.wire.bounded_msgpack import unchecked
from rlbuffer.wire.payload import joined, unframed
from rlbuffer.wire.payload_parts import HEADER_BYTES, MAX_DETAILS_BYTES

_FINISH_REASON = Details._fields.index("finish_reason")
_TABLES = slice(Details._fields.index("columns"), Details._fields.index("text_bytes") + 1)


class PayloadParts(NamedTuple):
    """The parts of a rollout's payload; arrays are views of its bytes."""

    packed: bytes
    """The details as they stand in the payload."""
    finish_reason: Any
    """The value in the details, not checked further."""
    required: dict[str, NDArray[Any]]
    """The columns tokens, loss_mask and logprobs, each [T]."""
    columns: dict[str, NDArray[Any]]
    """Further columns, [T, ...], in the order of the payload."""
    attachments: dict[str, NDArray[Any]]
    """Arrays of any shape, in the order of the payload."""
    text: str | None
    """Rendered transcript."""
    checksum: int
    """CRC-32 that the payload carries."""


def split(data: bytes | memoryview) -> PayloadParts:
    """The parts of a rollout's payload, of which :func:`joined_again` makes the same bytes.

    Of the details only what says where the arrays are is looked at: the rest is kept as it came.

    Raises:
        PayloadError: damaged, or of a form that rlbuffer does not write.
    """
    count, tokens, at, checksum = unframed(data)
    packed = bytes(memoryview(data)[HEADER_BYTES:at])
    details = unchecked(packed, limit=MAX_DETAILS_BYTES)
    plain = _required(data, tokens, at) if count == len(REQUIRED_COLUMNS) and _has_no_more(details) else None
    if plain is not None:
        parts = PayloadParts(packed, details[_FINISH_REASON], plain, {}, {}, None, checksum)
    else:
        c = content_of(data, details, count=count, tokens=tokens, at=at)
        parts = PayloadParts(packed, c.details.finish_reason, c.required, c.columns, c.attachments, c.text, checksum)
    if tokens and parts.required["loss_mask"].view(np.uint8).max() > 1:
        raise PayloadError("invalid rollout payload: a mark of the loss mask is neither 0 nor 1")
    return parts


def _has_no_more(details: Any) -> bool:
    """True of the details of a payload without further arrays and text."""
    return type(details) is list and len(details) == len(Details._fields) and details[_TABLES] == [[], [], None]


def _required(data: bytes | memoryview, tokens: int, at: int) -> dict[str, NDArray[Any]] | None:
    """The arrays of a payload that has no others; None where the bytes are not laid out so."""
    arrays = {}
    for name, dtype in REQUIRED_COLUMNS.items():
        start = at + -at % ARRAY_ALIGNMENT
        end = start + tokens * dtype.itemsize
        if not tokens or end > len(data) or any(data[at:start]):
            return None
        arrays[name] = np.frombuffer(data, dtype, tokens, start)
        at = end
    return arrays if at == len(data) else None


def joined_again(parts: PayloadParts) -> bytes:
    """The payload that :func:`split` was given.

    Example:
        >>> from rlbuffer.testing import make_group
        >>> from rlbuffer.wire.payload import encode_rollout
        >>> data = encode_rollout(make_group(lengths=[8]).rollouts[0])
        >>> joined_again(split(data)) == data
        True
    """
    arrays = [*parts.required.values(), *parts.columns.values(), *parts.attachments.values()]
    text = None if parts.text is None else parts.text.encode()
    return joined(parts.packed, [np.ascontiguousarray(a) for a in arrays], text, tokens=len(arrays[0]))
