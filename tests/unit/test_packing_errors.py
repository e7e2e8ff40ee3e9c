"""Exact texts: what is refused of rollouts, rows, plans and payloads that do not fit together."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
import pytest

from rlbuffer.batcher import budget
from rlbuffer.batcher.advantages import advantage
from rlbuffer.errors import InvalidRollout, PackingError, PayloadError, RlbufferError
from rlbuffer.packing.assembly import PackItem, assemble
from rlbuffer.records.columns import as_column
from rlbuffer.records.micro_batch import Sample
from rlbuffer.records.rollout import Rollout
from rlbuffer.records.step_plan import Normalizers
from rlbuffer.store.keys import Keys
from rlbuffer.store.moves.recovery import decode_claim
from rlbuffer.store.moves.step_format import decode_header, decode_part
from rlbuffer.store.moves.step_reading import part_of
from rlbuffer.testing import make_group
from rlbuffer.wire.metadata import decode_info, encode_info
from rlbuffer.wire.payload import (
    decode_group_payload,
    decode_rollout,
    encode_group_payload,
    encode_rollout,
)

NORMALIZERS = Normalizers(loss_tokens=1, rollouts=1, groups=1)


def rollout(**fields: Any) -> Rollout:
    return Rollout.from_completion(
        prompt_ids=[1, 2], token_ids=[3, 4], logprobs=[-1.0, -1.0], reward=0.0, policy_version=0, **fields
    )


def item(name: str, *, length: int = 4, adapter: str = "", **fields: Any) -> PackItem:
    sample = Sample(
        rollout_id=name,
        group_id="g",
        env="a",
        reward=0.0,
        rewards={},
        advantage=0.0,
        policy_versions=(0, 0),
        answer=None,
        prompt_tokens=2,
        length=length,
    )
    return PackItem(rollout=rollout(**fields), length=length, sample=sample, adapter=adapter)


def assembled(rows: Any, items: list[PackItem], **options: Any) -> Any:
    return assemble(rows, items, **({"row_tokens": 8, "normalizers": NORMALIZERS} | options))


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: item("g/0", length=0), "assemble: rollout 'g/0' has length 0"),
        (lambda: item("g/0", length=5), "assemble: rollout 'g/0' has 4 tokens, 5 planned"),
        (
            lambda: assembled([[(0,)]], [item("g/0")], pad_to_multiple_of=0),
            "assemble: pad_to_multiple_of = 0 must be at least 1",
        ),
        (
            lambda: assembled([[(0, 1, 2)]], [item(f"g/{i}") for i in range(3)]),
            "assemble: a row of 3 rollouts has 12 tokens; it holds 8",
        ),
        (lambda: assembled([[(1,)]], [item("g/0")]), "assemble: row (1,) is out of range for 1 items"),
        (
            lambda: assembled([[(0, 1)]], [item("g/0", adapter="x"), item("g/1", adapter="y")]),
            "assemble: a row mixes the adapters 'x', 'y'",
        ),
        (
            lambda: assembled([[(0,)]], [item("g/0", columns={"advantages": np.ones((4, 2))})]),
            "assemble: column advantages of rollout 'g/0' is float64 [T, 2], not [T] numbers",
        ),
        (
            lambda: assembled([[(0,)]], [item("g/0")], columns=["mine"]),
            (
                "assemble: column mine is required, but no rollout here has it and its dtype is not declared: "
                "call register_column('mine', fill=..., dtype=...)"
            ),
        ),
    ],
)
def test_rows_that_cannot_be_assembled_are_refused(build: Callable[[], Any], text: str) -> None:
    with pytest.raises(PackingError) as caught:
        build()
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: advantage("rloo", [1.0, float("nan")]),
            "advantage rloo: rewards must be finite numbers of shape [n], got [1.0, nan]",
        ),
        (
            lambda: advantage("grpo", [[1.0]]),  # type: ignore[list-item]
            "advantage grpo: rewards must be finite numbers of shape [n], got [[1.0]]",
        ),
        (lambda: advantage("opo", [1.0, 0.0]), "advantage opo: lengths are required"),
        (lambda: advantage("length_penalty", [1.0, 0.0]), "advantage length_penalty: lengths are required"),
        (lambda: advantage("opo", [1.0, 0.0], lengths=[3]), "advantage opo: 1 lengths do not match 2 rewards"),
        (
            lambda: as_column("x", [[1], [2, 3]], kind="column"),
            "column x: not a rectangular array of numbers",
        ),
        (
            lambda: encode_rollout(rollout(attachments={"a": np.zeros((2**27, 0))}, rollout_id="g/0")),
            "rollout g/0: attachment a has the shape [134217728, 0]",
        ),
    ],
)
def test_what_no_rollout_may_hold_is_refused(call: Callable[[], Any], text: str) -> None:
    with pytest.raises(InvalidRollout) as caught:
        call()
    assert str(caught.value) == text


def test_a_rollout_with_giant_metadata_is_told_where_to_put_it() -> None:
    with pytest.raises(InvalidRollout) as caught:
        encode_rollout(rollout(rollout_id="g/0", metadata={"notes": "x" * 2**22}))
    assert str(caught.value) == (
        "rollout g/0: turns and metadata take 4194367 bytes, above the limit of 4194304; "
        "large values belong to text, columns or attachments"
    )


def sealed(magic: bytes, body: bytes, details: int) -> bytes:
    """A payload with a right checksum."""
    head = struct.pack("<4sHHIII", magic, 1, 0, details, 0, 24 + len(body))
    return head + struct.pack("<I", zlib.crc32(body, zlib.crc32(head))) + body


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def test_a_flipped_byte_is_told_by_both_checksums() -> None:
    data = encode_rollout(rollout())
    bad = flipped(data, len(data) - 1)
    actual, expected = zlib.crc32(bad[24:], zlib.crc32(bad[:20])), struct.unpack("<I", data[20:24])[0]
    with pytest.raises(PayloadError) as caught:
        decode_rollout(bad)
    assert str(caught.value) == f"payload is damaged: checksum {actual:08x}, expected {expected:08x}"
    info = encode_info(make_group(size=1).info())
    bad = info[:-4] + struct.pack(">I", 7)
    with pytest.raises(PayloadError) as caught:
        decode_info(bad)
    assert str(caught.value) == f"metadata is damaged: checksum {zlib.crc32(info[:-4]):08x}, expected 7"


PAIR = encode_group_payload("answer", {}) or b""
ONE = msgpack.packb(["answer"])


@pytest.mark.parametrize(
    ("decode", "data", "text"),
    [
        (decode_rollout, bytearray(30), "expected bytes, got bytearray"),
        (decode_info, "text", "expected bytes, got str"),
        (decode_rollout, b"RLBR", "payload of 4 bytes is shorter than its header of 24"),
        (
            decode_rollout,
            encode_rollout(rollout())[:-1],
            f"payload of {len(encode_rollout(rollout())) - 1} bytes should have {len(encode_rollout(rollout()))}",
        ),
        (
            decode_group_payload,
            sealed(b"RLBG", PAIR[24:] + b"\0", len(PAIR) - 24),
            "invalid group payload: bytes after the details",
        ),
        (
            decode_group_payload,
            sealed(b"RLBG", ONE, len(ONE)),
            "invalid group payload: expected answer and metadata",
        ),
        (
            lambda data: decode_header(data, digest="", committed_ms=0),
            msgpack.packb({}),
            "step header: unexpected content (KeyError: 'age_limits')",
        ),
        (
            lambda data: decode_header(data, digest="", committed_ms=0),
            msgpack.packb(
                {"age_limits": {}, "group_ids": [], "closed_by": "capacity", "columns": {}, "sees_tomorrow": True}
            ),
            "step header: this rlbuffer does not know sees_tomorrow: a newer one made the step, update this one",
        ),
        (decode_part, msgpack.packb({}), "step part: unexpected content (KeyError: 'sources')"),
        (
            decode_part,
            msgpack.packb({"sources": [], "rollouts": [], "rows": [[[0]]]}),
            "step part: unexpected content (ValueError: a row names a rollout that the part does not have)",
        ),
        (
            decode_part,
            msgpack.packb(
                {
                    "sources": [["k", "g", "a", "", "", 0, "", 0]],
                    "rollouts": [[0, i, 0.0, f"g/{i}", 1, 1, 0, None, {}, 0, 0, 0, False, 1, 1] for i in range(2)],
                    "rows": [[[0]], [[0]]],
                }
            ),
            "step part: unexpected content (ValueError: the rows do not name each rollout once)",
        ),
        (decode_part, b"\xc1", "step part: malformed msgpack: FormatError"),
        (
            lambda data: part_of("1-1", {b"part": data}, Keys("r")),
            msgpack.packb(
                {
                    "sources": [],
                    "rollouts": [],
                    "rows": [],
                    "step": 2,
                    "rank": 0,
                    "row_tokens": 8,
                    "rows_per_micro_batch": 1,
                }
            ),
            "step part 1-1 says that it is rank 0 of step 2",
        ),
        (decode_claim, msgpack.packb({}), "claim of a trainer: unexpected content (KeyError: 'steps')"),
    ],
)
def test_bytes_that_are_not_what_they_should_be_are_refused(decode: Callable[[Any], Any], data: Any, text: str) -> None:
    with pytest.raises(PayloadError) as caught:
        decode(data)
    assert str(caught.value) == text


def test_a_saved_state_of_another_version_is_refused() -> None:
    with pytest.raises(RlbufferError) as caught:
        budget.load({"schema": 2})
    assert str(caught.value) == "the batcher's saved state has schema 2, this version reads 1"
