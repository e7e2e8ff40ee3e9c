"""What is refused of rollouts, rows, plans and payloads that do not fit together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from samples import sample_of

from rlbuffer.batcher.advantages import advantage
from rlbuffer.errors import InvalidRollout, PackingError
from rlbuffer.packing.assembly import PackItem, assemble
from rlbuffer.records.columns import as_column
from rlbuffer.records.rollout import Rollout
from rlbuffer.records.step_plan import Normalizers
from rlbuffer.wire.payload import (
    encode_rollout,
)

NORMALIZERS = Normalizers(loss_tokens=1, rollouts=1, groups=1)


def rollout(**fields: Any) -> Rollout:
    return Rollout.from_completion(
        prompt_ids=[1, 2], token_ids=[3, 4], logprobs=[-1.0, -1.0], reward=0.0, policy_version=0, **fields
    )


def item(name: str, *, length: int = 4, adapter: str = "", **fields: Any) -> PackItem:
    return PackItem(rollout=rollout(**fields), sample=sample_of(name, length=length, adapter=adapter))


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
