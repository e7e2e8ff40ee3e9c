"""Ranks that hold a part of every tensor (FSDP2) train what ranks with the whole model (DDP) train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import stream_ranks
import torch
from forked import Parent
from parameters import load_parameters
from safetensors.torch import load_file
from test_ddp import records, settings_of, start

from rlbuffer.trainer.fake import FakeRun
from rlbuffer.trainer.loop import train
from rlbuffer.weights.layout import versions

pytestmark = pytest.mark.timeout(900)
"""A machine may be many times as slow as this one."""


def relative(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """L2 norm of the difference over that of `theirs`."""
    assert ours.keys() == theirs.keys()
    difference = torch.cat([(ours[name] - theirs[name]).reshape(-1) for name in theirs]).norm()
    return float(difference / torch.cat([tensor.reshape(-1) for tensor in theirs.values()]).norm())


def finish(processes: list[Any]) -> None:
    for process in processes:
        _, errors = process.communicate(timeout=400)
        assert (process.returncode, errors) == (0, "")


def published(output: Path, version: int) -> dict[str, torch.Tensor]:
    (directory,) = versions(output / "weights")[version]
    return load_file(directory / "model.safetensors")


def test_sharded_ranks_train_publish_and_checkpoint_what_whole_ones_do(parent: Parent, tmp_path: Path) -> None:
    """Takes a minute or two: jobs of two ranks for every way of sharding, and again from their checkpoints."""
    ways: dict[str, dict[str, Any]] = {
        "ddp": {},
        "fsdp": {"parallel": "fsdp"},
        "padded": {"parallel": "fsdp", "layout": "padded", "gradient_checkpointing": True},
    }
    # Two updates a step: those after the first look at the policy as it was before, in further forward passes.
    many = {"optimizer": {"passes": 2}, "loss": {"old_logprobs": "recomputed", "entropy_bonus": 0.01}}
    # Three ranks hold unequal parts of most tensors.
    sizes = {"ddp": 2, "fsdp": 3, "padded": 2}
    finish([start(parent, tmp_path / name, sizes[name], dtype="float64", **many, **way) for name, way in ways.items()])
    expected = load_parameters(tmp_path / "ddp", 3)
    for name in ("fsdp", "padded"):
        assert relative(load_parameters(tmp_path / name, 3), expected) < 1e-9
        for version in (0, 3):
            ours, theirs = published(tmp_path / name, version), published(tmp_path / "ddp", version)
            assert "lm_head.weight" not in ours
            assert relative(ours, theirs) < 1e-9
        for ours, theirs in zip(records(tmp_path / name), records(tmp_path / "ddp"), strict=True):
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-9)
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-9)
            assert len(set(ours["parameters_sha256"])) == 1

    # Either way goes on from the other's checkpoint, also with another number of ranks.
    goes_on = start(parent, tmp_path / "ddp", 3, dtype="float64", steps=5, parallel="fsdp", **many)
    alone = settings_of(tmp_path / "fsdp", dtype="float64", steps=5, **many)
    assert train(alone, rank=0, world_size=1, source=FakeRun)
    finish([goes_on])
    for name in ("ddp", "fsdp"):
        assert [r["resumed_from"] for r in records(tmp_path / name)] == [0, 0, 0, 3, 3]
    for of in ("policy", "optimizer"):
        ours, theirs = (load_parameters(tmp_path / name, 5, of=of) for name in ("ddp", "fsdp"))
        assert relative(ours, theirs) < 1e-9


def test_sharded_ranks_train_an_adapter_as_whole_ones_do(parent: Parent, tmp_path: Path) -> None:
    ways = {"ddp": {}, "fsdp": {"parallel": "fsdp"}}
    lora = {"rank": 4, "targets": ["q_proj", "down_proj"]}
    finish([start(parent, tmp_path / name, 2, dtype="float64", lora=lora, **way) for name, way in ways.items()])
    for of in ("policy", "optimizer"):
        ours, theirs = (load_parameters(tmp_path / name, 3, of=of) for name in ("fsdp", "ddp"))
        assert all(".lora_" in name for name in ours)
        assert relative(ours, theirs) < 1e-9
    (directory,) = versions(tmp_path / "fsdp" / "weights")[3]
    (other,) = versions(tmp_path / "ddp" / "weights")[3]
    adapters = [load_file(folder / "adapter_model.safetensors") for folder in (directory, other)]
    assert relative(adapters[0], adapters[1]) < 1e-9
    bases = [[path.name for path in (tmp_path / name / "weights").glob("base-*")] for name in ways]
    assert len(bases[0]) == 1
    assert bases[0] == bases[1]


def publishing(parent: Parent, folder: Path, way: str) -> list[Any]:
    """The ranks of :mod:`stream_ranks`."""
    return [
        parent.start(
            [stream_ranks.__file__, str(rank), str(folder), way], environment=parent.environment, folder=folder
        )
        for rank in range(stream_ranks.WORLD_SIZE)
    ]


def test_every_rank_hears_that_rank_0_has_no_reader(parent: Parent, tmp_path: Path) -> None:
    finish(publishing(parent, tmp_path, "forgotten"))


@pytest.mark.parametrize("way", ["shared", "sharded"])
def test_behind_a_stream_every_rank_publishes_and_rank_0_writes(parent: Parent, tmp_path: Path, way: str) -> None:
    finish(publishing(parent, tmp_path, way))
    whole = torch.load(tmp_path / "whole")
    state = load_file(Path((tmp_path / "published").read_text()) / "model.safetensors")
    assert state.keys() | {"lm_head.weight"} == whole.keys()  # tied to the embedding
    assert all(torch.equal(tensor, whole[name]) for name, tensor in state.items())
