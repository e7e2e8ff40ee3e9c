"""Ranks as real processes, started by the launcher: killed, failing again and again, ended by an error."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forked import Forked, Parent
from homes import parsed

from rlbuffer.config.settings import RunSettings, to_json
from rlbuffer.trainer.checkpoints.checkpoint import steps
from rlbuffer.weights.model import TINY_QWEN3

LAUNCH = """
import sys
from rlbuffer.config.settings import from_json
from rlbuffer.trainer.fake import FakeRun
from rlbuffer.trainer.launch.launcher import launch
sys.exit(launch(from_json(sys.argv[1]), world_size=int(sys.argv[2]), source=FakeRun, max_restarts=1))
"""


def settings_of(output: Path, *, dtype: str = "float32", **trainer: Any) -> RunSettings:
    values: dict[str, Any] = {"steps": 3, "output": output, "device": "cpu", "loss": {"entropy_bonus": 0.01}}
    values["reports"] = {"check_ranks": True}
    return RunSettings(
        home=output,
        batcher={"row_tokens": 128, "micro_batches_per_rank": 2},
        model={"config": dict(TINY_QWEN3), "dtype": dtype},
        trainer=values | trainer,
    )


def start(parent: Parent, output: Path, world_size: int, *, dtype: str = "float32", **trainer: Any) -> Forked:
    arguments = ["-c", LAUNCH, to_json(settings_of(output, dtype=dtype, **trainer)), str(world_size)]
    return parent.start(arguments, environment=parent.environment, folder=output.parent)


def records(output: Path) -> list[dict[str, Any]]:
    path = output / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [record for record in map(parsed, lines) if record is not None]


def wait_until(what: Callable[[], Any], process: Forked, seconds: float = 400) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        if time.monotonic() > deadline or process.poll() is not None:
            process.kill()
            pytest.fail(f"did not happen; the launcher said: {process.communicate()[1]}")
        time.sleep(0.02)


def test_a_killed_rank_is_started_again_with_the_others_and_sigterm_ends_with_a_checkpoint(
    parent: Parent, tmp_path: Path
) -> None:
    process = start(parent, tmp_path, 2, steps=100_000, checkpoint={"every": 5})
    try:
        wait_until(lambda: len(records(tmp_path)) >= 7, process)
        victim = json.loads((tmp_path / "ranks.json").read_text())["rank-1"]
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: records(tmp_path)[-1]["resumed_from"] >= 5, process)
        replayed = [r for r in records(tmp_path) if r["resumed_from"] >= 5]
        first = replayed[0]
        assert first["step"] == first["resumed_from"] + 1
        before = [r for r in records(tmp_path) if r["step"] == first["step"] and r["resumed_from"] == 0]
        assert all(r["parameters_sha256"] == first["parameters_sha256"] for r in before)

        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=400)
    finally:
        process.kill()
    assert process.returncode == 130
    assert errors.splitlines() == [
        "Rank 1 was killed by SIGKILL.",
        "Starting all 2 ranks again from the newest checkpoint (restart 1 of 1).",
    ]
    assert steps(tmp_path / "checkpoints")[-1] == records(tmp_path)[-1]["step"]


def test_an_error_of_our_own_ends_the_job_with_one_message_and_its_exit_code(parent: Parent, tmp_path: Path) -> None:
    process = start(parent, tmp_path, 2, loss={"name": "no_such:loss"})
    _, errors = process.communicate(timeout=400)
    assert process.returncode == 3
    assert errors.startswith("Error: trainer.loss.name = 'no_such:loss' cannot be imported: ModuleNotFoundError")
    assert errors.count("\n") == 1
