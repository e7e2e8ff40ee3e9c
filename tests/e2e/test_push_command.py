"""`rlbuffer push FILE.jsonl`: whole files or nothing, and the same file twice is the same pushes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from homes import Home


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


def test_pushing_a_file_twice_stores_it_once(home: Home) -> None:
    path = home.path / "g.jsonl"
    path.write_text("".join(json.dumps(line(i)) + "\n" for i in range(3)))
    first = home.call("push", path)
    assert first.returncode == 0, first.stderr
    assert "3 stored" in first.stdout + first.stderr
    with home.connect("default") as buffer:
        before = buffer.ledger()
    assert before.envs["math"].pushed == (6, 24)
    second = home.call("push", path)
    assert second.returncode == 0, second.stderr
    assert "3 duplicate" in second.stdout + second.stderr
    with home.connect("default") as buffer:
        assert buffer.ledger() == before
        assert buffer.verify().ok
    assert home.call("verify").returncode == 0


def test_a_file_with_one_bad_line_stores_nothing(home: Home) -> None:
    path = home.path / "bad.jsonl"
    path.write_text(json.dumps(line(0)) + "\n" + json.dumps(line(1, reward=float("nan"))) + "\n")
    result = home.call("push", path)
    assert result.returncode == 1, result.stdout + result.stderr
    message = result.stderr.strip()
    assert len(message.splitlines()) == 1
    assert f"{path.name}:2" in message
    assert "reward" in message
    with home.connect("default") as buffer:
        assert buffer.ledger().envs == {}


def recorded(home: Home, *versions: int) -> Path:
    """A file of groups as another run recorded them, one of each version."""
    path = home.path / "recorded.jsonl"
    lines = [line(i) for i in range(len(versions))]
    for one, version in zip(lines, versions, strict=True):
        spans = {"version_spans": [[version, 2, 3], [version + 1, 3, 4]]}
        one["rollouts"] = [rollout | spans for rollout in one["rollouts"]]
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return path


def versions_of(home: Home, count: int) -> list[set[int]]:
    with home.connect("default") as buffer:
        groups = [buffer.group(f"g{i}") for i in range(count)]
    return [{version for m in group.members for version in (m.min_version, m.max_version)} for group in groups]


def at_version(home: Home, version: int) -> None:
    with home.connect("default") as buffer:
        buffer.reader().start()
        buffer.policy().announce(version, location="", size=0, checksum="")


def test_versions_that_the_run_has_not_made_or_left_behind_are_said_at_push(home: Home) -> None:
    at_version(home, 6)
    result = home.call("push", recorded(home, 0, 1, 5, 8, 9))
    assert result.returncode == 0, result.stderr
    (said,) = result.stderr.strip().splitlines()
    assert all(part in said for part in ("2 groups", "9 to 10", "future", "0 to 1", "stale", "version 6"))
    assert versions_of(home, 5)[4] == {9, 10}
    assert home.call("push", recorded(home, 5)).stderr == "", "it is the run's own"


@pytest.mark.parametrize(("given", "becomes"), [("current", 3), ("2", 2)])
def test_recorded_groups_may_be_pushed_as_of_a_version_of_this_run(home: Home, given: str, becomes: int) -> None:
    at_version(home, 3)
    result = home.call("push", recorded(home, 4, 40), "--version", given)
    assert result.returncode == 0, result.stderr
    assert versions_of(home, 2) == [{becomes}, {becomes}]
    assert ("stale" in result.stderr, "future" in result.stderr) == (True, False)
