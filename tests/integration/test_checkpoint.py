"""A checkpoint is whole or absent, and a run that continues from one is the run that was never stopped."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlbuffer.errors import CheckpointError
from rlbuffer.settings import RunSettings
from rlbuffer.trainer import checkpoint
from rlbuffer.trainer.checkpoint import Checkpoint, load, load_parameters, newest, path_of, save, steps
from rlbuffer.trainer.loop import train
from rlbuffer.trainer.stopping import StopRequest
from rlbuffer.weights.model import TINY_QWEN3


def made(step: int, **fields: Any) -> Checkpoint:
    values: dict[str, Any] = {
        "step": step,
        "updates": step,
        "model": {"weight": torch.full((2, 2), float(step))},
        "optimizer": {"state": {0: {"step": torch.tensor(1.0)}}, "param_groups": [{"params": [0], "lr": 0.1}]},
        "reader": {"step": step, "epoch": 1, "digest": "ab"},
        "world_size": 2,
        "run": "r",
        "random": checkpoint.random_state(),
    }
    return Checkpoint(**(values | fields))


def test_a_checkpoint_reads_back_as_it_was_written(tmp_path: Path) -> None:
    assert save(tmp_path, made(7), keep=2) == [7]
    loaded = load(tmp_path, 7, run="r")
    assert torch.equal(loaded.model["weight"], torch.full((2, 2), 7.0))
    assert (loaded.step, loaded.updates, loaded.world_size) == (7, 7, 2)
    assert loaded.reader == {"step": 7, "epoch": 1, "digest": "ab"}
    assert loaded.optimizer["param_groups"] == [{"params": [0], "lr": 0.1}]


def test_the_newest_are_kept(tmp_path: Path) -> None:
    kept = [save(tmp_path, made(step), keep=2) for step in (3, 6, 9)]
    assert kept == [[3], [3, 6], [6, 9]]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000006", "step-00000009"]


def test_writing_an_earlier_step_removes_what_a_replaced_attempt_left(tmp_path: Path) -> None:
    save(tmp_path, made(9), keep=3)
    assert save(tmp_path, made(4), keep=3) == [4]


def test_half_a_checkpoint_does_not_count(tmp_path: Path) -> None:
    save(tmp_path, made(3), keep=3)
    (tmp_path / ".tmp-dead").mkdir()
    (tmp_path / "step-00000006").mkdir()
    (tmp_path / "step-00000006" / "state.pt").write_bytes(b"half")
    assert steps(tmp_path) == [3]
    assert newest(tmp_path) == (3, [])


def test_a_damaged_checkpoint_is_passed_over_with_the_reason(tmp_path: Path) -> None:
    for step in (3, 6, 9):
        save(tmp_path, made(step), keep=3)
    longer = path_of(tmp_path, 9) / "state.pt"
    longer.write_bytes(longer.read_bytes() + b"x")
    flipped = path_of(tmp_path, 6) / "state.pt"
    data = bytearray(flipped.read_bytes())
    data[len(data) // 2] ^= 1
    flipped.write_bytes(data)
    step, problems = newest(tmp_path)
    assert step == 3
    assert problems == [
        f"{longer} has {len(data) + 1} bytes, {len(data)} were written",
        f"{flipped} is damaged: its sha256 is not the one in meta.json",
    ]


def test_no_checkpoint_means_step_0(tmp_path: Path) -> None:
    assert newest(tmp_path / "none") == (0, [])


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    save(tmp_path, made(3), keep=1)
    with pytest.raises(CheckpointError) as error:
        load(tmp_path, 3, run="other")
    assert str(error.value) == f"{path_of(tmp_path, 3)} belongs to run 'r', not 'other': use another trainer.output"


def test_a_checkpoint_of_another_format_is_refused(tmp_path: Path) -> None:
    save(tmp_path, made(3), keep=1)
    meta = path_of(tmp_path, 3) / "meta.json"
    meta.write_text(json.dumps(json.loads(meta.read_text()) | {"format": 2}))
    with pytest.raises(CheckpointError, match=r"has format 2, this version reads 1$"):
        load(tmp_path, 3, run="r")


def test_random_states_continue_where_they_were(tmp_path: Path) -> None:
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    random.gauss(0, 1)
    np.random.normal()
    save(tmp_path, made(1), keep=1)

    def draw() -> list[float]:
        return [float(torch.rand(1)), np.random.normal(), np.random.random(), random.gauss(0, 1), random.random()]

    expected = draw()
    draw()
    checkpoint.set_random_state(load(tmp_path, 1, run="r").random)
    assert draw() == expected


def settings(output: Path, **trainer: Any) -> RunSettings:
    values = {"steps": 6, "checkpoint_every": 3, "output": output, "device": "cpu", "record_batches": True}
    return RunSettings(
        home=output,
        batcher={"row_tokens": 128},
        model={"config": dict(TINY_QWEN3)},
        trainer=values | {"warmup_updates": 4, "weight_decay": 0.01} | trainer,
    )


def records(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def test_a_resumed_run_ends_with_the_bits_of_one_that_was_never_stopped(tmp_path: Path) -> None:
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    assert train(settings(whole), rank=0, world_size=1, fake_data=True)

    stop = StopRequest()

    def after_the_fourth(event: dict[str, Any]) -> None:
        if event["event"] == "step" and event["step"] == 4:
            stop.set()

    first = settings(halves)
    assert not train(first, rank=0, world_size=1, fake_data=True, stop=stop, on_event=after_the_fourth)
    assert checkpoint.steps(halves / "checkpoints") == [3, 4]
    # As if it had been killed at step 4, with the checkpoint of step 3.
    (path_of(halves / "checkpoints", 4) / "meta.json").unlink()
    assert train(first, rank=0, world_size=1, fake_data=True)

    expected, ours = load_parameters(whole, 6), load_parameters(halves, 6)
    assert all(torch.equal(ours[name], expected[name]) for name in expected)
    continued = records(halves)
    assert [(r["step"], r["resumed_from"]) for r in continued] == [
        (1, 0),
        (2, 0),
        (3, 0),
        (4, 0),
        (4, 3),
        (5, 3),
        (6, 3),
    ]
    undisturbed = {r["step"]: r for r in records(whole)}
    for record in continued:
        for field in ("batch_sha256", "loss", "grad_norm", "learning_rate", "entropy"):
            assert record[field] == undisturbed[record["step"]][field]


def test_a_run_that_has_made_its_steps_makes_no_more(tmp_path: Path) -> None:
    once = settings(tmp_path, steps=1)
    assert train(once, rank=0, world_size=1, fake_data=True)
    assert train(once, rank=0, world_size=1, fake_data=True)
    assert [r["step"] for r in records(tmp_path)] == [1]


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    once = settings(tmp_path, steps=1)
    train(once, rank=0, world_size=1, fake_data=True)
    other = once.model_copy(
        update={"model": once.model.model_copy(update={"config": dict(TINY_QWEN3, hidden_size=32)})}
    )
    with pytest.raises(CheckpointError, match=r"is of another model than \[model\] describes"):
        train(other, rank=0, world_size=1, fake_data=True)
