"""Tensors of a trainer's checkpoint, whole: for comparing two runs."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from rlbuffer.trainer.checkpoints.checkpoint import path_of


def load_parameters(output: Path, step: int, *, of: str = "policy") -> dict[str, Tensor]:
    """Those of the `policy`, or of the `optimizer`, after `step`, by name."""
    files = sorted(path_of(output / "checkpoints", step).glob("rank-*.safetensors"))
    parts: dict[str, list[Tensor]] = {}
    for file in files:
        for name, tensor in load_file(file).items():
            parts.setdefault(name, []).append(tensor)
    whole = {name: tensors[0] if len(tensors) == 1 else torch.cat(tensors) for name, tensors in parts.items()}
    return {name.removeprefix(f"{of}."): whole[name] for name in sorted(whole) if name.startswith(f"{of}.")}
