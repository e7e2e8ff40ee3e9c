"""Hashes by which two ranks, or two runs, show that they trained on the same bytes and hold the same parameters."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np

from rlbuffer.batches import MicroBatch, Step

if TYPE_CHECKING:
    from torch import nn

ARRAYS = (
    "input_ids",
    "position_ids",
    "cu_seqlens",
    "loss_mask",
    "advantages",
    "logprobs",
    "targets",
    "sample_index",
)
"""Arrays of a micro-batch in the order in which they are hashed; its columns follow, by name."""


def digest_step(step: Step) -> str:
    """SHA-256 (hex) of all arrays of all of this rank's micro-batches, in order.

    Names, dtypes and shapes count too. A trainer that resumes sees the same digests again for the steps that it
    replays (at the same world size).
    """
    digest = hashlib.sha256()
    for micro_batch in step:
        _add_micro_batch(digest, micro_batch)
    return digest.hexdigest()


def digest_parameters(module: nn.Module) -> str:
    """SHA-256 (hex) of the bytes of all parameters, by name."""
    import torch

    digest = hashlib.sha256()
    for name, parameter in sorted(module.named_parameters()):
        digest.update(name.encode())
        flat = parameter.detach().contiguous().cpu().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _add_micro_batch(digest: Any, micro_batch: MicroBatch) -> None:
    for name in ARRAYS:
        _add_array(digest, name, getattr(micro_batch, name))
    for name in sorted(micro_batch.columns):
        _add_array(digest, f"columns.{name}", micro_batch.columns[name])


def _add_array(digest: Any, name: str, array: Any) -> None:
    values = np.ascontiguousarray(array)
    digest.update(f"{name}:{values.dtype.str}:{values.shape};".encode())
    digest.update(values.reshape(-1).view(np.uint8).data)
