"""Every content of a rollout comes back equal; any change to its bytes is noticed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

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
        seconds=0.25,
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
