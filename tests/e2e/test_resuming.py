"""A job that was killed trains its steps again: the same bits on as many ranks, the same rollouts on others."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from homes import Home
from parameters import load_parameters

from rlbuffer.records.step_digest import digest_step
from rlbuffer.records.step_plan import Normalizers

pytestmark = pytest.mark.timeout(900)
"""A machine may be many times as slow as this one."""

CHECKPOINT, KILLED_AT, LAST = 2, 3, 4
COMPARED = ("loss", "grad_norm", "learning_rate", "entropy", "kl", "clip_fraction", "parameters_sha256", "batch_sha256")
LOSS = """\
import random

import numpy as np
import torch


def loss(tokens, options):
    noise = torch.rand_like(tokens.logprobs)
    for _ in range(len(noise)):  # ranks draw different amounts
        random.random(), np.random.random()
    return -tokens.advantages * tokens.ratio * (noise + random.random() + np.random.random())
"""


def tensors(output: Path) -> dict[str, torch.Tensor]:
    """Parameters and optimizer state at the end, by name."""
    found = {
        f"{of}.{name}": t for of in ("policy", "optimizer") for name, t in load_parameters(output, LAST, of=of).items()
    }
    assert any(name.endswith("exp_avg_sq") for name in found)
    return found


def test_a_killed_job_ends_with_the_bits_of_one_that_was_never_stopped(home: Home) -> None:
    """Takes a minute: three jobs of two ranks and one of three, one after the other, under a loss that draws."""
    (home.path / "drawing.py").write_text(LOSS)
    config = home.config(steps=LAST, world_size=2, checkpoint_every=CHECKPOINT, keep_checkpoints=50)
    config.write_text(config.read_text().replace("[trainer]\n", '[trainer]\nloss = { name = "drawing:loss" }\n'))
    home.start_sources(config)
    straight = home.start("train", "--config", config, "--world-size", "2", log="train")
    assert home.ended(straight, 240) == 0, home.logs()
    for worker in home.processes[1:3]:
        worker.send_signal(signal.SIGKILL)

    again, elsewhere = home.path / "again", home.path / "elsewhere"
    arguments = ("train", "--config", config, "--output", again, "--world-size", "2")
    killed = home.start(*arguments, log="killed")
    home.wait_until(lambda: len(home.metrics(folder=again)) >= KILLED_AT, seconds=120, why=f"step {KILLED_AT}")
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait(timeout=30)
    folder = f"checkpoints/step-{CHECKPOINT:08d}"
    shutil.copytree(again / folder, elsewhere / folder)
    assert home.ended(home.start(*arguments, log="resumed"), 240) == 0, home.logs()

    expected, ours = tensors(home.path / "runs" / "tiny"), tensors(again)
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[name], expected[name]) for name in expected)
    undisturbed = {record["step"]: record for record in home.metrics()}
    records = home.metrics(folder=again)
    assert {record["resumed_from"] for record in records} == {0, CHECKPOINT}
    assert sorted({record["step"] for record in records}) == list(range(1, LAST + 1))
    for record in records:
        assert {k: record[k] for k in COMPARED} == {k: undisturbed[record["step"]][k] for k in COMPARED}

    other = home.start("train", "--config", config, "--output", elsewhere, "--world-size", "3", log="three")
    assert home.ended(other, 240) == 0, home.logs()
    theirs = home.metrics(folder=elsewhere)
    assert [record["step"] for record in theirs] == list(range(CHECKPOINT + 1, LAST + 1))
    two = {step: record["batch_sha256"] for step, record in undisturbed.items() if step > CHECKPOINT}
    three = {record["step"]: record["batch_sha256"] for record in theirs}
    contents = contents_of(home, 2, two)
    assert contents == contents_of(home, 3, three) == contents_of(home, 8, dict.fromkeys(two))
    with home.connect() as buffer:
        # What the trainers told the archive is what metrics.jsonl has, both lines of a step that was trained twice too.
        sent = [record for _, record in buffer.store.read_history("0-0", of="records").records]
        recorded = [*home.metrics(), *records, *theirs]
        assert [(r["step"], r["loss"]) for r in sent] == [(r["step"], r["loss"]) for r in recorded]
        assert {name for r in sent for name in r} == {name for r in recorded for name in r} - {"examples"}
    assert home.call("verify", "--run", "tiny").returncode == 0


def contents_of(
    home: Home, world_size: int, recorded: dict[int, list[str] | None]
) -> dict[int, tuple[set[tuple[str, float]], Normalizers]]:
    """step -> every (rollout, advantage) over all ranks, and the normalisers, as undisturbed readers hold them.

    What they hold is what the ranks recorded, where there were as many.
    """
    steps: dict[int, tuple[set[tuple[str, float]], Normalizers]] = {}
    with home.connect() as buffer:
        readers = [buffer.reader(rank, world_size) for rank in range(world_size)]
        for reader in readers:
            reader.start(CHECKPOINT)
        for number, digests in recorded.items():
            parts = [reader.pull(number) for reader in readers]
            assert digests is None or [digest_step(part) for part in parts] == digests
            assert len({len(part) for part in parts}) == 1
            samples = [
                (sample.rollout_id, sample.advantage)
                for part in parts
                for micro_batch in part
                for sample in micro_batch.samples
            ]
            rollouts = [rollout_id for rollout_id, _ in samples if rollout_id]
            assert len(set(rollouts)) == len(rollouts) == parts[0].rollouts
            assert len({part.normalizers for part in parts}) == 1
            steps[number] = {sample for sample in samples if sample[0]}, parts[0].normalizers
        for reader in readers:
            reader.close()
    return steps
