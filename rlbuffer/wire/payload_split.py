"""A payload taken apart so that the same bytes can be made of its parts again: what an archive keeps in columns.

The details stay packed as they came, beside their decoded form: maps and numbers have several encodings, and the
checksum is of the one that the writer chose.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlbuffer.errors import PayloadError
from rlbuffer.wire.arrays import Details, content_of
from rlbuffer.wire.payload import joined, loads, unframed
from rlbuffer.wire.payload_parts import HEADER_BYTES, MAX_DETAILS_BYTES


class PayloadParts(NamedTuple):
    """The parts of a rollout's payload: what :class:`~rlbuffer.wire.arrays.PayloadContent` holds, and two more."""

    packed: bytes
    """The details as they stand in the payload."""
    details: Details
    """The same, decoded, not checked further."""
    required: dict[str, NDArray[Any]]
    columns: dict[str, NDArray[Any]]
    attachments: dict[str, NDArray[Any]]
    text: str | None
    checksum: int
    """CRC-32 that the payload carries."""


def split(data: bytes | memoryview) -> PayloadParts:
    """The parts of a rollout's payload, of which :func:`joined_again` makes the same bytes.

    Raises:
        PayloadError: damaged, or of a form that rlbuffer does not write.
    """
    count, tokens, at, checksum = unframed(data)
    packed = bytes(memoryview(data)[HEADER_BYTES:at])
    content = content_of(data, loads(packed, limit=MAX_DETAILS_BYTES), count=count, tokens=tokens, at=at)
    if tokens and content.required["loss_mask"].view(np.uint8).max() > 1:
        raise PayloadError("invalid rollout payload: a mark of the loss mask is neither 0 nor 1")
    return PayloadParts(packed, *content, checksum)


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
