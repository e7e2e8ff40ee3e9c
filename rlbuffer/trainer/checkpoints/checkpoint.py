"""Full checkpoints: everything that a run needs to continue exactly, written whole or not at all.

    <output>/checkpoints/step-00000050/rank-0.safetensors ...   parameters, optimizer and random states of each rank
                                       meta.json                place, size and sha256 of the others

Ranks that hold parts of a tensor (FSDP2: some of its rows) write those; of tensors that all of them hold, each writes
some. So a tensor is what the files have of it, one behind the other, and a checkpoint of any number of ranks loads at
any other. It is written under a temporary name, flushed to the disk and renamed; the newest that reads back correctly
counts. All hosts must see the same directory.

A loss may draw random numbers, and ranks draw different amounts. So each rank goes on with its own states.
At another world size rank r goes on with those of rank r mod W, of the W ranks that wrote the checkpoint.
"""

from __future__ import annotations

import json
import os
import random
import re
import secrets
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlbuffer.errors import CheckpointError, OtherCheckpoint
from rlbuffer.process.files import flush, readable_as_others, rename_for_good, sha256_of
from rlbuffer.process.ranks import Ranks
from rlbuffer.process.room import lack_of_room
from rlbuffer.trainer.model.packed_policy import PackedPolicy

CHECKPOINT_FORMAT = 4
"""Version of the layout; another one is refused."""
ALONE = Ranks(0, 1, torch.device("cpu"))
_META = "meta.json"
_NAME = re.compile(r"step-(\d{8,})\Z")
_TEMPORARY = ".tmp-"
_RANDOM = "random"


class OtherFormat(OtherCheckpoint):
    """A checkpoint that another version of rlbuffer wrote."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The trainer's place after a step: all of its state but tensors and random states. JSON types."""

    step: int
    """Last trained step; 0 for none."""
    reader: Mapping[str, Any]
    """``Reader.state_dict()``: step, epoch, digest, what was trained last."""
    run: str
    """Name of the run whose steps were trained."""
    learning_rate: float
    """Of the last update."""


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
    if ranks.rank == 0:  # what a killed save has left may be the room that this one needs; the others have no name yet
        for left in directory.glob(f"{_TEMPORARY}*"):
            shutil.rmtree(left, ignore_errors=True)
    temporary = directory / f"{_TEMPORARY}{ranks.first(secrets.randbits(62)):016x}"
    written: dict[str, Any] = {}
    try:
        temporary.mkdir(parents=True, exist_ok=True)
        file = _file_of(temporary, ranks.rank)
        save_file(_own(policy, optimizer, ranks), file, {_RANDOM: json.dumps(random_state())})
        readable_as_others(file)
        flush(file)
        written = {file.name: {"size": file.stat().st_size, "sha256": sha256_of(file)}}
    except (OSError, SafetensorError) as refused:
        written = {"error": f"rank {ranks.rank}: {refused}", "lack": lack_of_room(refused)}
    files = _written(ranks, written, final, temporary)
    written = {}
    if ranks.rank == 0:
        try:
            _finish(temporary, final, {"format": CHECKPOINT_FORMAT, "files": files} | asdict(checkpoint), keep)
        except OSError as refused:
            written = {"error": str(refused), "lack": lack_of_room(refused)}
    _written(ranks, written, final, temporary)
    return steps(directory)


def _written(ranks: Ranks, written: Mapping[str, Any], final: Path, temporary: Path) -> dict[str, Any]:
    """What all ranks wrote. Fails on all if one has failed, so that none waits for it."""
    files: dict[str, Any] = {}
    for text in reversed(ranks.gather_text(json.dumps(written))):
        files |= json.loads(text)
    if "error" in files:
        if ranks.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        lack = OSError(files["lack"], os.strerror(files["lack"])) if files["lack"] else None
        raise CheckpointError(f"the checkpoint cannot be written to {final}: {files['error']}") from lack
    return files


def _finish(temporary: Path, final: Path, meta: Mapping[str, Any], keep: int) -> None:
    """Finishes a checkpoint on rank 0, once every rank has written its part."""
    (temporary / _META).write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")
    flush(temporary / _META)
    flush(temporary)
    if final.exists():
        shutil.rmtree(final)
    rename_for_good(temporary, final)
    there = steps(final.parent)
    kept = [step for step in there if step <= meta["step"]][-keep:]
    for step in there:
        if step not in kept:
            shutil.rmtree(path_of(final.parent, step), ignore_errors=True)


def _file_of(path: Path, rank: int) -> Path:
    return path / f"rank-{rank}.safetensors"


def _trained(policy: nn.Module) -> dict[str, nn.Parameter]:
    """The trained parameters; a tied one under its first name. Frozen ones are those that the run began with."""
    return {name: parameter for name, parameter in policy.named_parameters() if parameter.requires_grad}


def _own(policy: PackedPolicy, optimizer: torch.optim.Optimizer, ranks: Ranks) -> dict[str, Tensor]:
    """What this rank writes: its rows of sharded tensors, and its share of whole ones."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in _trained(policy).items():
        tensors[f"policy.{name}"] = parameter.detach()
        tensors |= {f"optimizer.{name}.{key}": value for key, value in optimizer.state.get(parameter, {}).items()}
    return {
        name: (tensor.to_local() if isinstance(tensor, DTensor) else tensor).contiguous().cpu()
        for i, (name, tensor) in enumerate(tensors.items())
        if isinstance(tensor, DTensor) or i % ranks.world_size == ranks.rank
    }


def newest(directory: Path, ranks: Ranks = ALONE) -> tuple[int, list[str]]:
    """Step of the newest checkpoint that is whole, 0 when there is none; and what is wrong with newer ones.

    All ranks call it, and each reads a share of the files: one rank alone would take longer for those of a large model
    than the others wait for it. What rank 0 finds in the directory counts.

    Raises:
        CheckpointError: one is of another format, or not there for a rank. It may be whole, and saving would remove it.
    """
    problems: list[str] = []
    listed = steps(directory) if ranks.rank == 0 else []
    for step in reversed(json.loads(ranks.gather_text(json.dumps(listed))[0])):
        path, wrong, is_final = path_of(directory, step), "", False
        try:
            _verify(path, ranks)
        except CheckpointError as error:
            # Whole elsewhere, it would be passed over, and removed by the first save after an older one.
            is_missing = not os.access(path / _META, os.R_OK)
            wrong = f"rank {ranks.rank} does not see it: {error}" if is_missing else str(error)
            is_final = is_missing or isinstance(error, OtherFormat)
        found = [json.loads(text) for text in ranks.gather_text(json.dumps([is_final, wrong]))]
        for is_final, wrong in found:
            if is_final:
                raise CheckpointError(wrong)
        problem = next((wrong for _, wrong in found if wrong), "")
        if not problem:
            return step, problems
        problems.append(problem)
    return 0, problems


def load(directory: Path, step: int, *, run: str) -> Checkpoint:
    """The place in the checkpoint of `step`; :func:`newest` has verified it, :func:`restore` loads the rest.

    Raises:
        CheckpointError: it cannot be read, or is of another format or run.
    """
    path = path_of(directory, step)
    meta = _read_meta(path)
    checkpoint = Checkpoint(**{field.name: meta[field.name] for field in fields(Checkpoint)})
    if checkpoint.run != run:
        raise OtherCheckpoint(f"{path} belongs to run {checkpoint.run!r}, not {run!r}: use another trainer.output")
    return checkpoint


class _Tensors:
    """The tensors in a checkpoint's files."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        count = len(_read_meta(path)["files"])
        self._files = [stack.enter_context(safe_open(_file_of(path, rank), framework="pt")) for rank in range(count)]
        self.random = [json.loads(file.metadata()[_RANDOM]) for file in self._files]
        """The random states of each rank."""
        self._holders: dict[str, list[Any]] = {}
        for file in self._files:
            names: list[str] = file.keys()
            for name in names:
                self._holders.setdefault(name, []).append(file)

    def names(self, prefix: str) -> set[str]:
        """Those that begin with `prefix`, without it."""
        return {name.removeprefix(prefix) for name in self._holders if name.startswith(prefix)}

    def whole(self, name: str) -> Tensor:
        """All of a tensor."""
        parts = [file.get_tensor(name) for file in self._holders[name]]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def copy_to(self, name: str, target: Tensor) -> None:
        """Copies a tensor into `target`; of one that is sharded, the rows that this rank has.

        Raises:
            ValueError: it has another shape.
        """
        if not target.dim():
            target.copy_(self.whole(name))
            return
        parts = [file.get_slice(name) for file in self._holders[name]]
        shapes = [part.get_shape() for part in parts]
        shape = [sum(rows for rows, *_ in shapes), *shapes[0][1:]]
        if shape != [*target.shape]:
            raise ValueError(f"{name} has shape {shape} there, {[*target.shape]} here")
        local, first = target, 0
        if isinstance(target, DTensor):
            local, mesh = target.to_local(), target.device_mesh
            first = -(-len(target) // mesh.size()) * mesh.get_local_rank()  # in equal parts, but for the last ones
        for part, (rows, *_) in zip(parts, shapes, strict=True):
            start, end = max(0, first), min(rows, first + len(local))
            if start < end:
                local[start - first : end - first].copy_(part[start:end])
            first -= rows


@torch.no_grad()
def restore(path: Path, policy: PackedPolicy, optimizer: torch.optim.Optimizer, *, rank: int = 0) -> None:
    """Loads parameters, optimizer state and random states, those of this rank or of the one that it goes on for.

    Raises:
        CheckpointError: it is of another model.
    """
    try:
        with ExitStack() as stack:
            tensors, trained = _Tensors(path, stack), _trained(policy)
            _copy_parameters(tensors, trained)
            for name in sorted(tensors.names("optimizer.")):
                of, _, key = name.rpartition(".")
                if key == "step":
                    optimizer.state[trained[of]][key] = tensors.whole(f"optimizer.{name}")
                    continue
                state = optimizer.state[trained[of]][key] = torch.empty_like(trained[of])
                tensors.copy_to(f"optimizer.{name}", state)
            set_random_state(tensors.random[rank % len(tensors.random)])
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise OtherCheckpoint(f"{path} cannot be loaded into the model that [model] describes: {error}") from error


def _copy_parameters(tensors: _Tensors, trained: Mapping[str, nn.Parameter]) -> None:
    differing = sorted(trained.keys() ^ tensors.names("policy."))
    if differing:
        raise ValueError(f"it is of another one: {', '.join(differing[:3])}")
    for name, parameter in trained.items():
        tensors.copy_to(f"policy.{name}", parameter)


@torch.no_grad()
def restore_policy(path: Path, policy: PackedPolicy) -> None:
    """Loads the parameters alone, to look at what they say. Raises CheckpointError: it is of another model."""
    try:
        with ExitStack() as stack:
            _copy_parameters(_Tensors(path, stack), _trained(policy))
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise OtherCheckpoint(f"{path} cannot be loaded into the model that [model] describes: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Two checkpoints beside each other, parameters and optimizer alike."""

    tensors: int
    same: int
    """Those of the same bits."""
    largest: float
    """Largest difference of a parameter, relative to the largest absolute value of its tensor."""


def difference(one: Path, other: Path) -> Difference:
    """Compares two checkpoints. Raises CheckpointError where they cannot be read, or are of different models."""
    try:
        with ExitStack() as stack:
            a, b = _Tensors(one, stack), _Tensors(other, stack)
            names = a.names("")
            if differing := sorted(names ^ b.names("")):
                raise ValueError(f"{other} is of another model: {', '.join(differing[:3])}")
            same, largest = 0, 0.0
            for name in names:
                x, y = a.whole(name), b.whole(name)
                same += torch.equal(x, y)
                if name.startswith("policy."):
                    scale = x.double().abs().max().clamp(min=1e-30)
                    largest = max(largest, float((x.double() - y.double()).abs().max() / scale))
            return Difference(tensors=len(names), same=same, largest=largest)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise OtherCheckpoint(f"{one} cannot be compared: {error}") from error


def random_state() -> dict[str, Any]:
    """The states of torch's, numpy's and Python's generators, as JSON types."""
    name, keys, *rest = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state().tolist(),
        "cuda": torch.cuda.get_rng_state().tolist() if torch.cuda.is_available() else None,
        "numpy": [name, np.asarray(keys).tolist(), *rest],
        "python": random.getstate(),
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Puts the generators back to where :func:`random_state` found them."""
    torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.tensor(state["cuda"], dtype=torch.uint8))
    np.random.set_state(tuple(state["numpy"]))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))


def _read_meta(path: Path) -> dict[str, Any]:
    try:
        meta: dict[str, Any] = json.loads((path / _META).read_text(encoding="utf-8"))
        written_format = meta.get("format")
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if written_format != CHECKPOINT_FORMAT:
        raise OtherFormat(
            f"{path} has format {written_format}, this version reads {CHECKPOINT_FORMAT}: go on with the version that "
            "wrote it, or use another trainer.output"
        )
    return meta


def _verify(path: Path, ranks: Ranks) -> None:
    """Compares the files that are this rank's to read with what was written."""
    try:
        for name, written in [*_read_meta(path)["files"].items()][ranks.rank :: ranks.world_size]:
            size = (path / name).stat().st_size
            if size != written["size"]:
                raise CheckpointError(f"{path / name} has {size} bytes, {written['size']} were written")
            if sha256_of(path / name) != written["sha256"]:
                raise CheckpointError(f"{path / name} is damaged: its sha256 is not the one in {_META}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
