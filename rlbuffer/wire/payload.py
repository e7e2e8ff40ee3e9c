"""Rollouts to bytes and back, without a copy and without trust.

A rollout's payload (little-endian, every array aligned to 8 bytes, the gaps zero)::

    header      24 bytes: magic "RLBR", format, arrays, bytes of details, tokens T, bytes in all, checksum
    details     one msgpack list: ids, rewards, spans, turns, metadata, and the column table (name, dtype, shape)
    arrays      tokens [T] i4, loss_mask [T] bool, logprobs [T] f4, the columns, the attachments, the text in UTF-8

The checksum is a CRC-32 over everything but itself, header included: it finds every flipped bit and every burst of up
to 32. Offsets are not stored but follow from the shapes, so that no two arrays can overlap. Decoding is `np.frombuffer`
on the received bytes: 9 bytes and no Python object per token.

A push's metadata, which is all that the batcher reads, is in :mod:`rlbuffer.wire.metadata`; the group's answer and
metadata travel as a payload of their own (magic "RLBG").
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlbuffer.errors import InvalidRollout, PayloadError
from rlbuffer.records.checks import MAX_ITEMS
from rlbuffer.records.group import Group
from rlbuffer.records.info import GroupInfo, RolloutInfo
from rlbuffer.records.rollout import Rollout
from rlbuffer.records.spans import Turn
from rlbuffer.wire.arrays import ARRAY_ALIGNMENT, content_of
from rlbuffer.wire.bounded_msgpack import check as check
from rlbuffer.wire.bounded_msgpack import dumps as dumps
from rlbuffer.wire.bounded_msgpack import loads as loads
from rlbuffer.wire.checksum import crc32
from rlbuffer.wire.metadata import MAX_METADATA_BYTES as MAX_METADATA_BYTES
from rlbuffer.wire.metadata import MAX_PAYLOAD_BYTES as MAX_PAYLOAD_BYTES
from rlbuffer.wire.metadata import decode_info as decode_info
from rlbuffer.wire.metadata import drafted, filled
from rlbuffer.wire.metadata import encode_info as encode_info
from rlbuffer.wire.metadata_pages import decode_infos as decode_infos
from rlbuffer.wire.payload_parts import MAX_DETAILS_BYTES, arrays_of, giant, packed_details

PAYLOAD_FORMAT = 1
"""Grows when the layout changes; a reader refuses any other."""

_HEADER = struct.Struct("<4sHHIIII")
HEADER_DTYPE = np.dtype(
    [
        ("magic", "S4"),
        ("format", "<u2"),
        ("arrays", "<u2"),
        ("details", "<u4"),
        ("tokens", "<u4"),
        ("total", "<u4"),
        ("checksum", "<u4"),
    ]
)
"""A payload's header as a record of an array."""
ROLLOUT, _GROUP = b"RLBR", b"RLBG"
_CHECKSUM_AT = _HEADER.size - 4


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPush:
    """A group as it goes onto the wire."""

    info: GroupInfo
    """With size and checksum of every rollout."""
    metadata: bytes
    """`info`, encoded: at most 64 KiB."""
    payloads: tuple[bytes, ...]
    """Rollout i is payload field ``str(i)``."""
    group_payload: bytes | None
    """Payload field ``group``: answer and metadata; None when there is neither."""


def encode_push(group: Group) -> EncodedPush:
    """Encodes a group for PUSH.

    Raises:
        InvalidRollout: a rollout's payload is above 64 MiB, which is found before anything is copied, or the push's
            metadata above 64 KiB; the message names the rollout and the sizes.
    """
    arrays = [arrays_of(rollout) for rollout in group.rollouts]
    info = group.info()
    draft = drafted(info)
    payloads = tuple(map(_encoded, group.rollouts, arrays))
    try:
        group_payload = encode_group_payload(group.answer, group.metadata)
    except PayloadError as error:
        raise InvalidRollout(f"group {group.group_id}: {error}") from None
    for rollout, data in zip(info.rollouts, payloads, strict=True):  # `info` is frozen for others, and new
        object.__setattr__(rollout, "size", len(data))
        object.__setattr__(rollout, "checksum", payload_checksum(data))
    metadata = filled(draft, info.rollouts)
    return EncodedPush(info=info, metadata=metadata, payloads=payloads, group_payload=group_payload)


def payload_checksum(data: bytes) -> int:
    """The checksum that an encoded payload carries: what `RolloutInfo.checksum` holds."""
    return int(_HEADER.unpack_from(data)[-1]) if len(data) >= _HEADER.size else 0


def encode_rollout(rollout: Rollout) -> bytes:
    """The payload of one rollout.

    Raises:
        InvalidRollout: it would be larger than 64 MiB, or its turns and metadata larger than 4 MiB.

    Example:
        >>> from rlbuffer.testing import make_group
        >>> rollout = make_group(lengths=[8]).rollouts[0]
        >>> data = encode_rollout(rollout)
        >>> decode_rollout(data) == rollout
        True
        >>> decode_rollout(data[:-1])
        Traceback (most recent call last):
            ...
        rlbuffer.errors.PayloadError: payload of 159 bytes should have 160
    """
    return _encoded(rollout, arrays_of(rollout))


def _encoded(rollout: Rollout, arrays: Sequence[NDArray[Any]]) -> bytes:
    """The payload of a rollout, whose arrays :func:`~rlbuffer.wire.payload_parts.arrays_of` has found small enough."""
    text = None if rollout.text is None else memoryview(rollout.text.encode())
    details = packed_details(rollout, None if text is None else text.nbytes)
    data = joined(details, arrays, text, tokens=rollout.length)
    if len(data) > MAX_PAYLOAD_BYTES:
        raise giant(rollout, arrays, len(data))
    return data


def joined(details: bytes, arrays: Sequence[NDArray[Any]], text: bytes | memoryview | None, *, tokens: int) -> bytes:
    """The payload of these packed details, arrays in wire order and UTF-8 text, with its checksum."""
    parts: list[Any] = [*arrays] if text is None else [*arrays, memoryview(text)]
    chunks: list[Any] = [details]
    at = _HEADER.size + len(details)
    for part in parts:
        if gap := -at % ARRAY_ALIGNMENT:
            chunks.append(bytes(gap))
        chunks.append(part)
        at += gap + part.nbytes
    return _framed(ROLLOUT, len(arrays), len(details), tokens, at, chunks)


def decode_rollout(data: bytes, *, expected: RolloutInfo | None = None) -> Rollout:
    """The rollout of a payload; its arrays are read-only views of `data`.

    `expected` is what the push's metadata said: any disagreement with it is an error, so that a payload cannot stand in
    for another one.

    Raises:
        PayloadError: not a payload of this format, damaged, above 64 MiB, a record that breaks its own rules, or
            another rollout than expected.
    """
    count, tokens, at, checksum = unframed(data)
    details = _details(data, at)
    if expected is not None and expected.size:  # 0: described before it was encoded
        size = len(data)
        if (size, checksum) != (expected.size, expected.checksum):
            raise PayloadError(
                f"rollout {expected.rollout_id}: {size} bytes with checksum {checksum:08x} do not agree with the "
                f"metadata: {expected.size} bytes with checksum {expected.checksum:08x}"
            )
    try:
        rollout = _rollout(data, count, details, tokens, at)
    except PayloadError:
        raise
    except (InvalidRollout, ValueError, TypeError, OverflowError) as error:
        raise PayloadError(f"invalid rollout payload: {error}") from None
    if expected is not None:
        _compare(rollout, expected)
    return rollout


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
    return _framed(_GROUP, 0, len(packed), 0, _HEADER.size + len(packed), [packed])


def decode_group_payload(data: bytes) -> tuple[Any, dict[str, Any]]:
    """(answer, metadata) of a group payload.

    Raises:
        PayloadError: not a group payload of this format, or damaged.
    """
    count, tokens, at, _ = unframed(data, _GROUP)
    details = _details(data, at)
    if count or tokens or at != len(data):
        raise PayloadError("invalid group payload: bytes after the details")
    if not isinstance(details, list) or len(details) != 2 or not isinstance(details[1], dict):
        raise PayloadError("invalid group payload: expected answer and metadata")
    return details[0], details[1]


def _framed(magic: bytes, arrays: int, details: int, tokens: int, total: int, chunks: Sequence[Any]) -> bytes:
    header = _HEADER.pack(magic, PAYLOAD_FORMAT, arrays, details, tokens, total, 0)[:_CHECKSUM_AT]
    checksum = crc32(header)
    for chunk in chunks:
        checksum = crc32(chunk, checksum)
    return b"".join([header, struct.pack("<I", checksum), *chunks])


def unframed(data: bytes | memoryview, magic: bytes = ROLLOUT) -> tuple[int, int, int, int]:
    """(arrays, tokens, offset behind the details, checksum) of a payload whose checksum holds.

    Raises:
        PayloadError: not a payload of this kind and format, damaged, or above 64 MiB.
    """
    if not isinstance(data, bytes | memoryview):
        raise PayloadError(f"expected bytes, got {type(data).__name__}")
    if len(data) < _HEADER.size:
        raise PayloadError(f"payload of {len(data)} bytes is shorter than its header of {_HEADER.size}")
    actual_magic, version, arrays, details_bytes, tokens, total, checksum = _HEADER.unpack_from(data)
    if actual_magic != magic:
        raise PayloadError(f"not a payload: starts with {actual_magic!r}, expected {magic!r}")
    if version != PAYLOAD_FORMAT:
        raise PayloadError(f"payload format {version} is not the one this version reads, {PAYLOAD_FORMAT}")
    if len(data) > MAX_PAYLOAD_BYTES:
        raise PayloadError(f"payload of {len(data)} bytes is above the limit of {MAX_PAYLOAD_BYTES}")
    if total != len(data):
        raise PayloadError(f"payload of {len(data)} bytes should have {total}")
    view = memoryview(data)
    actual = crc32(view[_HEADER.size :], crc32(view[:_CHECKSUM_AT]))
    if actual != checksum:
        raise PayloadError(f"payload is damaged: checksum {actual:08x}, expected {checksum:08x}")
    at = _HEADER.size + details_bytes
    if at > total:
        raise PayloadError(f"details of {details_bytes} bytes do not fit a payload of {total}")
    return arrays, tokens, at, checksum


def _details(data: bytes, end: int) -> Any:
    return loads(memoryview(data)[_HEADER.size : end], limit=MAX_DETAILS_BYTES, max_items=MAX_ITEMS)


def _rollout(data: bytes, count: int, details: Any, tokens: int, at: int) -> Rollout:
    d, required, columns, attachments, text = content_of(data, details, count=count, tokens=tokens, at=at)
    if not isinstance(d.spans, list) or len(d.spans) % 3:
        raise PayloadError("invalid rollout payload: version_spans")
    if not isinstance(d.turns, list) or not all(isinstance(t, list) and len(t) == len(Turn._fields) for t in d.turns):
        raise PayloadError("invalid rollout payload: turns")
    return Rollout(
        rollout_id=d.rollout_id,
        **required,
        reward=d.reward,
        rewards=d.rewards,
        successes=d.successes,
        version_spans=tuple(d.spans[i : i + 3] for i in range(0, len(d.spans), 3)),  # type: ignore[misc]
        turns=d.turns,  # type: ignore[arg-type]
        finish_reason=d.finish_reason,
        is_truncated=d.is_truncated,
        columns=columns,
        attachments=attachments,
        text=text,
        metadata=d.metadata,
    )


_COMPARED: tuple[tuple[str, Callable[[Rollout], Any], Callable[[RolloutInfo], Any]], ...] = (
    ("rollout_id", lambda r: r.rollout_id, lambda i: i.rollout_id),
    ("length", lambda r: r.length, lambda i: i.length),
    ("prompt_tokens", lambda r: r.prompt_tokens, lambda i: i.prompt_tokens),
    ("loss_tokens", lambda r: r.loss_tokens, lambda i: i.loss_tokens),
    ("reward", lambda r: r.reward, lambda i: i.reward),
    ("rewards", lambda r: dict(r.rewards), lambda i: dict(i.rewards)),
    ("min_version", lambda r: r.min_policy_version, lambda i: i.min_version),
    ("max_version", lambda r: r.max_policy_version, lambda i: i.max_version),
    ("turns", lambda r: len(r.turns), lambda i: i.turns),
    ("is_truncated", lambda r: r.is_truncated, lambda i: i.is_truncated),
)


def _compare(rollout: Rollout, expected: RolloutInfo) -> None:
    for name, of_rollout, of_info in _COMPARED:
        actual, announced = of_rollout(rollout), of_info(expected)
        if actual != announced:
            raise PayloadError(
                f"rollout {expected.rollout_id}: {name} = {actual!r} does not agree with the metadata: {announced!r}"
            )
