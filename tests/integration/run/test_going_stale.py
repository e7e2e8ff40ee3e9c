"""`rlbuffer doctor` on a run of which much is sampled for nothing."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from store_runs import Run

from rlbuffer.run.run_checks import LEAST_PUSHED, on_run


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(f"memory://{uuid.uuid4().hex}", tmp_path)
    made.lead()
    made.store.heartbeat("batcher", "leader", {})
    yield made
    made.close()


def test_an_env_whose_rollouts_go_stale_is_named_with_the_worker_of_most(run: Run) -> None:
    for i in range(LEAST_PUSHED // 8):
        run.push(f"math.{i}", size=8, worker=f"w-{min(i % 4, 2)}")
        if i % 4 == 2:
            assert list(on_run(run.store, opened=0.0)) == []  # too few of them, so far
            run.drop("stale", [entry for entry in run.pool() if entry.group_id == f"math.{i}"])
    run.push("code.0", size=LEAST_PUSHED)
    (warning,) = on_run(run.store, opened=0.0)
    text = "24% of the rollouts that env math pushed went stale; of the last 6 groups 6 came from w-2"
    assert (warning.text, warning.verdict, warning.subject) == (text, "warning", "run")
    assert warning.fix == (
        "rlbuffer inspect --workers says who is versions behind; where nobody is, workers outrun the trainer: "
        "start fewer, or raise batcher.max_age"
    )
