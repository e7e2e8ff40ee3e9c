"""Full checkpoints: everything that a run needs to continue exactly, written whole or not at all.

    <output>/checkpoints/step-00000050/__0_0.distcp ...   parameters and optimizer state; each rank writes its part
                                       .metadata          torch's index of them
                                       random-0.json ...  random states, those of each rank
                                       meta.json          place, size and sha256 of the others

Tensors go through ``torch.distributed.checkpoint``: a checkpoint of any number of ranks, holding all of the model or
parts of it, loads at any other. It is written under a temporary name, flushed to the disk and renamed; the newest
that reads back correctly counts. All hosts must see the same directory.

A loss may draw random numbers, and ranks draw different amounts. So each rank goes on with its own states.
At another world size rank r goes on with those of rank r mod W, of the W ranks that wrote the checkpoint.
"""

from __future__ import annotations

import json
import random
import re
import secrets
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from rlbuffer.errors import CheckpointError
from rlbuffer.process.files import flush, rename_for_good, sha256_of
from rlbuffer.process.ranks import Ranks
from rlbuffer.trainer.checkpoints.reading import CheckpointReader, PlainValues
from rlbuffer.trainer.model.packed_policy import PackedPolicy
from rlbuffer.weights.state import tied_names

CHECKPOINT_FORMAT = 3
"""Version of the layout; another one is refused."""
ALONE = Ranks(0, 1, torch.device("cpu"))
_META = "meta.json"
_NAME = re.compile(r"step-(\d{8,})\Z")
_TEMPORARY = ".tmp-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The trainer's place after a step: all of its state but tensors. JSON types."""

    step: int
    """Last trained step; 0 for none."""
    reader: Mapping[str, Any]
    """``Reader.state_dict()``: step, epoch, digest, what was trained last."""
    world_size: int
    """Ranks at the time of writing: so many have left random states."""
    run: str
    """Name of the run whose steps were trained."""


def path_of(directory: Path, step: int) -> Path:
    """The folder of the checkpoint of `step`."""
    return directory / f"step-{step:08d}"


def steps(directory: Path) -> list[int]:
    """Steps of the complete checkpoints, ascending."""
    if not directory.is_dir():
        return []
    matches = (_NAME.match(path.name) for path in directory.iterdir() if (path / _META).is_file())
    return sorted(int(match[1]) for match in matches if match)


def save(
    directory: Path,
    checkpoint: Checkpoint,
    policy: PackedPolicy,
    optimizer: torch.optim.Optimizer,
    *,
    keep: int,
    ranks: Ranks = ALONE,
) -> list[int]:
    """Writes a checkpoint, then removes all but the `keep` newest up to it. -> steps kept, ascending.

    All ranks call it, and write at the same time. Checkpoints of later steps belong to an attempt that this one has
    replaced; they are removed too.

    Raises:
        CheckpointError: the filesystem refused, on this rank or on another one.
    """
    final = path_of(directory, checkpoint.step)
    temporary = directory / f"{_TEMPORARY}{ranks.first(secrets.randbits(62)):016x}"
    error: Exception | CheckpointException | None = None
    try:
        temporary.mkdir(parents=True, exist_ok=True)
    except OSError as refused:
        error = refused
    _together(ranks, error, checkpoint.step, final)
    try:
        with _alone(ranks.world_size == 1) as options:
            save_tensors(_tensors(policy, optimizer), checkpoint_id=temporary, **options)
        _random_of(temporary, ranks.rank).write_text(json.dumps(random_state()), encoding="utf-8")
        mine = [path for path in temporary.iterdir() if _rank_of(path) == ranks.rank]
        listed = {path.name: {"size": path.stat().st_size, "sha256": sha256_of(path)} for path in mine}
        (temporary / f"files-{ranks.rank}.json").write_text(json.dumps(listed), encoding="utf-8")
    except (OSError, RuntimeError, CheckpointException) as refused:
        error = refused
    _together(ranks, error, checkpoint.step, final, temporary)
    if ranks.rank == 0:
        try:
            _finish(temporary, final, checkpoint, keep)
        except OSError as refused:
            error = refused
    _together(ranks, error, checkpoint.step, final, temporary)
    return steps(directory)


def _finish(temporary: Path, final: Path, checkpoint: Checkpoint, keep: int) -> None:
    """Finishes a checkpoint on rank 0, once every rank has written its part."""
    files: dict[str, Any] = {}
    for part in sorted(temporary.glob("files-*.json")):
        files |= json.loads(part.read_text(encoding="utf-8"))
        part.unlink()
    meta = {"format": CHECKPOINT_FORMAT, "files": files} | asdict(checkpoint)
    (temporary / _META).write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")
    for path in (*temporary.iterdir(), temporary):
        flush(path)
    if final.exists():
        shutil.rmtree(final)
    rename_for_good(temporary, final)
    for step in steps(final.parent):
        if step > checkpoint.step:
            shutil.rmtree(path_of(final.parent, step), ignore_errors=True)
    for step in steps(final.parent)[:-keep]:
        shutil.rmtree(path_of(final.parent, step), ignore_errors=True)
    for path in final.parent.glob(f"{_TEMPORARY}*"):
        shutil.rmtree(path, ignore_errors=True)


def _rank_of(path: Path) -> int | None:
    """The rank that wrote a file; torch's index counts as rank 0's."""
    if path.name == ".metadata":
        return 0
    match = re.match(r"(?:__(\d+)_\d+\.distcp|random-(\d+)\.json)\Z", path.name)
    return int(match[1] or match[2]) if match else None


def _random_of(path: Path, rank: int) -> Path:
    return path / f"random-{rank}.json"


def _together(ranks: Ranks, error: BaseException | None, step: int, final: Path, temporary: Path | None = None) -> None:
    """Fails on all ranks if one has failed, so that none waits for it."""
    failed = ranks.gather(torch.tensor([int(error is not None)], dtype=torch.int64))[:, 0].nonzero()[:, 0].tolist()
    if not failed:
        return
    if temporary is not None and ranks.rank == 0:
        shutil.rmtree(temporary, ignore_errors=True)
    why = f"rank {failed[0]} could not write its part" if error is None else str(error)
    raise CheckpointError(f"the checkpoint of step {step} cannot be written to {final}: {why}") from error


def _tensors(policy: PackedPolicy, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The trained tensors and the optimizer's state, by parameter name; a tied tensor stands under its first name."""
    model, state = get_state_dict(policy, optimizer, options=_OPTIONS)
    for name in tied_names(policy):
        model.pop(name, None)
    return {"policy": model, "optimizer": state}


@contextmanager
def _alone(is_alone: bool) -> Iterator[dict[str, bool]]:
    """Options of torch's save and load. One process has nobody to agree with: torch warns of that option itself."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield {"no_dist": is_alone}


_OPTIONS = StateDictOptions(ignore_frozen_params=True, strict=False)
"""Frozen parameters (all but a LoRA adapter's) are those of the model that the run began with."""


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
    """The place in the checkpoint of `step`; :func:`newest` has verified it, :func:`restore` loads its tensors.

    Raises:
        CheckpointError: it cannot be read, or is of another format or run.
    """
    path = path_of(directory, step)
    meta = _read_meta(path)
    try:
        checkpoint = Checkpoint(**{field.name: meta[field.name] for field in fields(Checkpoint)})
    except KeyError as error:
        raise CheckpointError(f"{path / _META} cannot be loaded: {error}") from error
    if checkpoint.run != run:
        raise CheckpointError(f"{path} belongs to run {checkpoint.run!r}, not {run!r}: use another trainer.output")
    return checkpoint


def restore(path: Path, policy: PackedPolicy, optimizer: torch.optim.Optimizer, *, ranks: Ranks = ALONE) -> None:
    """Loads parameters and optimizer state into `policy` and `optimizer`, in place. All ranks call it.

    Raises:
        CheckpointError: it is of another model, or holds more than tensors and plain values.
    """
    tensors = _tensors(policy, optimizer)
    try:
        reader = CheckpointReader(path)
        known = reader.read_metadata().state_dict_metadata
        own = {f"policy.{name}" for name in tensors["policy"]}
        differing = sorted(own ^ {name for name in known if name.startswith("policy.")})
        if differing:
            raise ValueError(f"it is of another one: {', '.join(differing[:3])}")
        with _alone(ranks.world_size == 1) as options:
            load_tensors(tensors, storage_reader=reader, planner=PlainValues(), **options)
        set_state_dict(
            policy,
            optimizer,
            model_state_dict=tensors["policy"],
            optim_state_dict=tensors["optimizer"],
            options=_OPTIONS,
        )
    except (OSError, RuntimeError, ValueError, KeyError, CheckpointException) as error:
        reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
        raise CheckpointError(f"{path} cannot be loaded into the model that [model] describes: {reason}") from error


def restore_random_state(path: Path, checkpoint: Checkpoint, *, rank: int) -> None:
    """Puts this process's generators to where those of its rank were, or of the rank that it goes on for.

    Raises:
        CheckpointError: there are no such states.
    """
    file = _random_of(path, rank % max(1, checkpoint.world_size))
    try:
        set_random_state(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error


def load_parameters(output: Path, step: int, *, of: str = "policy") -> dict[str, torch.Tensor]:
    """The parameters in the checkpoint of `step` under a trainer's output folder: for comparing two runs.

    Args:
        of: ``policy`` | ``optimizer``: whose tensors.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    path = path_of(output / "checkpoints", step)
    _verify(path)
    reader = CheckpointReader(path)
    kept = reader.read_metadata().state_dict_metadata
    tensors: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in kept.items()
        if isinstance(entry, TensorStorageMetadata) and name.startswith(f"{of}.")
    }
    with _alone(True) as options:
        load_tensors(tensors, storage_reader=reader, planner=PlainValues(), **options)
    return {name.removeprefix(f"{of}."): tensor for name, tensor in tensors.items()}


def random_state() -> dict[str, Any]:
    """The states of torch's, numpy's and Python's generators, as JSON types."""
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "numpy": [str(name), [int(k) for k in keys], int(position), int(has_gauss), float(cached)],
        "python": [int(version), list(internal), gauss],
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state().numpy().tobytes().hex()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Puts the generators back to where :func:`random_state` found them."""
    torch.set_rng_state(_bytes(state["torch"]))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_bytes(state["cuda"]))


def _bytes(text: str) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(bytes.fromhex(text), dtype=np.uint8).copy())


def _read_meta(path: Path) -> dict[str, Any]:
    try:
        meta: dict[str, Any] = json.loads((path / _META).read_text(encoding="utf-8"))
        written_format = meta.get("format")
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if written_format != CHECKPOINT_FORMAT:
        raise CheckpointError(f"{path} has format {written_format}, this version reads {CHECKPOINT_FORMAT}")
    return meta


def _verify(path: Path) -> None:
    """Compares every file with what was written."""
    try:
        for name, written in _read_meta(path)["files"].items():
            size = (path / name).stat().st_size
            if size != written["size"]:
                raise CheckpointError(f"{path / name} has {size} bytes, {written['size']} were written")
            if sha256_of(path / name) != written["sha256"]:
                raise CheckpointError(f"{path / name} is damaged: its sha256 is not the one in {_META}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
