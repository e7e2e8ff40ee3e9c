"""Any change to the bytes of a push is noticed, and never answered with anything but PayloadError."""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
import pytest
from wounds import false_payload, mutated, packed, resealed, tampered, with_false_details

from rlbuffer.errors import PayloadError
from rlbuffer.records.group import Group
from rlbuffer.records.info import GroupInfo, RolloutInfo
from rlbuffer.records.rollout import Rollout
from rlbuffer.records.spans import Turn, VersionSpan
from rlbuffer.testing import make_group
from rlbuffer.wire.metadata import decode_info, encode_info
from rlbuffer.wire.payload import (
    Payload,
    decode,
    decode_group_payload,
    decode_rollout,
    encode_push,
    encode_rollout,
    in_range,
    payload_checksum,
)

MUTATIONS = 2_000


def rich_group() -> Group:
    rng = np.random.default_rng(0)
    base = make_group(env="math", rewards=[0.5, None, -2.0], lengths=[5, 16, 9], version=7, created=12.5).rollouts
    members = []
    for i, rollout in enumerate(base):
        length = rollout.length
        middle = 3
        members.append(
            Rollout(
                rollout_id="" if i else "math.0:π",
                tokens=rollout.tokens,
                loss_mask=rollout.loss_mask,
                logprobs=rollout.logprobs,
                reward=rollout.reward,
                rewards={"format": 1.0} if i else {},
                successes={"solved": True},
                version_spans=(VersionSpan(7, 1, middle), VersionSpan(8, middle, length)),
                turns=(Turn("user", 0, 1), Turn("assistant", 1, length, 0.5, {"tool": "π"})),
                finish_reason="length" if i == 1 else "stop",
                is_truncated=i == 1,
                columns={
                    "entropy": rng.random(length).astype(np.float32),
                    "experts": rng.integers(0, 9, (length, 2, 2)),
                },
                attachments={"image": rng.integers(0, 255, (3, 2), dtype=np.uint8), "flags": np.array([True, False])},
                text="Was ist π?",
                metadata={"difficulty": 3, "tags": ["ä", None, 1.5]},
            )
        )
    return Group(
        group_id="math.0",
        env="math",
        prompt_id="p",
        rollouts=tuple(members),
        planned_size=4,
        answer="3.14",
        created=2.5,
        seconds=0.5,
    )


PAYLOADS = encode_push(rich_group()).payloads
MAPS = (encode_push(rich_group()).metadata, encode_push(make_group(size=5, seed=3, worker="w")).metadata)


def resealed_map(data: bytes) -> bytes:
    return data if len(data) < 5 else data[:-4] + struct.pack(">I", zlib.crc32(data[:-4]))


def refuses(decode: Callable[[bytes], Any], data: bytes) -> bool:
    try:
        decode(data)
    except PayloadError:
        return True
    return False


def test_mutated_payloads_with_a_right_checksum_are_refused_or_valid() -> None:
    """Behind the checksum a changed value looks like another rollout; a broken record must be."""
    rng, accepted, refused = random.Random(2), 0, 0
    for i in range(MUTATIONS):
        data, other = rng.sample(PAYLOADS, 2)
        wounded = resealed(mutated(rng, data, other), length=i % 2 == 0)
        accepted, refused = _judge(decode_rollout, encode_rollout, wounded, accepted, refused)
    assert accepted > MUTATIONS // 100
    assert refused > 0.5 * MUTATIONS


def test_payloads_with_tampered_details_are_refused_or_valid() -> None:
    rng, accepted, refused = random.Random(3), 0, 0
    for _ in range(MUTATIONS):
        data = rng.choice(PAYLOADS)
        wounded = with_false_details(rng, data)
        accepted, refused = _judge(decode_rollout, encode_rollout, wounded, accepted, refused)
    assert accepted > MUTATIONS // 100
    assert refused > 0.3 * MUTATIONS


def test_every_flipped_bit_of_a_payload_and_of_its_metadata_is_noticed() -> None:
    push = encode_push(rich_group())
    assert push.group_payload is not None
    for data, read in (
        (push.payloads[0], decode_rollout),
        (push.metadata, decode_info),
        (push.group_payload, decode_group_payload),
    ):
        for bit in range(8 * len(data)):
            flipped = bytearray(data)
            flipped[bit // 8] ^= 1 << bit % 8
            assert refuses(read, bytes(flipped)), f"bit {bit} was flipped unnoticed"


def test_every_truncation_and_extension_is_noticed() -> None:
    push = encode_push(rich_group())
    for data, read in ((push.payloads[0], decode_rollout), (push.metadata, decode_info)):
        for wounded in (*(data[:n] for n in range(len(data))), data + b"\x00", data + data):
            with pytest.raises(PayloadError):
                read(wounded)


def test_mutated_metadata_maps_with_a_right_checksum_are_refused_or_valid() -> None:
    rng, accepted, refused = random.Random(5), 0, 0
    for i in range(MUTATIONS):
        data, other = rng.sample(MAPS, 2)
        if i % 2:
            wounded = resealed_map(mutated(rng, data, other))
        else:
            wounded = resealed_map(packed(tampered(rng, msgpack.unpackb(data[:-4]))) + bytes(4))
        accepted, refused = _judge(decode_info, encode_info, wounded, accepted, refused)
    assert accepted > MUTATIONS // 100
    assert refused > 0.5 * MUTATIONS


def opened(data: bytes, info: RolloutInfo) -> Payload | None:
    try:
        return decode(data, info)
    except PayloadError:
        return None


def test_a_payload_is_taken_only_as_its_push_announced_it() -> None:
    push = encode_push(rich_group())
    known = dict(zip(push.payloads, push.info.rollouts, strict=True))
    for data, info in known.items():
        assert opened(data, info) is not None
        assert all(opened(data, other) is None for other in known.values() if other is not info)
    rng = random.Random(7)
    for i in range(MUTATIONS):
        data, other = rng.sample(push.payloads, 2)
        wounded = mutated(rng, data, other)
        for claimed in (wounded, resealed(wounded)):
            assert claimed == data or opened(claimed, known[data]) is None, f"mutation {i} was taken"


def test_the_arrays_of_a_payload_whose_metadata_lie_with_it_break_no_rule() -> None:
    """Whoever writes a payload writes its metadata. What of it would be trained is a rollout, or nothing is."""
    push = encode_push(rich_group())
    known = dict(zip(push.payloads, push.info.rollouts, strict=True))
    rng, taken, refused = random.Random(8), 0, 0
    for i in range(MUTATIONS):
        data, other = rng.sample(push.payloads, 2)
        wounded = false_payload(rng, data, other, i)
        info = known[data].changed(size=len(wounded), checksum=payload_checksum(wounded))
        its = opened(wounded, info)
        try:
            whole: Rollout | None = decode_rollout(wounded, expected=info)
        except PayloadError:
            whole = None
        if its is None or not in_range(its.tokens, its.loss_mask, its.logprobs, None):
            assert whole is None, f"mutation {i} is sound, and was not taken"
            refused += 1
            continue
        taken += 1  # only the user's own values can be wrong with it
        arrays = {name: getattr(its, name) for name in TRAINED}
        trained = Rollout(rollout_id="", reward=info.reward, rewards=info.rewards, **arrays)
        assert whole is None or trained == Rollout(
            rollout_id="", reward=whole.reward, rewards=whole.rewards, **{k: getattr(whole, k) for k in TRAINED}
        )
        for name in ("length", "prompt_tokens", "loss_tokens"):
            assert getattr(trained, name) == getattr(info, name)
        assert (trained.min_policy_version, trained.max_policy_version) == (info.min_version, info.max_version)
    assert min(taken, refused) > MUTATIONS // 100


TRAINED = ("tokens", "loss_mask", "logprobs", "version_spans", "columns", "attachments")


def _judge(
    decode: Callable[[bytes], Any], encode: Callable[[Any], bytes], data: bytes, accepted: int, refused: int
) -> tuple[int, int]:
    try:
        record = decode(data)
    except PayloadError:
        return accepted, refused + 1
    assert isinstance(record, Rollout | GroupInfo)
    assert decode(encode(record)) == record
    return accepted + 1, refused
