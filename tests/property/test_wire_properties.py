"""Every content of a rollout comes back equal; any change to its bytes is noticed."""

from __future__ import annotations

import struct
import zlib
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rlbuffer.errors import PayloadError
from rlbuffer.records.checks import MAX_NUMBER
from rlbuffer.records.columns import COLUMN_DTYPES
from rlbuffer.records.group import Group
from rlbuffer.records.rollout import Rollout
from rlbuffer.records.spans import Turn, VersionSpan
from rlbuffer.wire.bounded_msgpack import dumps, loads
from rlbuffer.wire.metadata import decode_info
from rlbuffer.wire.payload import decode_group_payload, decode_rollout, encode_push, encode_rollout

names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True).filter(
    lambda n: n not in ("tokens", "loss_mask", "logprobs")
)
texts = st.text(max_size=12)
finite = st.floats(allow_nan=False, allow_infinity=False)
trainable = st.floats(-MAX_NUMBER, MAX_NUMBER)
plain_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | finite | texts | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
plain_maps = st.dictionaries(texts, plain_values, max_size=3)


def arrays(shape: Any) -> st.SearchStrategy[np.ndarray]:
    def of(dtype: np.dtype) -> st.SearchStrategy[np.ndarray]:
        limit = float(dtype.type(min(MAX_NUMBER, float(np.finfo(dtype).max)))) if dtype.kind == "f" else 0.0
        elements = {"min_value": -limit, "max_value": limit} if dtype.kind == "f" else {}
        return hnp.arrays(dtype, shape, elements=hnp.from_dtype(dtype, **elements))

    return st.sampled_from(sorted(COLUMN_DTYPES, key=str)).flatmap(of)


@st.composite
def rollouts(draw: st.DrawFn) -> Rollout:
    length = draw(st.integers(1, 12))
    mask = np.array([False, *draw(st.lists(st.booleans(), min_size=length - 1, max_size=length - 1))])
    cuts = sorted(draw(st.sets(st.integers(1, length), max_size=3)) | {length})
    spans, start = [], 0
    for cut in cuts:
        spans.append(VersionSpan(draw(st.integers(0, 2**53 - 1)), start, cut))
        start = cut
    turns, start = [], 0
    for cut in cuts:
        reward, metadata = draw(st.none() | trainable), draw(st.none() | plain_maps)
        turns.append(Turn(draw(texts), start, cut, reward, metadata))
        start = cut
    trailing = draw(st.lists(st.integers(0, 3), max_size=2))
    finish_reason = draw(texts | st.just("length"))
    return Rollout(
        rollout_id=draw(texts),
        tokens=draw(hnp.arrays(np.int32, length, elements=st.integers(0, 2**31 - 1))),
        loss_mask=mask,
        logprobs=draw(hnp.arrays(np.float32, length, elements=st.floats(-50, 0, width=32))),
        reward=draw(st.none() | trainable),
        rewards=draw(st.dictionaries(texts, trainable, max_size=3)),
        successes=draw(st.dictionaries(texts, st.booleans(), max_size=3)),
        version_spans=tuple(spans),
        turns=tuple(turns) if draw(st.booleans()) else (),
        finish_reason=finish_reason,
        is_truncated=finish_reason == "length" or draw(st.booleans()),
        columns=draw(st.dictionaries(names, arrays((length, *trailing)), max_size=3)),
        attachments=draw(
            st.dictionaries(names, arrays(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0)), max_size=3)
        ),
        text=draw(st.none() | st.text(max_size=40)),
        metadata=draw(plain_maps),
        failure=draw(st.none() | st.tuples(st.sampled_from(["timeout", "Tool.Error-2"]), texts)),
    )


@settings(max_examples=100, deadline=None)
@given(rollout=rollouts())
def test_any_rollout_comes_back_equal_and_without_a_copy(rollout: Rollout) -> None:
    data = encode_rollout(rollout)
    back = decode_rollout(data)
    assert back == rollout
    assert encode_rollout(back) == data
    whole = np.frombuffer(data, np.uint8)
    for array in (back.tokens, back.loss_mask, back.logprobs, *back.columns.values(), *back.attachments.values()):
        assert not array.flags.writeable
        assert array.size == 0 or np.shares_memory(array, whole)


@settings(max_examples=60, deadline=None)
@given(
    members=st.lists(rollouts(), min_size=1, max_size=4),
    answer=plain_values,
    metadata=plain_maps,
    spare=st.integers(0, 3),
)
def test_any_group_comes_back_whole_from_its_push(
    members: list[Rollout], answer: Any, metadata: Any, spare: int
) -> None:
    unnamed = [replace(r, rollout_id="") for r in members]
    group = Group(
        group_id="a.1",
        env="a",
        prompt_id="π",
        rollouts=tuple(unnamed),
        planned_size=len(members) + spare,
        answer=answer,
        metadata=metadata,
        needs=("ref_logprobs",),
        worker="w-1",
        created=1.5,
    )
    push = encode_push(group)
    assert decode_info(push.metadata) == push.info
    assert [r.size for r in push.info.rollouts] == [len(p) for p in push.payloads]
    for payload, info, rollout in zip(push.payloads, push.info.rollouts, group.rollouts, strict=True):
        assert decode_rollout(payload, expected=info) == rollout
    if push.group_payload is None:
        assert answer is None
        assert not metadata
    else:
        assert decode_group_payload(push.group_payload) == (group.answer, group.metadata)


def framed(magic: bytes, arrays: int, tokens: int, details: Any, parts: list[Any]) -> bytes:
    """A payload as the protocol page describes it, written without a thought for speed."""
    packed = msgpack.packb(details)
    body = packed
    for part in parts:
        body += bytes(-(24 + len(body)) % 8) + bytes(part)
    head = struct.pack("<4sHHIII", magic, 1, arrays, len(packed), tokens, 24 + len(body))
    return head + struct.pack("<I", zlib.crc32(head + body)) + body


def as_described(rollout: Rollout) -> bytes:
    arrays = [rollout.tokens, rollout.loss_mask, rollout.logprobs]
    arrays += [*rollout.columns.values(), *rollout.attachments.values()]
    text = None if rollout.text is None else rollout.text.encode()
    details = [
        rollout.rollout_id,
        rollout.reward,
        dict(rollout.rewards),
        dict(rollout.successes),
        rollout.finish_reason,
        rollout.is_truncated,
        [number for span in rollout.version_spans for number in span],
        [list(turn) for turn in rollout.turns],
        [[name, a.dtype.str.lstrip("<|"), *a.shape[1:]] for name, a in rollout.columns.items()],
        [[name, a.dtype.str.lstrip("<|"), *a.shape] for name, a in rollout.attachments.items()],
        None if text is None else len(text),
        dict(rollout.metadata),
        0,  # place among the sequences of its rollout
        1,  # how many those are
        rollout.name,
        *([list(rollout.failure)] if rollout.failure else []),
    ]
    parts = [a.tobytes() for a in arrays] + ([] if text is None else [text])
    return framed(b"RLBR", len(arrays), rollout.length, details, parts)


def metadata_as_described(group: Group, payloads: list[bytes]) -> bytes:
    members = group.rollouts
    rows = [
        struct.pack(
            "<IIIIIdQQBII",
            r.length,
            next((i for i, trained in enumerate(r.loss_mask) if trained), r.length),
            sum(r.loss_mask.tolist()),
            len(r.turns),
            int(r.tokens.max()),
            0.0 if r.reward is None else r.reward,
            min(span.policy_version for span in r.version_spans),
            max(span.policy_version for span in r.version_spans),
            (r.reward is not None) + 2 * r.is_truncated,
            len(data),
            struct.unpack_from("<I", data, 20)[0],
        )
        for r, data in zip(members, payloads, strict=True)
    ]
    names = dict.fromkeys(name for r in members for name in r.rewards)
    ids = [r.rollout_id for r in members]
    kinds = {(name, a.dtype.str, a.shape[1:]) for r in members for name, a in r.columns.items()}
    failures: dict[str, list[int]] = {}
    for place, rollout in enumerate(members):
        if rollout.failure:
            failures.setdefault(rollout.failure.kind, []).append(place)
    values = [
        "P2F" if failures else "P2",
        *(getattr(group, key) for key in ("group_id", "env", "prompt_id", "adapter", "planned_size")),
        *(getattr(group, key) for key in ("needs", "worker", "created")),
        None if ids == [f"{group.group_id}/{i}" for i in range(len(ids))] else ids,
        b"".join(rows),
        {name: [r.rewards.get(name) for r in members] for name in names},
        sorted(kinds),
        *([failures] if failures else []),
    ]
    data = bytes(msgpack.packb(values))
    return data + struct.pack(">I", zlib.crc32(data))


@settings(max_examples=30, deadline=None)
@given(
    members=st.lists(rollouts(), min_size=1, max_size=4),
    answer=plain_values,
    metadata=plain_maps,
    named=st.booleans(),
)
def test_any_push_is_byte_for_byte_what_the_protocol_page_describes(
    members: list[Rollout], answer: Any, metadata: Any, named: bool
) -> None:
    group = Group(
        group_id="a.1",
        env="a",
        prompt_id="π",
        rollouts=tuple(replace(r, rollout_id=f"π{i}" if named else "") for i, r in enumerate(members)),
        planned_size=len(members),
        answer=answer,
        metadata=metadata,
        created=1.5,
    )
    push = encode_push(group)
    payloads = [as_described(rollout) for rollout in group.rollouts]
    assert list(push.payloads) == payloads
    assert push.metadata == metadata_as_described(group, payloads)
    if push.group_payload is not None:
        assert push.group_payload == framed(b"RLBG", 0, 0, [group.answer, dict(group.metadata)], [])


@settings(max_examples=100, deadline=None)
@given(value=plain_values)
def test_any_plain_value_comes_back_equal_from_msgpack(value: Any) -> None:
    assert loads(dumps(value), limit=1 << 20) == value


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=200))
def test_bytes_that_nobody_wrote_are_refused_or_plain(data: bytes) -> None:
    for decode in (decode_rollout, decode_info, decode_group_payload):
        with pytest.raises(PayloadError):
            decode(data)
    try:
        value = loads(data, limit=100)
    except PayloadError:
        return
    assert loads(dumps(value), limit=1000) == value
