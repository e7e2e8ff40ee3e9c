from __future__ import annotations

import math
import struct
import zlib
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pytest
import trees
from wounds import HEADER, resealed

from rlbuffer.errors import InvalidRollout, PayloadError
from rlbuffer.records.group import Group
from rlbuffer.records.info import ROW, RolloutInfo
from rlbuffer.records.rollout import Rollout
from rlbuffer.testing import make_group
from rlbuffer.wire import checksum
from rlbuffer.wire.bounded_msgpack import dumps, loads
from rlbuffer.wire.metadata import MAX_METADATA_BYTES, MAX_PAYLOAD_BYTES, decode_info, decode_infos, encode_info
from rlbuffer.wire.payload import (
    decode_group_payload,
    decode_rollout,
    decode_rollouts,
    decode_whole,
    encode_group_payload,
    encode_push,
    encode_rollout,
    payload_checksum,
)


def rollout(**changes: Any) -> Rollout:
    base = make_group(size=1, lengths=[8]).rollouts[0]
    return replace(base, **changes)


def with_header(data: bytes, **changes: Any) -> bytes:
    names = ("magic", "format", "arrays", "details", "tokens", "total", "checksum")
    values = dict(zip(names, HEADER.unpack_from(data), strict=True)) | changes
    return HEADER.pack(*values.values()) + data[HEADER.size :]


def with_details(data: bytes, change: Any) -> bytes:
    """The payload with its details changed in place by `change(list)`."""
    magic, version, arrays, size, tokens, _, _ = HEADER.unpack_from(data)
    details = msgpack.unpackb(data[HEADER.size : HEADER.size + size])
    change(details)
    packed = msgpack.packb(details)
    body = packed + bytes(-(HEADER.size + len(packed)) % 8) + data[-(-(HEADER.size + size) // 8) * 8 :]
    return resealed(HEADER.pack(magic, version, arrays, len(packed), tokens, 0, 0) + body)


def refusal(data: bytes, expected: RolloutInfo | None = None) -> str:
    with pytest.raises(PayloadError) as caught:
        decode_rollout(data, expected=expected)
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"magic": b"RLBG"}, "not a payload: starts with b'RLBG', expected b'RLBR'"),
        ({"format": 2}, "payload format 2 is not the one this version reads, 1"),
        ({"total": 24}, "payload of {n} bytes should have 24"),
        ({"total": 999}, "payload of {n} bytes should have 999"),
    ],
)
def test_a_header_that_does_not_fit_is_named(changes: dict[str, Any], message: str) -> None:
    data = encode_rollout(rollout())
    assert refusal(with_header(data, **changes)) == message.format(n=len(data))


@pytest.mark.parametrize("arrays", [2, 4])
def test_another_number_of_arrays_is_refused(arrays: int) -> None:
    data = resealed(with_header(encode_rollout(rollout()), arrays=arrays))
    assert refusal(data) == f"invalid rollout payload: {arrays} arrays in the header, others in the table"


@pytest.mark.parametrize("where", ["details", "tokens", "marks", "column"])
def test_a_gap_that_is_not_zero_is_refused(where: str) -> None:
    columns = {"x": np.zeros(9, np.uint8), "y": np.zeros(9)}
    data = bytearray(encode_rollout(replace(make_group(size=1, lengths=[9]).rollouts[0], columns=columns)))
    details = HEADER.size + HEADER.unpack_from(bytes(data))[3]
    tokens = details + -details % 8
    at = {"details": details, "tokens": tokens + 36, "marks": tokens + 40 + 9, "column": len(data) - 8 * 9 - 7}[where]
    assert at % 8
    data[at] = 1
    assert refusal(resealed(bytes(data))) == "payload has bytes between its arrays"


def test_a_mask_byte_that_is_no_boolean_is_refused() -> None:
    data = bytearray(encode_rollout(rollout()))
    mask = len(data) - 8 - 32
    assert bytes(data[mask : mask + 8]) == bytes([0, 0, 1, 1, 1, 1, 1, 1])
    data[mask + 1] = 2
    assert refusal(resealed(bytes(data))) == "invalid rollout payload: column loss_mask: not a boolean at position 1"


COLUMN = {"columns": {"x": np.arange(8, dtype=np.float32)}}


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (1, "1"),
        (6, [0, 2]),
        (6, [-1, 2, 8]),
        (7, [["user", 0, 2]]),
        (8, [["x", "c16"]]),
        (8, [["x", "f4", -1]]),
        (8, [["x", "f4", True]]),
        (8, [["tokens", "f4"]]),
        (8, [["x", "f4"], ["x", "f4"]]),
        (11, []),
    ],
)
def test_details_that_no_rollout_can_have_are_refused(place: int, value: Any) -> None:
    def change(details: list[Any]) -> None:
        details[place] = value

    assert refusal(with_details(encode_rollout(rollout(**COLUMN)), change)).startswith("invalid rollout payload: ")


def test_a_shape_that_asks_for_more_than_is_there_is_refused_before_memory_is_set_aside() -> None:
    def change(details: list[Any]) -> None:
        details[8] = [["x", "f8", *[2**26] * 7]]

    refusal(with_details(encode_rollout(rollout(**COLUMN)), change))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rollout_id", "a.0/1"),
        ("length", 9),
        ("prompt_tokens", 3),
        ("loss_tokens", 5),
        ("reward", 0.5),
        ("rewards", {"x": 1.0}),
        ("min_version", 0),
        ("max_version", 5),
        ("turns", 1),
        ("is_truncated", True),
    ],
)
def test_a_payload_that_is_not_the_rollout_of_the_metadata_is_refused(field: str, value: Any) -> None:
    push = encode_push(make_group(size=1, lengths=[8], version=4))
    assert f": {field} = " in refusal(push.payloads[0], push.info.rollouts[0].changed(**{field: value}))


def test_a_payload_of_another_size_or_checksum_than_the_metadata_is_refused() -> None:
    push = encode_push(make_group(size=1, lengths=[8]))
    (data,), (info,) = push.payloads, push.info.rollouts
    other = encode_push(make_group(size=1, lengths=[8], seed=1)).payloads[0]
    assert refusal(other, info) == (
        f"rollout a.0/0: {len(other)} bytes with checksum {payload_checksum(other):08x} do not agree "
        f"with the metadata: {len(data)} bytes with checksum {info.checksum:08x}"
    )
    assert decode_rollout(data, expected=info.changed(size=0, checksum=0)) == decode_rollout(data)


def giant(tokens: int) -> Rollout:
    mask = np.zeros(tokens, np.bool_)
    return Rollout(
        rollout_id="g/0",
        tokens=np.zeros(tokens, np.int32),
        loss_mask=mask,
        logprobs=np.zeros(tokens, np.float32),
        version_spans=((0, 0, tokens),),  # type: ignore[arg-type]
    )


def test_a_rollout_of_64_mib_is_encoded_and_one_token_more_is_refused_with_its_sizes() -> None:
    most = (MAX_PAYLOAD_BYTES - 96) // 9 // 8 * 8
    data = encode_rollout(giant(most))
    assert MAX_PAYLOAD_BYTES - 200 < len(data) <= MAX_PAYLOAD_BYTES
    assert decode_rollout(data).length == most
    with pytest.raises(InvalidRollout) as caught:
        encode_rollout(giant(most + 32))
    assert "above the limit of 67108864 (64 MiB)" in str(caught.value)
    too_many = Group(group_id="g", env="a", prompt_id="p", rollouts=(giant(11_000_000),), planned_size=1)
    with pytest.raises(InvalidRollout):
        encode_push(too_many)
    with pytest.raises(PayloadError):
        decode_rollout(data + bytes(200))


def test_text_counts_for_the_limit_and_not_for_that_of_the_metadata() -> None:
    long = "ä" * (5 * 2**20)
    assert decode_rollout(encode_rollout(rollout(text=long))).text == long
    with pytest.raises(
        InvalidRollout, match=r"rollout a\.0/0: payload of \d+ bytes .*the largest parts: text 67108864"
    ):
        encode_rollout(rollout(text="a" * MAX_PAYLOAD_BYTES))


def test_metadata_of_a_rollout_above_4_mib_is_refused_with_a_place_to_put_it() -> None:
    with pytest.raises(InvalidRollout) as caught:
        encode_rollout(rollout(metadata={"log": "x" * 2**22}))
    assert str(caught.value).startswith("rollout a.0/0: turns and metadata take 41943")
    assert str(caught.value).endswith("above the limit of 4194304; large values belong to text, columns or attachments")


def test_metadata_of_exactly_64_kib_is_written_and_read_and_one_byte_more_is_neither() -> None:
    info = make_group(size=1).info()
    fit = (MAX_METADATA_BYTES - 60) // (ROW.size + 162)  # two bytes stand before an id of 160
    rows = tuple(info.rollouts[0].changed(rollout_id=f"{i:0160d}") for i in range(fit))

    def padded(characters: int) -> bytes:
        return encode_info(replace(info, planned_size=400, rollouts=rows, prompt_id="p" * characters))

    most = next(n for n in range(257) if len(padded(n)) == MAX_METADATA_BYTES)
    assert decode_info(padded(most)).prompt_id == "p" * most
    with pytest.raises(InvalidRollout, match="metadata of 65537 bytes is above the limit of 65536"):
        padded(most + 1)
    with pytest.raises(PayloadError, match="metadata of 65537 bytes is above the limit of 65536"):
        decode_info(padded(most) + b"\x00")


INFO = make_group(size=2, lengths=[8, 8]).info()


@pytest.mark.parametrize(
    "changes",
    [
        {"length": 0},
        {"length": 2**26 + 1},
        {"prompt_tokens": 0},
        {"prompt_tokens": 8},
        {"loss_tokens": 7},
        {"min_version": -1},
        {"min_version": 1},
        {"max_version": 2**53},
        {"size": 2**26 + 1},
        {"checksum": 2**32},
        {"reward": math.nan},
        {"rewards": {"x": -1.7e308}},
        {"rollout_id": ""},
        {"rollout_id": "a.0/1"},
    ],
)
def test_numbers_that_no_rollout_has_are_refused_and_the_neighbours_of_their_push_are_read(changes: Any) -> None:
    bad = replace(INFO, rollouts=(INFO.rollouts[0].changed(**changes), INFO.rollouts[1]))
    try:
        data = encode_info(bad)
    except InvalidRollout:
        return
    before, found, after = decode_infos([encode_info(INFO), data, encode_info(INFO)])
    assert isinstance(found, PayloadError)
    assert before == after == INFO
    with pytest.raises(PayloadError) as alone:
        decode_info(data)
    assert str(alone.value) == str(found)


PUSH_FIELDS = (
    *("format", "group_id", "env", "prompt_id", "adapter", "planned_size", "needs", "worker", "created", "seconds"),
    *("ids", "rows", "rewards", "columns"),
)


def info_list(**changes: Any) -> bytes:
    values = dict(zip(PUSH_FIELDS, msgpack.unpackb(encode_info(INFO)[:-4]), strict=True)) | changes
    data = msgpack.packb([*values.values()])
    return bytes(data + struct.pack(">I", zlib.crc32(data)))


FLAGS = 20 + 8 + 16
"""Place of the flags in a row: five counts, the reward, two versions."""
ROWS = INFO.rows


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 2},
        {"more": 1},
        {"group_id": "a/0"},
        {"env": ""},
        {"planned_size": 1},
        {"needs": "x"},
        {"created": math.nan},
        {"ids": ["r"]},
        {"ids": ["r", "r"]},
        {"rows": b"x" * 50},
        {"rows": ROWS[:FLAGS] + b"\x05" + ROWS[FLAGS + 1 :]},
        {"rows": ROWS[:FLAGS] + b"\x04" + ROWS[FLAGS + 1 :]},
        {"rewards": {"x": [1.0]}},
        {"rewards": {"x" * 65: [1.0, None]}},
        {"rewards": {"x": [True, 1.0]}},
        {"columns": [["x", "<f4", [1] * 8]]},
        {"columns": [["x", "O", []]]},
        {"columns": [["tokens", "<i4", []]]},
        {"columns": [["x", "<i4", [-1]]]},
    ],
)
def test_metadata_behind_a_right_checksum_is_still_checked(changes: dict[str, Any]) -> None:
    with pytest.raises(PayloadError):
        decode_info(info_list(**changes))


def test_a_group_without_answer_and_metadata_has_no_group_payload() -> None:
    assert encode_group_payload(None, {}) is None
    assert encode_push(make_group()).group_payload is None
    data = encode_group_payload(None, {"split": "train"})
    assert data is not None
    assert decode_group_payload(data) == (None, {"split": "train"})


def test_an_answer_above_4_mib_is_refused() -> None:
    with pytest.raises(
        InvalidRollout, match=r"^group a\.0: answer and metadata take 4194\d+ bytes, above the limit of 4194304$"
    ):
        encode_push(make_group(answer="x" * 2**22))


def array32(n: int) -> bytes:
    return b"\xdd" + struct.pack(">I", n)


@pytest.mark.parametrize("data", [b"",
b"\xc1",
b"\x01\x01",
b"\xcb" + struct.pack(">d", float("nan")),
b"\x91\xca" + struct.pack(">f", float("inf")),
b"\x82\xa1a\x01\xa1a\x02",
b"\x81\x01\x02",
b"\x81\xc4\x01a\x02",
b"\xc7\x00\x05",
b"\xd6\xff\x00\x00\x00\x00",
b"\x91" * 41 + b"\x00",
b"\x91" * 39 + b"\x93" + b"\x91\x90" * 3,
b"\x91" * 39 + b"\x93" + b"\x91\x80" * 3,
b"\x91" * 5000 + b"\x00",
array32(200_000),
array32(60_000) * 13_000,
bytes(70_000),])  # fmt: skip
def test_msgpack_that_nobody_here_writes_is_refused(data: bytes) -> None:
    with pytest.raises(PayloadError):
        loads(data, limit=66_000)


@pytest.mark.parametrize("value", [float("nan"), {1: 2}, object(), 2**64, "\ud800", {1, 2}])
def test_what_cannot_be_read_back_is_not_written(value: Any) -> None:
    with pytest.raises(PayloadError, match=r"^cannot be encoded: value"):
        dumps(value)


def test_a_rollout_is_read_of_all_of_its_sequences_in_order_and_of_nothing_else() -> None:
    (group,) = trees.groups(3, 1, 2)
    first, second = group.rollouts
    its = encode_push(group).payloads
    count = len(first.sequences)
    assert count > 2
    assert decode_whole(its[:count]) == first
    assert [*decode_rollouts(its)] == [first, second]
    for wrong in (its[: count - 1], its[1:count], (its[0], its[2], its[1], *its[3:count]), its[: count + 1]):
        with pytest.raises(PayloadError):
            decode_whole(wrong)
    damaged = [its[0][:-1], *its[1:]]
    assert [*decode_rollouts(damaged)] == [None, second]
    lost = [*its[: count - 1], None, *its[count:]]
    assert [*decode_rollouts(lost)] == [None, second]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        bytes(24),
        np.arange(3000, dtype=np.float32).reshape(30, 100),
        np.array([True, False]),
        np.array(7),
        memoryview(bytes(range(256)) * 500)[3:],
    ],
    ids=["no bytes", "a header", "a column", "a mask", "a scalar", "a part of a message"],
)
@pytest.mark.parametrize("start", [0, 1, 0xFFFFFFFF])
def test_the_checksum_is_crc32_over_all_that_the_wire_holds(data: object, start: int) -> None:
    assert checksum.crc32(data, start) == zlib.crc32(memoryview(data).tobytes(), start)  # type: ignore[arg-type]
