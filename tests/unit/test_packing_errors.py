"""What is refused of rollouts, rows, plans and payloads that do not fit together."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
import pytest

from rlbuffer.batcher.advantages import advantage
from rlbuffer.errors import InvalidRollout, PackingError, PayloadError
from rlbuffer.packing.assembly import PackItem, assemble
from rlbuffer.records.columns import as_column
from rlbuffer.records.micro_batch import Sample
from rlbuffer.records.rollout import Rollout
from rlbuffer.records.step_plan import Normalizers
from rlbuffer.store.claim import decode_claim
from rlbuffer.store.keys import Keys
from rlbuffer.store.step_format import decode_header, decode_part
from rlbuffer.store.viewer import part_of
from rlbuffer.wire.metadata import decode_info
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
    "build",
    [
        lambda: item("g/0", length=0),
        lambda: item("g/0", length=5),
        lambda: assembled([[(0,)]], [item("g/0")], pad_to_multiple_of=0),
        lambda: assembled([[(0, 1, 2)]], [item(f"g/{i}") for i in range(3)]),
        lambda: assembled([[(1,)]], [item("g/0")]),
        lambda: assembled([[(0, 1)]], [item("g/0", adapter="x"), item("g/1", adapter="y")]),
        lambda: assembled([[(0,)]], [item("g/0", columns={"advantages": np.ones((4, 2))})]),
        lambda: assembled([[(0,)]], [item("g/0")], columns=["mine"]),
    ],
)
def test_rows_that_cannot_be_assembled_are_refused(build: Callable[[], Any]) -> None:
    with pytest.raises(PackingError):
        build()


@pytest.mark.parametrize(
    "call",
    [
        lambda: advantage("rloo", [1.0, float("nan")]),
        lambda: advantage("grpo", [[1.0]]),
        lambda: advantage("opo", [1.0, 0.0]),
        lambda: advantage("length_penalty", [1.0, 0.0]),
        lambda: advantage("opo", [1.0, 0.0], lengths=[3]),
        lambda: as_column("x", [[1], [2, 3]], kind="column"),
        lambda: encode_rollout(rollout(attachments={"a": np.zeros((2**27, 0))}, rollout_id="g/0")),
    ],
)
def test_what_no_rollout_may_hold_is_refused(call: Callable[[], Any]) -> None:
    with pytest.raises(InvalidRollout):
        call()


def sealed(magic: bytes, body: bytes, details: int) -> bytes:
    """A payload with a right checksum."""
    head = struct.pack("<4sHHIII", magic, 1, 0, details, 0, 24 + len(body))
    return head + struct.pack("<I", zlib.crc32(body, zlib.crc32(head))) + body


PAIR = encode_group_payload("answer", {}) or b""
ONE = msgpack.packb(["answer"])


@pytest.mark.parametrize(
    ("decode", "data"),
    [
        (decode_rollout, bytearray(30)),
        (decode_info, "text"),
        (decode_rollout, b"RLBR"),
        (decode_group_payload, sealed(b"RLBG", PAIR[24:] + b"\0", len(PAIR) - 24)),
        (decode_group_payload, sealed(b"RLBG", ONE, len(ONE))),
        (lambda data: decode_header(data, digest="", committed_ms=0), msgpack.packb({})),
        (decode_part, b"\xc1"),
        (
            lambda data: part_of("1-1", {b"part": data}, Keys("r")),
            msgpack.packb(
                {
                    "sources": [],
                    "rollouts": b"",
                    "ids": None,
                    "rewards": None,
                    "rows": [],
                    "step": 2,
                    "rank": 0,
                    "row_tokens": 8,
                    "rows_per_micro_batch": 1,
                }
            ),
        ),
        (decode_claim, msgpack.packb({})),
    ],
)
def test_bytes_that_are_not_what_they_should_be_are_refused(decode: Callable[[Any], Any], data: Any) -> None:
    with pytest.raises(PayloadError):
        decode(data)
