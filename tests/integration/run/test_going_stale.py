"""`rlbuffer doctor` on a run of which much is sampled for nothing."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from store_runs import Run

from rlbuffer.checks.check import Level
from rlbuffer.checks.server import stands_still
from rlbuffer.client.stale_pushes import LEAST_PUSHED


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
            assert list(stands_still(run.store, opened=0.0)) == []  # too few of them, so far
            run.drop("stale", [entry for entry in run.pool() if entry.group_id == f"math.{i}"])
    run.push("code.0", size=LEAST_PUSHED)
    (warning,) = stands_still(run.store, opened=0.0)
    assert warning.level is Level.WARNING
    assert all(part in warning.text for part in ("24%", "env math", "of the last 6 groups 6 came from w-2"))
