"""A page of metadata: what only one of its pushes in a million says, and what stays packed until it is asked for."""

import copy
import math
import pickle
import struct
import zlib
from dataclasses import replace

import msgpack
import pytest

from rlbuffer.errors import PayloadError
from rlbuffer.records.info import GroupInfo, RolloutInfo, Totals, totals_of
from rlbuffer.wire.metadata import decode_info, encode_info
from rlbuffer.wire.metadata_pages import RolloutNumbers, decode_infos, numbers_of

REWARD = 16
"""Offset at which a row's reward begins."""


def info(*rewards, group_id="g", **fields):
    rollouts = tuple(
        RolloutInfo(
            rollout_id=f"{group_id}/{i}",
            length=10 + i,
            prompt_tokens=4,
            loss_tokens=6 + i,
            reward=reward,
            min_version=7 - i,
            max_version=7 + i,
        )
        for i, reward in enumerate(rewards)
    )
    return GroupInfo(
        **{"group_id": group_id, "env": "a", "prompt_id": "p", "planned_size": 3, "rollouts": rollouts} | fields
    )


def sealed(data):
    return data[:-4] + struct.pack(">I", zlib.crc32(data[:-4]))


def with_reward(value):
    values = msgpack.unpackb(encode_info(info(1.0, 0.0)))
    rows = bytearray(values["rows"])
    struct.pack_into("<d", rows, REWARD, value)
    return sealed(msgpack.packb(values | {"rows": bytes(rows), "checksum": 2**32 - 1}))


def with_named(item):
    values = msgpack.unpackb(encode_info(info(1.0, 0.0)))
    return sealed(msgpack.packb(values | {"rewards": {"a": item}, "checksum": 2**32 - 1}))


def with_a_name_twice():
    data = with_named([b"\x01\x00", struct.pack("<d", 0.5)])
    pair = msgpack.packb("a") + msgpack.packb([b"\x01\x00", struct.pack("<d", 0.5)])
    return sealed(data.replace(b"\x81" + pair, b"\x82" + pair + pair))


def with_a_key_twice():
    data = encode_info(info(1.0, 0.0))
    pair = msgpack.packb("format") + msgpack.packb(1)
    return sealed(b"\x8f" + pair + data[1:])


def with_a_long_checksum():
    return sealed(encode_info(info(1.0, 0.0))[:-5] + b"\xcf" + bytes(8))


DAMAGED = {
    "a reward that is no number": (with_reward(math.nan), "rollout g/0: reward is not finite"),
    "an infinite reward": (with_reward(-math.inf), "rollout g/0: reward is not finite"),
    "a reward that float32 does not hold": (
        with_reward(1e39),
        "rollout g/0: reward 1e+39 is beyond the limit of 1e+12, either sign",
    ),
    "a negative reward just beyond the limit": (with_reward(math.nextafter(-1e12, -math.inf)), "is beyond the limit"),
    "a named reward that float32 does not hold": (
        with_named([b"\x00\x01", struct.pack("<d", 1.7e308)]),
        "rollout g/1: a 1.7e+308 is beyond the limit of 1e+12",
    ),
    "a named reward that is no number": (
        with_named([b"\x01\x01", struct.pack("<dd", 1.0, math.nan)]),
        "rollout g/1: a is not finite",
    ),
    "a named reward that is infinite": (
        with_named([b"\x00\x01", struct.pack("<d", math.inf)]),
        "rollout g/1: a is not finite",
    ),
    "named rewards of a third rollout": (with_named([b"\x01\x00\x01", bytes(16)]), "rewards"),
    "named rewards with an owner too few": (with_named([b"\x01\x00", bytes(16)]), "rewards"),
    "named rewards with another mark": (with_named([b"\x01\x02", bytes(8)]), "rewards"),
    "a name of a reward twice": (with_a_name_twice(), "a key occurs twice in a map"),
    "a key twice": (with_a_key_twice(), "a key occurs twice in a map"),
    "a checksum of eight bytes": (with_a_long_checksum(), "metadata is damaged"),
    "no bytes at all": (b"", "malformed msgpack"),
    "text": ("text", "expected bytes, got str"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_push_is_named_and_its_neighbours_are_read(name):
    data, words = DAMAGED[name]
    before, after = info(1.0, group_id="x"), info(0.0, 1.0, group_id="y")
    first, found, last = decode_infos([encode_info(before), data, encode_info(after)])
    assert (first, last) == (before, after)
    assert isinstance(found, PayloadError)
    assert words in str(found)
    with pytest.raises(PayloadError) as alone:
        decode_info(data)
    assert str(alone.value) == str(found)


@pytest.mark.parametrize(
    ("rewards", "is_scored", "is_flat"),
    [
        ((1.0, 1.0, 1.0), True, True),
        ((0.0, -0.0), True, True),
        ((0.0, 1.0), True, False),
        ((None, None), False, True),
        ((None, 0.0), False, False),
        ((0.5,), True, True),
        ((0.1 + 0.2, 0.3, 0.3 - 2e-7), True, True),
        ((0.0, 1.1e-6), True, False),
        ((0.0, 1e-9), True, False),
        ((-1e-9, -2e-9), True, False),
        ((-1e9, -1e9 - 1), True, True),
        ((1e9, 1e9 - 900, 1e9), True, True),
        ((1e9, 1e9 - 1100), True, False),
        ((-1e12, 1e12), True, False),
        ((None, 0.0, 1e-7), False, False),
    ],
)
def test_what_rollouts_amount_to_is_the_same_packed_and_unpacked(rewards, is_scored, is_flat):
    made = info(*rewards)
    (found,) = decode_infos([encode_info(made)])
    n = len(rewards)
    expected = Totals(n, sum(range(10, 10 + n)), 9 + n, 8 - n, 6 + n, is_scored, is_flat, True)
    assert found.totals == made.totals == expected
    assert found == made


def test_a_push_of_a_page_equals_copies_and_pickles_like_any_other():
    made = info(1.0, None, worker="w", created=1.5, needs=("x",), columns=(("entropy", "<f4", (2,)),))
    for change in (copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)), lambda x: replace(x), repr):
        (found,) = decode_infos([encode_info(made)])
        assert change(found) == change(made)
    assert found.totals == totals_of(made.rollouts)


def test_the_largest_rewards_and_an_empty_page_are_right():
    made = info(1e12, -1e12, created=1e12)
    made = replace(made, rollouts=tuple(replace(r, rewards={"a": 1e12, "b": -1e12}) for r in made.rollouts))
    assert decode_infos([encode_info(made)]) == [made]
    assert decode_infos([]) == []


def test_packed_numbers_are_those_of_the_rollouts():
    made = info(1.0, None, 0.0)
    cut = replace(made, rollouts=(replace(made.rollouts[0], is_truncated=True), *made.rollouts[1:]))
    (page,) = decode_infos([encode_info(cut)])
    packed = list(numbers_of(page))
    names = set(RolloutNumbers._fields) - {"packed_reward", "flags"} | {"reward", "is_truncated"}
    for numbers, rollout in zip(packed, decode_info(encode_info(cut)).rollouts, strict=True):
        assert isinstance(numbers, RolloutNumbers)
        assert [getattr(numbers, name) for name in names] == [getattr(rollout, name) for name in names]
    assert [numbers.reward for numbers in packed] == [1.0, None, 0.0]
    assert list(numbers_of(cut)) == packed
