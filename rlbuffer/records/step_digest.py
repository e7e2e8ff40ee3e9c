"""The digest of what a rank trains in one step, by which a replay is compared bit for bit."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from rlbuffer.records.micro_batch import MicroBatch, Step

HASHED_ARRAYS = (
    "input_ids",
    "position_ids",
    "cu_seqlens",
    "loss_mask",
    "advantages",
    "logprobs",
    "targets",
    "sample_index",
    "policy_versions",
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


def _add_micro_batch(digest: Any, micro_batch: MicroBatch) -> None:
    for name in HASHED_ARRAYS:
        _add_array(digest, name, getattr(micro_batch, name))
    for name in sorted(micro_batch.columns):
        _add_array(digest, f"columns.{name}", micro_batch.columns[name])


def _add_array(digest: Any, name: str, array: Any) -> None:
    values = np.ascontiguousarray(array)
    digest.update(f"{name}:{values.dtype.str}:{values.shape};".encode())
    digest.update(values.reshape(-1).view(np.uint8).data)
