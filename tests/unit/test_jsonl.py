from __future__ import annotations

import json
from typing import Any

import pytest

from rlbuffer.errors import InvalidRollout
from rlbuffer.records.group import Group
from rlbuffer.records.rollout import Rollout
from rlbuffer.records.spans import Turn, VersionSpan
from rlbuffer.wire.jsonl import group_from_dict, group_from_line
from rlbuffer.wire.payload import encode_push


def rollout(**changes: Any) -> dict[str, Any]:
    return {
        "tokens": [1, 2, 3],
        "loss_mask": [False, True, True],
        "logprobs": [0, -0.5, -0.25],
        "reward": 1,
        "version_spans": [[4, 1, 3]],
    } | changes


def group(*rollouts: Any, **changes: Any) -> dict[str, Any]:
    members = list(rollouts) or [rollout(), rollout()]
    return {"group_id": "g.1", "env": "math", "prompt_id": "p1", "planned_size": 4, "rollouts": members} | changes


def without(record: dict[str, Any], name: str) -> dict[str, Any]:
    return {k: v for k, v in record.items() if k != name}


def refusal(values: Any) -> str:
    with pytest.raises(InvalidRollout) as caught:
        group_from_dict(values)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_every_field_of_group_and_rollout_can_be_given_as_json() -> None:
    full = rollout(
        rollout_id="r1",
        rewards={"format": 0.5},
        successes={"solved": True},
        turns=[["user", 0, 1], {"role": "assistant", "start": 1, "end": 3, "reward": 0.5, "metadata": {"k": [1]}}],
        finish_reason="stop",
        is_truncated=False,
        columns={"entropy": [0.5, 1, 2], "experts": [[1, 2], [3, 4], [5, 6]], "seen": [True, False, True]},
        attachments={"image": [[[0, 255]]], "big": [2**40], "scale": 1.5},
        text="π",
        metadata={"difficulty": 3},
        name="main",
        further=[{"tokens": [1, 7], "loss_mask": [False, True], "logprobs": [0, -1], "version_spans": [[4, 1, 2]]}],
    )
    values = group(
        full,
        adapter="l",
        answer=["42"],
        metadata={"split": "train"},
        needs=["ref_logprobs"],
        worker="w",
        created=5,
        seconds=1.5,
    )
    assert set(values) == Group.__dataclass_fields__.keys()
    assert {
        *full,
        "failure",
    } == Rollout.__dataclass_fields__.keys()
    made = group_from_line(json.dumps(values))
    (r,) = made.rollouts
    assert (made.group_id, made.env, made.planned_size, made.answer, made.needs) == (
        "g.1",
        "math",
        4,
        ["42"],
        ("ref_logprobs",),
    )
    assert (r.rollout_id, r.reward, r.text, r.finish_reason) == ("r1", 1.0, "π", "stop")
    assert r.version_spans == (VersionSpan(4, 1, 3),)
    assert r.turns == (Turn("user", 0, 1), Turn("assistant", 1, 3, 0.5, {"k": [1]}))
    assert {name: (a.dtype.name, a.shape) for name, a in (r.columns | r.attachments).items()} == {
        "entropy": ("float32", (3,)),
        "experts": ("int32", (3, 2)),
        "seen": ("bool", (3,)),
        "image": ("int32", (1, 1, 2)),
        "big": ("int64", (1,)),
        "scale": ("float32", ()),
    }
    assert encode_push(made).info.rollouts[0].size > 0


def test_spans_may_be_objects() -> None:
    spans = [{"policy_version": 4, "start": 1, "end": 3}]
    assert group_from_dict(group(rollout(version_spans=spans))).rollouts[0].version_spans == (VersionSpan(4, 1, 3),)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logprobs": [0.0, None, -0.5]}, "logprobs[1]: expected a number, got null"),
        ({"tokens": "1 2 3"}, 'tokens: expected a number, got "1 2 3"'),
        ({"tokens": [1, "2", 3]}, 'tokens[1]: expected a number, got "2"'),
        ({"tokens": [1, 2**70, 3]}, f"tokens[1]: expected a number, got {2**70}"),
        ({"tokens": [[1, 2], [3]]}, "tokens: nested lists of unequal length"),
        ({"loss_mask": [True, True, True]}, ": column loss_mask: the first token cannot be trained"),
        ({"version_spans": "4"}, 'version_spans: expected a list, got "4"'),
        ({"version_spans": [{"version": 4}]}, "version_spans[0].version: unknown field; did you mean policy_version?"),
        ({"version_spans": [{"policy_version": 4, "start": 1}]}, "version_spans[0].end: missing"),
        ({"turns": {"role": "user"}}, 'turns: expected a list, got {"role": "user"}'),
        ({"columns": [1, 2, 3]}, "columns: expected an object, got [1, 2, 3]"),
        ({"columns": {"entropy": [1, 2]}}, ": column entropy: [2] rows do not match 3 tokens"),
        ({"columns": {"experts": [[1, 2], [3, None], [4, 5]]}}, "columns.experts[1][1]: expected a number, got null"),
        ({"columns": {"who is": [1, 2, 3]}}, ": column name 'who is' is not allowed"),
        ({"attachments": {"image": [float("nan")]}}, ": attachment image: not finite at position 0"),
        ({"tokns": [1]}, "tokns: unknown field; did you mean tokens?"),
    ],
)  # fmt: skip
def test_a_bad_rollout_is_refused_by_its_field(changes: dict[str, Any], message: str) -> None:
    dot = "" if message.startswith(":") else "."
    assert refusal(group(rollout(), rollout(**changes))) == f"rollouts[1]{dot}{message}"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "group: expected an object, got []"),
        (without(group(), "env"), "env: missing"),
        (without(group(), "planned_size"), "planned_size: missing"),
        (group(rollouts=None), "rollouts: expected a list, got null"),
        (group(planned_size=1), "rollouts: 2 are more than planned_size = 1"),
        (group(reward=1.0), "reward: unknown field; did you mean created?"),
        (
            group(zzz=1),
            f"zzz: unknown field; known are {', '.join(sorted(Group.__dataclass_fields__))}",
        ),
        (group(without(rollout(), "tokens")), "rollouts[0].tokens: missing"),
        (group(rollout(rollout_id="r"), rollout(rollout_id="r")), "rollouts: id 'r' occurs twice in group g.1"),
    ],
)
def test_a_bad_group_is_refused_by_its_field(values: Any, message: str) -> None:
    assert refusal(values) == message


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{'a': 1}",
        '{"group_id": "a"',
        '{"group_id": "a',
        b'{"group_id": \n',
        b"\xff\xfe{}",
        "[" * 100_000,
        "9" * 5000,
        '{"env": "a", "env": "b"}',
        "3",
        '{"env": "a"}',
    ],
)
def test_a_line_that_is_no_group_is_refused_with_the_reason(line: str | bytes) -> None:
    with pytest.raises(InvalidRollout):
        group_from_line(line)


def test_nan_written_as_json_is_refused_and_not_stored_as_none() -> None:
    line = json.dumps(group(rollout(reward=float("nan"))))
    assert "NaN" in line
    with pytest.raises(InvalidRollout, match=r"^rollouts\[0\]: reward: expected a finite number, got nan$"):
        group_from_line(line)


@pytest.mark.parametrize("value", [{(1, 2): 3}, [10**5000]], ids=["a key that JSON lacks", "a huge number"])
def test_a_value_that_json_cannot_say_is_refused_all_the_same(value: Any) -> None:
    assert refusal(group(rollout(tokens=value))).startswith("rollouts[0].tokens")
