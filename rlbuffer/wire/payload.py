"""Rollouts to bytes and back, without a copy and without trust.

A rollout's payload (little-endian, every array aligned to 8 bytes, the gaps zero)::

    header      24 bytes: magic "RLBR", format, arrays, bytes of details, tokens T, bytes in all, checksum
    details     one msgpack list: ids, rewards, spans, turns, metadata, and the column table (name, dtype, shape)
    arrays      tokens [T] i4, loss_mask [T] bool, logprobs [T] f4, the columns, the attachments, the text in UTF-8

The checksum is a CRC-32 over everything but itself, header included: it finds every flipped bit and every burst of up
to 32. Offsets are not stored but follow from the shapes, so that no two arrays can overlap.

There is one way to read a payload, :func:`decode`, for pulls, scorers, views, archives and verify: `np.frombuffer` on
the received bytes, 9 bytes and no Python object per token, and every rule of a rollout but two. The values of tokens,
marks and logprobs cost less for many rollouts at once (:func:`in_range`), and the user's own values become objects when
somebody asks for the record, which checks everything (:meth:`Payload.rollout`).

A push's metadata, which is all that the batcher reads, is in :mod:`rlbuffer.wire.metadata`; the group's answer and
metadata travel as a payload of their own (magic "RLBG").
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from rlbuffer.errors import InvalidRollout, PayloadError
from rlbuffer.records.checks import MAX_COUNT, MAX_ITEMS, MAX_NUMBER, MAX_ROLLOUT_ID
from rlbuffer.records.columns import MAX_ARRAYS, MAX_DIMENSIONS, REQUIRED_COLUMNS
from rlbuffer.records.failure import FAILURE_KIND, MAX_MESSAGE, Failure
from rlbuffer.records.info import MAX_PAYLOAD_BYTES as MAX_PAYLOAD_BYTES
from rlbuffer.records.info import RolloutInfo
from rlbuffer.records.rollout import (
    AT_LIMIT,
    MAX_LOGPROB,
    MAX_SEQUENCES,
    MIN_LOGPROB,
    Rollout,
    TokenSequence,
    as_arrays,
    check_logprobs,
)
from rlbuffer.records.spans import MAX_SPANS, VersionSpan, as_spans
from rlbuffer.wire.bounded_msgpack import check as check
from rlbuffer.wire.bounded_msgpack import dumps as dumps
from rlbuffer.wire.bounded_msgpack import loads as loads
from rlbuffer.wire.encoding import EncodedPush as EncodedPush
from rlbuffer.wire.encoding import encode_push as encode_push
from rlbuffer.wire.encoding import encode_rollout as encode_rollout
from rlbuffer.wire.frame import ARRAY_ALIGNMENT, CODES, HEADER, MAX_DETAILS_BYTES, ROLLOUT, unframed
from rlbuffer.wire.frame import decode_group_payload as decode_group_payload
from rlbuffer.wire.frame import encode_group_payload as encode_group_payload
from rlbuffer.wire.frame import payload_checksum as payload_checksum
from rlbuffer.wire.metadata import MAX_METADATA_BYTES as MAX_METADATA_BYTES
from rlbuffer.wire.metadata import decode_info as decode_info
from rlbuffer.wire.metadata import decode_infos as decode_infos
from rlbuffer.wire.metadata import encode_info as encode_info

_DTYPES = {code: dtype for dtype, code in CODES.items()}
_TOKENS, _MASK, _LOGPROBS = REQUIRED_COLUMNS.values()
_NONE: Mapping[str, NDArray[Any]] = MappingProxyType({})
_TOKEN_IDS = 2**31

_Count = Annotated[int, Meta(ge=0, le=MAX_PAYLOAD_BYTES)]
_Finite = Annotated[float, Meta(ge=-MAX_NUMBER, le=MAX_NUMBER)]
_Short = Annotated[str, Meta(max_length=64)]
_Kind = Annotated[str, Meta(pattern=f"^{FAILURE_KIND.pattern}")]
_Message = Annotated[str, Meta(max_length=MAX_MESSAGE)]
_Arrays = Annotated[
    list[Annotated[list[str | int], Meta(min_length=2, max_length=2 + MAX_DIMENSIONS)]], Meta(max_length=MAX_ARRAYS)
]


class _Turn(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, gc=False):
    role: _Short
    start: _Count
    end: _Count
    reward: _Finite | None
    metadata: msgspec.Raw


class Details(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, gc=False):
    """Everything that a payload says of its rollout beside the arrays, in order."""

    rollout_id: Annotated[str, Meta(max_length=MAX_ROLLOUT_ID)]
    reward: _Finite | None
    rewards: dict[_Short, _Finite]
    successes: dict[_Short, bool]
    finish_reason: _Short
    is_truncated: bool
    spans: Annotated[list[Annotated[int, Meta(ge=0, le=MAX_COUNT)]], Meta(min_length=3, max_length=3 * MAX_SPANS)]
    """Version, start and end of each."""
    turns: Annotated[list[_Turn], Meta(max_length=MAX_SPANS)]
    columns: _Arrays
    """Name, dtype and trailing shape of each."""
    attachments: _Arrays
    """Name, dtype and shape of each."""
    text_bytes: _Count | None
    metadata: msgspec.Raw
    number: Annotated[int, Meta(ge=0, lt=MAX_SEQUENCES)]
    """Place of the sequence in its rollout: the first has what is the rollout's own, and all have its `successes`."""
    sequences: Annotated[int, Meta(ge=1, le=MAX_SEQUENCES)]
    """How many the rollout has."""
    name: _Short
    failure: tuple[_Kind, _Message] | None = None
    """Why the attempt failed; not there where it did not."""


_DETAILS = msgspec.msgpack.Decoder(Details)
_COMPARED = [name for name in RolloutInfo.__struct_fields__ if name not in ("size", "checksum", "parts")]


class Payload(NamedTuple):
    """A rollout as its payload has it; arrays are read-only views of the received bytes."""

    tokens: NDArray[np.int32]
    """[T] int32, as in :class:`~rlbuffer.records.rollout.Rollout`."""
    loss_mask: NDArray[np.bool_]
    """[T] bool."""
    logprobs: NDArray[np.float32]
    """[T] float32."""
    version_spans: tuple[VersionSpan, ...]
    columns: Mapping[str, NDArray[Any]]
    """Further columns, [T, ...], in the order of the payload."""
    attachments: Mapping[str, NDArray[Any]]
    """Arrays of any shape, in the order of the payload."""
    details: Details
    text: str | None
    """Rendered transcript."""
    info: RolloutInfo
    """Its numbers; the largest token as it was announced, for which nobody has looked here, 0 where nothing was."""
    packed: bytes
    """The details as they stand in it."""

    def record(self) -> TokenSequence:
        """The record of this sequence; of the first a rollout without the others. Raises PayloadError: it breaks a rule
        of its own."""
        try:
            return TokenSequence(**self._of_sequence()) if self.details.number else self.rollout()
        except InvalidRollout as error:
            raise PayloadError(f"invalid rollout payload: {error}") from None

    def _of_sequence(self) -> dict[str, Any]:
        d = self.details
        return {
            "tokens": self.tokens,
            "loss_mask": self.loss_mask,
            "logprobs": self.logprobs,
            "version_spans": self.version_spans,
            "turns": [(t.role, t.start, t.end, t.reward, _free(t.metadata)) for t in d.turns],
            "columns": self.columns,
            "attachments": self.attachments,
            "name": d.name,
        }

    def rollout(self, further: Sequence[TokenSequence] = ()) -> Rollout:
        """The record, of a rollout that has these sequences besides. Raises PayloadError: it breaks a rule of its own,
        or this is not the first one."""
        d = self.details
        if d.number:
            raise PayloadError(f"invalid rollout payload: sequence {d.number} of rollout {d.rollout_id}, not the first")
        try:
            return Rollout(
                **self._of_sequence(),
                rollout_id=d.rollout_id,
                reward=d.reward,
                rewards=d.rewards,
                successes=d.successes,
                finish_reason=d.finish_reason,
                is_truncated=d.is_truncated,
                failure=None if d.failure is None else Failure(*d.failure),
                text=self.text,
                metadata=_free(d.metadata),
                further=tuple(further),
            )
        except InvalidRollout as error:
            raise PayloadError(f"invalid rollout payload: {error}") from None


def decode(data: bytes, announced: RolloutInfo | None = None) -> Payload:
    """The rollout of a payload.

    `announced` is what the push's metadata, or a step's part, says of it: any disagreement is an error, so that a
    payload cannot stand in for another one. Of size 0 it was described before it was encoded.

    Raises:
        PayloadError: not a payload of this format, damaged, above 64 MiB, a rollout that breaks a rule, or another one
            than was announced.
    """
    count, length, end, checksum = unframed(data, ROLLOUT)
    total = len(data)
    if announced is not None and announced.size and (total, checksum) != (announced.size, announced.checksum):
        raise PayloadError(
            f"rollout {announced.rollout_id}: {total} bytes with checksum {checksum:08x} do not agree with the "
            f"metadata: {announced.size} bytes with checksum {announced.checksum:08x}"
        )
    packed = data[HEADER.size : end]
    try:
        d = _DETAILS.decode(packed)
        tokens, mask, logprobs, prompt, at = _required(data, length, end)
        columns, attachments, text = _NONE, _NONE, None
        if d.columns or d.attachments or d.text_bytes is not None or count != len(REQUIRED_COLUMNS):
            columns, attachments, text, at = _further(data, d, count, length, at)
        if at != total:
            raise PayloadError(f"payload has {total - at} bytes too many")
        trained = int(np.count_nonzero(mask))
        spans = d.spans
        version, start, stop = spans[:3]
        if len(spans) == 3 and start <= prompt and start < stop == length:  # as nearly all have
            version_spans: tuple[VersionSpan, ...] = (VersionSpan(version, start, stop),)
            oldest = newest = version
        else:
            version_spans = as_spans(tuple(zip(*[iter(spans)] * 3, strict=True)), mask)
            oldest, newest = min(version_spans)[0], max(version_spans)[0]
        if d.turns:
            _check_turns(d.turns, length)
    except PayloadError:
        raise
    except (msgspec.MsgspecError, RecursionError, InvalidRollout, ValueError, TypeError, OverflowError) as error:
        raise PayloadError(f"invalid rollout payload: {error}") from None
    if d.finish_reason == AT_LIMIT and not d.is_truncated:
        raise PayloadError(f"invalid rollout payload: is_truncated: False, but finish_reason is {AT_LIMIT!r}")
    info = RolloutInfo(
        rollout_id=d.rollout_id,
        length=length,
        prompt_tokens=prompt,
        loss_tokens=trained,
        reward=d.reward,
        rewards=d.rewards,
        min_version=oldest,
        max_version=newest,
        turns=len(d.turns),
        is_truncated=d.is_truncated,
        size=total,
        checksum=checksum,
        largest_token=0 if announced is None else announced.largest_token,
        failure=d.failure[0] if d.failure else "",
    )
    if announced is not None and info != announced:
        _compare(info, announced)
    return Payload(tokens, mask, logprobs, version_spans, columns, attachments, d, text, info, packed)


def decode_rollout(data: bytes, *, expected: RolloutInfo | None = None) -> Rollout:
    """The record of a payload, see :func:`decode`.

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
    return decode(data, expected).rollout()


def decode_whole(payloads: Sequence[bytes | None], expected: Sequence[RolloutInfo] | None = None) -> Rollout:
    """The record of a rollout, of the payloads of its sequences in order; see :func:`decode`.

    Raises:
        PayloadError: one of them is missing, or cannot be decoded, or is of another rollout.
    """
    announced: Sequence[RolloutInfo | None] = [None] * len(payloads) if expected is None else expected
    read = [decode(data or b"", info) for data, info in zip(payloads, announced, strict=True)]
    return _whole(read)


def decode_rollouts(payloads: Sequence[bytes | None]) -> Iterator[Rollout | None]:
    """The records of the rollouts of a push, of all of its payloads in order; None for each that cannot be read."""
    read: list[Payload | None] = []
    for data in payloads:
        try:
            read.append(decode(data or b""))
        except PayloadError:
            read.append(None)
    start = 0
    while start < len(read):
        first, end = read[start], start + 1
        if first is not None:
            end = start + first.details.sequences
        while first is None and end < len(read) and (sequence := read[end]) is not None and sequence.details.number:
            end += 1
        try:
            yield _whole(read[start:end])
        except PayloadError:
            yield None
        start = end


def _whole(read: Sequence[Payload | None]) -> Rollout:
    whole = [sequence for sequence in read if sequence is not None]
    if len(whole) != len(read) or [sequence.details.number for sequence in whole] != [
        *range(whole[0].details.sequences)
    ]:
        raise PayloadError("invalid rollout payload: not each sequence of a rollout")
    return whole[0].rollout([sequence.record() for sequence in whole[1:]])


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


def _required(
    data: bytes, length: int, end: int
) -> tuple[NDArray[np.int32], NDArray[np.bool_], NDArray[np.float32], int, int]:
    """Tokens, marks and logprobs behind the details, the number of tokens before the first trained one, and where the
    arrays end."""
    if not length:
        raise PayloadError("invalid rollout payload: it has no tokens")
    tokens_at = end + (-end & 7)
    tokens_end = tokens_at + 4 * length
    marks_at = tokens_end + (-tokens_end & 7)
    marks_end = marks_at + length
    logprobs_at = marks_end + (-marks_end & 7)
    at = logprobs_at + 4 * length
    if at > len(data):
        raise PayloadError(f"payload is too short: {length} tokens in {len(data)} bytes")
    if (data[end:tokens_at] + data[tokens_end:marks_at] + data[marks_end:logprobs_at]).strip(b"\0"):
        raise PayloadError("payload has bytes between its arrays")
    first = data.find(1, marks_at, marks_end)
    if first == marks_at:
        raise InvalidRollout("column loss_mask: the first token cannot be trained")
    return (
        np.frombuffer(data, _TOKENS, length, tokens_at),
        np.frombuffer(data, _MASK, length, marks_at),
        np.frombuffer(data, _LOGPROBS, length, logprobs_at),
        length if first < 0 else first - marks_at,
        at,
    )


def _further(
    data: bytes, d: Details, count: int, length: int, at: int
) -> tuple[Mapping[str, NDArray[Any]], Mapping[str, NDArray[Any]], str | None, int]:
    """Columns, attachments and text from `at` on, and where they end."""
    if count != len(REQUIRED_COLUMNS) + len(d.columns) + len(d.attachments):
        raise PayloadError(f"invalid rollout payload: {count} arrays in the header, others in the table")

    def skipped(size: int) -> int:
        """The place of the next `size` bytes. Knows what is left, so that no shape can ask for more."""
        nonlocal at
        start = at + -at % ARRAY_ALIGNMENT
        if start + size > len(data):
            raise PayloadError(f"payload is too short: {size} bytes at {start} of {len(data)}")
        if any(data[at:start]):
            raise PayloadError("payload has bytes between its arrays")
        at = start + size
        return start

    tables = []
    rows: Any
    for kind, rows, leading in (("column", d.columns, (length,)), ("attachment", d.attachments, ())):
        arrays: dict[str, NDArray[Any]] = {}
        for name, code, *shape in rows:
            sizes: tuple[Any, ...] = (*leading, *shape)
            dtype = _DTYPES.get(code)
            if dtype is None or name in arrays or not all(type(n) is int and 0 <= n <= len(data) for n in sizes):
                raise PayloadError(f"invalid rollout payload: {kind} {name!r} of dtype {code!r} and shape {sizes}")
            items = math.prod(sizes)
            start = skipped(items * dtype.itemsize)
            arrays[name] = np.frombuffer(data, dtype, items, start).reshape(sizes) if items else np.zeros(sizes, dtype)
        tables.append(as_arrays(kind, arrays))
    for name, array in tables[0].items():
        if name.endswith("logprobs"):
            check_logprobs(name, array)
    text = None
    if d.text_bytes is not None:
        start = skipped(d.text_bytes)
        text = data[start:at].decode()
    return tables[0], tables[1], text, at


def _check_turns(turns: Sequence[_Turn], length: int) -> None:
    position = 0
    for turn in turns:
        if not position <= turn.start <= turn.end <= length:
            raise InvalidRollout(f"turns: [{turn.start}, {turn.end}) is out of order or outside {length} tokens")
        position = turn.end


def _compare(info: RolloutInfo, announced: RolloutInfo) -> None:
    """Names the first value in which a payload is another one than was announced. Size and checksum agree, or were not
    known."""
    for name in _COMPARED:
        actual, expected = getattr(info, name), getattr(announced, name)
        if actual != expected:
            raise PayloadError(
                f"rollout {announced.rollout_id}: {name} = {actual!r} does not agree with the metadata: {expected!r}"
            )


def _free(packed: msgspec.Raw) -> Any:
    """A value of the user's own."""
    return loads(memoryview(packed), limit=MAX_DETAILS_BYTES, max_items=MAX_ITEMS)
