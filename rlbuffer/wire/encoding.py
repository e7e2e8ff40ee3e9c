"""Payloads as they are written: rollouts and groups to bytes, each found small enough before it is copied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from numpy.typing import NDArray

from rlbuffer.errors import InvalidRollout, PayloadError
from rlbuffer.records.checks import MAX_ITEMS, plain
from rlbuffer.records.columns import REQUIRED_COLUMNS
from rlbuffer.records.group import Group
from rlbuffer.records.info import MAX_PAYLOAD_BYTES, GroupInfo, row_of
from rlbuffer.records.rollout import Rollout, TokenSequence
from rlbuffer.wire.bounded_msgpack import MAX_LEVELS, pack
from rlbuffer.wire.frame import (
    ARRAY_ALIGNMENT,
    CODES,
    HEADER,
    MAX_DETAILS_BYTES,
    ROLLOUT,
    encode_group_payload,
    framed,
    payload_checksum,
)
from rlbuffer.wire.metadata import decode_info, encode_metadata


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPush:
    """A group as it goes onto the wire."""

    metadata: bytes
    """:attr:`info`, encoded: at most 64 KiB."""
    payloads: tuple[bytes, ...]
    """Sequence i is payload field ``str(i)``."""
    group_payload: bytes | None
    """Payload field ``group``: answer and metadata; None when there is neither."""

    @property
    def info(self) -> GroupInfo:
        """The push as the batcher sees it, with size and checksum of every sequence."""
        return decode_info(self.metadata)


def encode_push(group: Group) -> EncodedPush:
    """Encodes a group for PUSH.

    Raises:
        InvalidRollout: a rollout's payload is above 64 MiB, which is found before its arrays are copied, or the push's
            metadata above 64 KiB; the message names the rollout and the sizes.
    """
    payloads, rows = list[bytes](), list[bytes]()
    for rollout in group.rollouts:
        for number, sequence in enumerate(rollout.sequences):
            data = encode_rollout(rollout, number)
            payloads.append(data)
            rows.append(row_of(rollout, sequence, (len(data), payload_checksum(data))))
    try:
        group_payload = encode_group_payload(group.answer, group.metadata)
    except PayloadError as error:
        raise InvalidRollout(f"group {group.group_id}: {error}") from None
    failures = [rollout.failure.kind if rollout.failure else "" for rollout in group.rollouts]
    metadata = encode_metadata(group, group.columns(), b"".join(rows), group.rollouts, failures)
    return EncodedPush(metadata=metadata, payloads=tuple(payloads), group_payload=group_payload)


def encode_rollout(rollout: Rollout, number: int = 0) -> bytes:
    """The payload of one sequence of a rollout: its first one, or its only one.

    Raises:
        InvalidRollout: it would be larger than 64 MiB, or its turns and metadata larger than 4 MiB; or an array has a
            dimension beyond what is read.
    """
    sequence = rollout.sequences[number]
    arrays = [
        sequence.tokens,
        sequence.loss_mask,
        sequence.logprobs,
        *sequence.columns.values(),
        *sequence.attachments.values(),
    ]
    text = None if number or rollout.text is None else memoryview(rollout.text.encode())
    details = _details_of(rollout, sequence, number, None if text is None else text.nbytes)
    for i, array in enumerate(arrays[len(REQUIRED_COLUMNS) :], len(REQUIRED_COLUMNS)):
        # An array of no bytes, because another dimension is 0, is still more than a decoder believes.
        if array.size == 0 and max(array.shape) > MAX_PAYLOAD_BYTES:
            name = _names(sequence)[i]
            raise InvalidRollout(f"rollout {rollout.rollout_id}: {name} has the shape {list(array.shape)}")
    most = HEADER.size + len(details) + (0 if text is None else text.nbytes) + ARRAY_ALIGNMENT * (len(arrays) + 1)
    most += sum([array.nbytes for array in arrays])
    if most > MAX_PAYLOAD_BYTES:
        sizes = [*zip(_names(sequence), (array.nbytes for array in arrays), strict=True)]
        largest = sorted([*sizes, ("text", 0 if text is None else text.nbytes)], key=lambda item: -item[1])[:3]
        raise InvalidRollout(
            f"rollout {rollout.rollout_id}: payload of {most} bytes is above the limit of {MAX_PAYLOAD_BYTES} (64 MiB)"
            f"; the largest parts: {', '.join(f'{name} {n}' for name, n in largest)}"
        )
    return joined(details, arrays, text, tokens=len(sequence.tokens))


def joined(details: bytes, arrays: Sequence[NDArray[Any]], text: bytes | memoryview | None, *, tokens: int) -> bytes:
    """The payload of these packed details, arrays in wire order and UTF-8 text, with its checksum."""
    parts: list[Any] = [*arrays] if text is None else [*arrays, memoryview(text)]
    chunks: list[Any] = [details]
    at = HEADER.size + len(details)
    for part in parts:
        if gap := -at % ARRAY_ALIGNMENT:
            chunks.append(bytes(gap))
        chunks.append(part)
        at += gap + part.nbytes
    return framed(ROLLOUT, len(arrays), len(details), tokens, at, chunks)


def _names(sequence: TokenSequence) -> list[str]:
    """Names of the arrays in messages: a column and an attachment may share a name."""
    return [*REQUIRED_COLUMNS, *sequence.columns, *(f"attachment {name}" for name in sequence.attachments)]


def _details_of(rollout: Rollout, sequence: TokenSequence, number: int, text_bytes: int | None) -> bytes:
    """Everything that a payload says of its sequence beside the arrays; the first one's says what is the rollout's.

    Only what a map holds can have changed since the record was checked, so only that is checked again.

    Raises:
        InvalidRollout: they take more than 4 MiB, or hold what msgpack cannot.
    """
    try:
        packed = pack(
            [
                rollout.rollout_id,
                None if number else rollout.reward,
                {} if number else _map("value[2]", rollout.rewards),
                _map("value[3]", rollout.successes),
                "" if number else rollout.finish_reason,
                rollout.is_truncated,
                [*chain.from_iterable(sequence.version_spans)],
                [
                    turn._replace(metadata=_map(f"value[7][{i}][4]", turn.metadata)) if turn.metadata else turn
                    for i, turn in enumerate(sequence.turns)
                ],
                [[name, CODES[a.dtype], *a.shape[1:]] for name, a in sequence.columns.items()],
                [[name, CODES[a.dtype], *a.shape] for name, a in sequence.attachments.items()],
                text_bytes,
                {} if number else _map("value[11]", rollout.metadata),
                number,
                len(rollout.sequences),
                sequence.name,
                *([rollout.failure] if rollout.failure and not number else ()),
            ]
        )
    except InvalidRollout as error:
        raise InvalidRollout(f"rollout {rollout.rollout_id}: metadata cannot be encoded: {error}") from None
    except PayloadError as error:
        raise InvalidRollout(f"rollout {rollout.rollout_id}: metadata {error}") from None
    if len(packed) > MAX_DETAILS_BYTES:
        raise InvalidRollout(
            f"rollout {rollout.rollout_id}: turns and metadata take {len(packed)} bytes, above the limit of "
            f"{MAX_DETAILS_BYTES}; large values belong to text, columns or attachments"
        )
    return packed


def _map(place: str, values: Mapping[str, Any]) -> Any:
    """A map of the details, plain. `place` has a bracket for each level above it."""
    return plain(place, values, depth=MAX_LEVELS - place.count("["), items=MAX_ITEMS) if values else {}
