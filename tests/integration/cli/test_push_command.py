"""`rlbuffer push FILE.jsonl`: whole files or nothing, and the same file twice is the same pushes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from store_runs import Run

import rlbuffer

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def push(run: Run, typed: Call) -> Call:
    return lambda *arguments: typed("push", *map(str, arguments), "--redis", run.url, "--run", run.store.run)


def line(index: int, **changes: Any) -> dict[str, Any]:
    rollout = {
        "tokens": [1, 2, 3, 4],
        "loss_mask": [False, False, True, True],
        "logprobs": [0.0, 0.0, -0.5, -0.25],
        "reward": 0.5,
        "version_spans": [[0, 2, 4]],
    }
    group = {"group_id": f"g{index}", "env": "math", "prompt_id": f"p{index}", "planned_size": 2}
    return group | {"rollouts": [rollout | changes, rollout | {"reward": 1.0}]}


def written(*lines: dict[str, Any]) -> Path:
    path = Path("groups.jsonl")
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return path


def test_pushing_a_file_twice_stores_it_once(run: Run, push: Call) -> None:
    path = written(*(line(i) for i in range(3)))
    code, out, _ = push(path)
    assert (code, "3 stored" in out) == (0, True)
    before = run.store.ledger()
    assert before.envs["math"].pushed == (6, 24)
    code, out, _ = push(path)
    assert (code, "3 duplicate" in out) == (0, True)
    assert run.store.ledger() == before
    assert run.store.verify().ok


def test_a_file_with_one_bad_line_stores_nothing(run: Run, push: Call) -> None:
    path = written(line(0), line(1, reward=float("nan")))
    code, _, err = push(path)
    assert code == 1
    (message,) = err.strip().splitlines()
    assert f"{path.name}:2" in message
    assert "reward" in message
    assert run.store.ledger().envs == {}


def recorded(*versions: int) -> Path:
    """A file of groups as another run recorded them, one of each version."""
    lines = [line(i) for i in range(len(versions))]
    for one, version in zip(lines, versions, strict=True):
        spans = {"version_spans": [[version, 2, 3], [version + 1, 3, 4]]}
        one["rollouts"] = [rollout | spans for rollout in one["rollouts"]]
    return written(*lines)


def versions_of(buffer: rlbuffer.Buffer, count: int) -> list[set[int]]:
    groups = [buffer.group(f"g{i}") for i in range(count)]
    return [{version for m in group.members for version in (m.min_version, m.max_version)} for group in groups]


def at_version(buffer: rlbuffer.Buffer, version: int) -> None:
    buffer.reader().start()
    buffer.policy().announce(version, location="", size=0, checksum="")


def test_versions_that_the_run_has_not_made_or_left_behind_are_said_at_push(
    buffer: rlbuffer.Buffer, push: Call
) -> None:
    at_version(buffer, 6)
    code, _, err = push(recorded(0, 1, 5, 8, 9))
    assert code == 0
    (said,) = err.strip().splitlines()
    assert all(part in said for part in ("2 groups", "9 to 10", "future", "0 to 1", "stale", "version 6"))
    assert versions_of(buffer, 5)[4] == {9, 10}
    assert push(recorded(5))[2] == "", "it is the run's own"


@pytest.mark.parametrize(("given", "becomes"), [("current", 3), ("2", 2)])
def test_recorded_groups_may_be_pushed_as_of_a_version_of_this_run(
    buffer: rlbuffer.Buffer, push: Call, given: str, becomes: int
) -> None:
    at_version(buffer, 3)
    code, _, err = push(recorded(4, 40), "--version", given)
    assert code == 0
    assert versions_of(buffer, 2) == [{becomes}, {becomes}]
    assert ("stale" in err, "future" in err) == (True, False)
