"""Full checkpoints: everything that a run needs to continue exactly, written whole or not at all.

    <output>/checkpoints/step-00000050/state.pt     model, optimizer, random states, the reader's place
                                       meta.json    step, world size, sha256 and size of state.pt

A checkpoint is written under a temporary name, flushed to the disk and renamed. The newest that reads back correctly
counts. It does not depend on the world size: parameters, optimizer state and random states are equal on all ranks.
All hosts must see the same directory.
"""

from __future__ import annotations

import json
import pickle
import random
import re
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlbuffer.errors import CheckpointError
from rlbuffer.weights.disk import flush, sha256_of

FORMAT = 1
"""Version of the layout; another one is refused."""
_NAME = re.compile(r"step-(\d{8,})\Z")
_TEMPORARY = ".tmp-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The trainer's whole state after a step."""

    step: int
    """Last trained step; 0 for none."""
    updates: int
    """Optimizer updates made; the schedule's place."""
    model: Mapping[str, torch.Tensor]
    optimizer: Mapping[str, Any]
    reader: Mapping[str, Any]
    """``Reader.state_dict()``."""
    world_size: int
    """When it was written, for the record."""
    run: str
    """Name of the run whose steps were trained."""
    random: Mapping[str, Any] = field(default_factory=dict)
    """As :func:`random_state` gives it."""


def path_of(directory: Path, step: int) -> Path:
    """Where the checkpoint of `step` is."""
    return directory / f"step-{step:08d}"


def steps(directory: Path) -> list[int]:
    """Steps of the complete checkpoints, ascending."""
    if not directory.is_dir():
        return []
    found = (_NAME.match(path.name) for path in directory.iterdir() if (path / "meta.json").is_file())
    return sorted(int(match[1]) for match in found if match)


def save(directory: Path, checkpoint: Checkpoint, *, keep: int) -> list[int]:
    """Writes a checkpoint, then removes all but the `keep` newest up to it. -> steps kept, ascending.

    Checkpoints of later steps belong to an attempt that this one has replaced; they are removed too.

    Raises:
        CheckpointError: the filesystem refused.
    """
    temporary = directory / f"{_TEMPORARY}{uuid.uuid4().hex}"
    final = path_of(directory, checkpoint.step)
    try:
        temporary.mkdir(parents=True)
        state = temporary / "state.pt"
        torch.save(
            {
                "step": checkpoint.step,
                "updates": checkpoint.updates,
                "model": dict(checkpoint.model),
                "optimizer": dict(checkpoint.optimizer),
                "reader": dict(checkpoint.reader),
                "random": dict(checkpoint.random),
                "world_size": checkpoint.world_size,
                "run": checkpoint.run,
            },
            state,
        )
        meta = {
            "format": FORMAT,
            "step": checkpoint.step,
            "world_size": checkpoint.world_size,
            "run": checkpoint.run,
            "size": state.stat().st_size,
            "sha256": sha256_of(state),
        }
        (temporary / "meta.json").write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
        for path in (state, temporary / "meta.json", temporary):
            flush(path)
        if final.exists():
            shutil.rmtree(final)
        temporary.rename(final)
        flush(directory)
        for step in steps(directory):
            if step > checkpoint.step:
                shutil.rmtree(path_of(directory, step), ignore_errors=True)
        for step in steps(directory)[:-keep]:
            shutil.rmtree(path_of(directory, step), ignore_errors=True)
        for path in directory.glob(f"{_TEMPORARY}*"):
            shutil.rmtree(path, ignore_errors=True)
    except (OSError, RuntimeError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"the checkpoint of step {checkpoint.step} cannot be written to {final}: {error}"
        ) from error
    return steps(directory)


def newest(directory: Path) -> tuple[int, list[str]]:
    """Step of the newest checkpoint that is whole, 0 when there is none; and what is wrong with newer ones."""
    problems: list[str] = []
    for step in reversed(steps(directory)):
        try:
            _verify(path_of(directory, step))
        except CheckpointError as error:
            problems.append(str(error))
            continue
        return step, problems
    return 0, problems


def load(directory: Path, step: int, *, run: str) -> Checkpoint:
    """The checkpoint of `step`, on the CPU.

    Raises:
        CheckpointError: it is missing, damaged, of another format, or of another run.
    """
    path = path_of(directory, step)
    _verify(path)
    try:
        values = torch.load(path / "state.pt", map_location="cpu", weights_only=True)
        checkpoint = Checkpoint(**values)
    except (OSError, RuntimeError, TypeError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path / 'state.pt'} cannot be loaded: {error}") from error
    if checkpoint.run != run:
        raise CheckpointError(f"{path} belongs to run {checkpoint.run!r}, not {run!r}: use another trainer.output")
    return checkpoint


def load_parameters(output: Path, step: int) -> dict[str, torch.Tensor]:
    """The model's parameters in the checkpoint of `step` under a trainer's output folder: for comparing two runs.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    path = path_of(output / "checkpoints", step)
    _verify(path)
    model: dict[str, torch.Tensor] = torch.load(path / "state.pt", map_location="cpu", weights_only=True)["model"]
    return model


def random_state() -> dict[str, Any]:
    """The states of torch's, numpy's and Python's generators, as tensors and plain values."""
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": [str(name), [int(k) for k in keys], int(position), int(has_gauss), float(cached)],
        "python": [int(version), list(internal), gauss],
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Puts the generators back to where :func:`random_state` found them."""
    torch.set_rng_state(state["torch"])
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _verify(path: Path) -> None:
    try:
        meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
        size = (path / "state.pt").stat().st_size
        if meta.get("format") != FORMAT:
            raise CheckpointError(f"{path} has format {meta.get('format')}, this version reads {FORMAT}")
        if size != meta.get("size"):
            raise CheckpointError(f"{path / 'state.pt'} has {size} bytes, {meta.get('size')} were written")
        if sha256_of(path / "state.pt") != meta.get("sha256"):
            raise CheckpointError(f"{path / 'state.pt'} is damaged: its sha256 is not the one in meta.json")
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
