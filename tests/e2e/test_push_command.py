"""`rlbuffer push FILE.jsonl`: whole files or nothing, and the same file twice is the same pushes."""

from __future__ import annotations

import json
from collections.abc import Callable
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


BROKEN: dict[str, tuple[Callable[[], str], str]] = {
    "nan reward": (lambda: json.dumps(line(1, reward=float("nan"))), "reward"),
    "unequal columns": (lambda: json.dumps(line(1, logprobs=[0.0, -0.5])), "logprobs"),
    "negative version": (lambda: json.dumps(line(1, version_spans=[[-1, 2, 4]])), "version"),
    "100 MB rollout": (lambda: json.dumps(line(1, text="x" * 100_000_000)), "rollouts"),
    "not json": (lambda: '{"group_id": "g1", ', "JSON"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_file_with_one_bad_line_stores_nothing(home: Home, case: str) -> None:
    content, word = BROKEN[case]
    path = home.path / "bad.jsonl"
    path.write_text(json.dumps(line(0)) + "\n" + content() + "\n")
    result = home.call("push", path)
    assert result.returncode == 1, result.stdout + result.stderr
    message = result.stderr.strip()
    assert len(message.splitlines()) == 1
    assert f"{path.name}:2" in message
    assert word in message
    with home.connect("default") as buffer:
        assert buffer.ledger().envs == {}
