"""The frame of a payload, and the group's own payload: a header with a checksum, and packed details behind it."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from rlbuffer.errors import PayloadError
from rlbuffer.records.checks import MAX_ITEMS
from rlbuffer.records.columns import COLUMN_DTYPES
from rlbuffer.records.info import MAX_PAYLOAD_BYTES
from rlbuffer.wire.bounded_msgpack import dumps, loads
from rlbuffer.wire.checksum import crc32

PAYLOAD_FORMAT = 1
"""Grows when the layout changes; a reader refuses any other."""
HEADER = struct.Struct("<4sHHIIII")
MAX_DETAILS_BYTES = 4 * 2**20
"""Turns and metadata of one rollout, or answer and metadata of one group: they become Python objects when read."""
ARRAY_ALIGNMENT = 8
"""Bytes: every array, and the text, begins at a multiple."""
CODES = {dtype: dtype.str.lstrip("<|") for dtype in COLUMN_DTYPES}
"""Dtype -> its name in the tables of arrays."""
ROLLOUT, GROUP = b"RLBR", b"RLBG"
_CHECKSUM_AT = HEADER.size - 4


def payload_checksum(data: bytes) -> int:
    """The checksum that an encoded payload carries: what `RolloutInfo.checksum` holds."""
    return int(HEADER.unpack_from(data)[-1]) if len(data) >= HEADER.size else 0


def encode_group_payload(answer: Any, metadata: Any) -> bytes | None:
    """Answer and metadata of a group; None when there is nothing to keep.

    Raises:
        PayloadError: they take more than 4 MiB, or hold what msgpack cannot.
    """
    if answer is None and not metadata:
        return None
    packed = dumps([answer, metadata], max_items=MAX_ITEMS)
    if len(packed) > MAX_DETAILS_BYTES:
        raise PayloadError(f"answer and metadata take {len(packed)} bytes, above the limit of {MAX_DETAILS_BYTES}")
    return framed(GROUP, 0, len(packed), 0, HEADER.size + len(packed), [packed])


def decode_group_payload(data: bytes) -> tuple[Any, dict[str, Any]]:
    """(answer, metadata) of a group payload.

    Raises:
        PayloadError: not a group payload of this format, or damaged.
    """
    count, tokens, at, _ = unframed(data, GROUP)
    details = loads(data[HEADER.size : at], limit=MAX_DETAILS_BYTES, max_items=MAX_ITEMS)
    if count or tokens or at != len(data):
        raise PayloadError("invalid group payload: bytes after the details")
    if not isinstance(details, list) or len(details) != 2 or not isinstance(details[1], dict):
        raise PayloadError("invalid group payload: expected answer and metadata")
    return details[0], details[1]


def framed(magic: bytes, arrays: int, details: int, tokens: int, total: int, chunks: Sequence[Any]) -> bytes:
    """The payload of these chunks, which begin with `details` bytes of details, with its header."""
    header = HEADER.pack(magic, PAYLOAD_FORMAT, arrays, details, tokens, total, 0)[:_CHECKSUM_AT]
    checksum = crc32(header)
    for chunk in chunks:
        checksum = crc32(chunk, checksum)
    return b"".join([header, struct.pack("<I", checksum), *chunks])


def unframed(data: bytes, magic: bytes) -> tuple[int, int, int, int]:
    """(arrays, tokens, offset behind the details, checksum) of a payload whose checksum holds.

    Raises:
        PayloadError: not a payload of this kind and format, damaged, or above 64 MiB.
    """
    if not isinstance(data, bytes):
        raise PayloadError(f"expected bytes, got {type(data).__name__}")
    if len(data) < HEADER.size:
        raise PayloadError(f"payload of {len(data)} bytes is shorter than its header of {HEADER.size}")
    actual_magic, version, arrays, details_bytes, tokens, total, checksum = HEADER.unpack_from(data)
    if actual_magic != magic:
        raise PayloadError(f"not a payload: starts with {actual_magic!r}, expected {magic!r}")
    if version != PAYLOAD_FORMAT:
        raise PayloadError(f"payload format {version} is not the one this version reads, {PAYLOAD_FORMAT}")
    if len(data) > MAX_PAYLOAD_BYTES:
        raise PayloadError(f"payload of {len(data)} bytes is above the limit of {MAX_PAYLOAD_BYTES}")
    if total != len(data):
        raise PayloadError(f"payload of {len(data)} bytes should have {total}")
    actual = crc32(memoryview(data)[HEADER.size :], crc32(data[:_CHECKSUM_AT]))
    if actual != checksum:
        raise PayloadError(f"payload is damaged: checksum {actual:08x}, expected {checksum:08x}")
    at = HEADER.size + details_bytes
    if at > total or details_bytes > MAX_DETAILS_BYTES:
        raise PayloadError(f"details of {details_bytes} bytes do not fit a payload of {total}")
    return arrays, tokens, at, checksum
