"""A push is encoded in one pass: its bytes are the stored ones, and what changed since the checks is still refused."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rlbuffer.errors import InvalidRollout
from rlbuffer.records.group import Group
from rlbuffer.records.rollout import Rollout
from rlbuffer.testing import make_group
from rlbuffer.wire.payload import encode_push, encode_rollout


def rollout(**changes: Any) -> Rollout:
    return replace(make_group(size=1, lengths=[8]).rollouts[0], **changes)


def spoiled(value: Any) -> Rollout:
    """A rollout whose metadata is another one than was checked: what it holds can still be written to."""
    made = rollout(metadata={"tags": []})
    made.metadata["tags"].append(value)
    return made


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("nan"), "value[11].tags[0]: expected a finite number, got nan"),
        ({1: 2}, "value[11].tags[0]: expected string keys, got 1"),
        ([0] * 65537, "value[11].tags[0]: 65537 items, more than 65536; arrays belong to columns or attachments"),
        ("\ud800", "value[11].tags[0]: not valid Unicode at position 0"),
    ],
)
def test_what_would_be_written_and_never_read_is_refused_wherever_it_came_into_a_record(
    value: Any, message: str
) -> None:
    with pytest.raises(InvalidRollout):
        encode_rollout(spoiled(value))
    turns = rollout(turns=(("user", 0, 2), ("tool", 2, 3, None, {"tags": 0})))
    turns.turns[1].metadata["tags"] = [value]  # type: ignore[index]
    with pytest.raises(InvalidRollout) as caught:
        encode_rollout(turns)
    in_turn = message.replace("value[11]", "value[7][1][4]")
    assert str(caught.value) == f"rollout a.0/0: metadata cannot be encoded: {in_turn}"


def test_the_bytes_of_a_push_are_those_that_stored_runs_hold() -> None:
    long = rollout(
        tokens=[1, 5, 7, 9, 2],
        loss_mask=[False, False, True, True, False],
        logprobs=[0.0, 0.0, -0.5, -0.25, 0.0],
        reward=-0.0,
        rewards={"format": 0.5},
        successes={"solved": True},
        version_spans=((3, 0, 3), (4, 3, 5)),
        turns=(("user", 0, 2), ("assistant", 2, 5, 1.0, {"tool": None})),
        finish_reason="length",
        is_truncated=True,
        columns={"entropy": np.arange(10, dtype=np.float32).reshape(5, 2)},
        attachments={"seed": np.array(7)},
        text="äb",
        metadata={"difficulty": [1, 2.5]},
    )
    short = rollout(
        tokens=[1, 2], loss_mask=[False, True], logprobs=[0, -1], reward=None, version_spans=((3, 1, 2),), turns=()
    )
    group = Group(
        group_id="a.0",
        env="a",
        prompt_id="π",
        rollouts=(replace(long, rollout_id=""), replace(short, rollout_id="")),
        planned_size=3,
        answer="42",
        created=1.5,
    )
    push = encode_push(group)
    everything = b"".join((*push.payloads, push.metadata, push.group_payload or b""))
    assert hashlib.sha256(everything).hexdigest() == "4eab37cae4267e71d83e97a031450e395d58a42da6b63e60692fb8b23cff6416"
