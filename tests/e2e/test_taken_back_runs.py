"""A run that has made all its steps, is taken back, and is trained again: by `train` alone and by `run`."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from homes import Home

pytestmark = pytest.mark.timeout(900)
"""A machine may be many times as slow as this one."""
STEPS, KEPT = 3, 1


@pytest.mark.parametrize("command", ["train", "run"])
def test_a_finished_trainer_trains_the_steps_that_were_taken_back_or_says_what_to_do(home: Home, command: str) -> None:
    config = home.config(steps=STEPS, world_size=1, checkpoint_every=1, keep_checkpoints=50)
    workers = home.start_sources(config) if command == "train" else []
    file: tuple[str | Path, ...] = (config,) if command == "run" else ("--config", config)
    arguments: tuple[str | Path, ...] = (command, *file, "--display", "plain")
    ended = home.call(*arguments, timeout=400)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert [home.ended(worker, 120) for worker in workers] == [0] * len(workers), home.logs()
    again = home.call(*arguments, timeout=400)
    assert again.returncode == 0, again.stdout + again.stderr
    assert [record["step"] for record in home.metrics()] == [1, 2, 3], "a finished trainer trains nothing"

    void = home.call("runs", "rewind", str(KEPT), "--keep-pending", "--yes", "--force", "--config", config)
    assert void.returncode == 0, void.stdout + void.stderr

    refused = home.call(*arguments, timeout=400)
    assert refused.returncode == 6, refused.stdout + refused.stderr
    said = " ".join((refused.stdout + refused.stderr).split())
    assert f"the trainer resumes after step {STEPS}, but run 'tiny' ends at step {KEPT}" in said
    assert said.count("move later ones away, or use another run name") == 1
    assert "starting it again" not in refused.stdout

    for step in range(KEPT + 1, STEPS + 1):
        shutil.move(home.path / f"runs/tiny/checkpoints/step-{step:08d}", home.path / f"old-{step}")
    if command == "train":
        home.start_workers(config)  # the others have left behind the trainer's last step
    trained = home.call(*arguments, timeout=400)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    assert [record["step"] for record in home.metrics()] == [1, 2, 3, 2, 3]
    with home.connect() as buffer:
        assert buffer.verify().ok
        assert buffer.store.trainer().trained == STEPS
