"""Twelve steps in one go, and twelve with a kill -9 after six, end in the same bits."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from homes import Home
from test_replay import start_sources

from rlbuffer.trainer.checkpoints.checkpoint import load_parameters

pytestmark = pytest.mark.timeout(900)
"""A machine may be many times as slow as this one."""

HALF, LAST = 6, 12
COMPARED = ("loss", "grad_norm", "learning_rate", "entropy", "kl", "clip_fraction", "parameters_sha256", "batch_sha256")


def tensors(output: Path) -> dict[str, torch.Tensor]:
    """Parameters and optimizer state at the end, by name."""
    found = {
        f"{of}.{name}": t for of in ("policy", "optimizer") for name, t in load_parameters(output, LAST, of=of).items()
    }
    assert any(name.endswith("exp_avg_sq") for name in found)
    return found


def test_a_killed_run_ends_with_the_bits_of_one_that_was_never_stopped(home: Home) -> None:
    """Takes minutes: three jobs of two ranks and one of three, one after the other."""
    config = home.config(steps=LAST, world_size=2, checkpoint_every=HALF, keep_checkpoints=50)
    start_sources(home, config)
    straight = home.start("train", "--config", config, "--world-size", "2", log="train")
    assert home.ended(straight, 200) == 0, home.logs()
    for worker in home.processes[1:3]:
        worker.send_signal(signal.SIGKILL)

    again, elsewhere = home.path / "again", home.path / "elsewhere"
    arguments = ("train", "--config", config, "--output", again, "--world-size", "2")
    killed = home.start(*arguments, log="killed")
    home.wait_until(lambda: len(home.metrics(folder=again)) > HALF, seconds=120, why=f"step {HALF + 1}")
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait(timeout=30)
    folder = f"checkpoints/step-{HALF:08d}"
    shutil.copytree(again / folder, elsewhere / folder)
    assert home.ended(home.start(*arguments, log="resumed"), 200) == 0, home.logs()

    expected, ours = tensors(home.path / "runs" / "tiny"), tensors(again)
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[name], expected[name]) for name in expected)
    undisturbed = {record["step"]: record for record in home.metrics()}
    records = home.metrics(folder=again)
    assert {record["resumed_from"] for record in records} == {0, HALF}
    assert sorted({record["step"] for record in records}) == list(range(1, LAST + 1))
    for record in records:
        assert {k: record[k] for k in COMPARED} == {k: undisturbed[record["step"]][k] for k in COMPARED}

    # With three ranks sums are made in another order: float32 rounds them otherwise.
    other = home.start("train", "--config", config, "--output", elsewhere, "--world-size", "3", log="three")
    assert home.ended(other, 200) == 0, home.logs()
    theirs = load_parameters(elsewhere, LAST)
    mine = load_parameters(again, LAST)
    difference = torch.cat([(theirs[name] - mine[name]).reshape(-1) for name in mine]).norm()
    assert float(difference / torch.cat([t.reshape(-1) for t in mine.values()]).norm()) < 1e-3
