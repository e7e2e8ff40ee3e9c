"""A payload taken apart so that the same bytes can be made of its parts again: what an archive keeps in columns.

The details stay packed as they came, beside their decoded form: maps and numbers have several encodings, and the
checksum is of the one that the writer chose.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlbuffer.errors import PayloadError
from rlbuffer.records.columns import REQUIRED_COLUMNS
from rlbuffer.wire.arrays import Cursor, Details, as_count, further_tables
from rlbuffer.wire.payload import joined, loads, unframed
from rlbuffer.wire.payload_parts import HEADER_BYTES, MAX_DETAILS_BYTES


class PayloadParts(NamedTuple):
    """The parts of a rollout's payload; arrays are views of its bytes."""

    packed: bytes
    """The details as they stand in the payload."""
    details: Details
    """The same, decoded, not checked further."""
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

    Raises:
        PayloadError: damaged, or of a form that rlbuffer does not write.
    """
    count, tokens, at, checksum = unframed(data)
    packed = bytes(memoryview(data)[HEADER_BYTES:at])
    details = loads(packed, limit=MAX_DETAILS_BYTES)
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
            text = bytes(data[start : start + size]).decode()
        except UnicodeDecodeError:
            raise PayloadError("invalid rollout payload: the text is not UTF-8") from None
    if cursor.at != len(data):
        raise PayloadError(f"payload has {len(data) - cursor.at} bytes too many")
    if tokens and required["loss_mask"].view(np.uint8).max() > 1:
        raise PayloadError("invalid rollout payload: a mark of the loss mask is neither 0 nor 1")
    return PayloadParts(packed, d, required, columns, attachments, text, checksum)


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
