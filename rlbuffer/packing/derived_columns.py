"""Derived columns: the arrays of a micro-batch that follow from its tokens, its segments and its samples.

Together they take 28 bytes a token beside the 9 of the stored ones, so each is written when it is asked for. What they
need of the rollouts is kept here, and the payloads are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlbuffer.packing.arena import Allocate, Arena, aligned
from rlbuffer.records.micro_batch import MicroBatch
from rlbuffer.records.rollout import Rollout, RolloutArrays

_DTYPES: dict[str, Any] = {
    "position_ids": np.int32,
    "advantages": np.float32,
    "targets": np.int64,
    "sample_index": np.int32,
    "policy_versions": np.int64,
}


class DerivedColumns:
    """Writes the derived columns of one micro-batch, each into its own part of one block of memory."""

    __slots__ = ("_advantages", "_arena", "_ignore_index", "_lengths", "_new", "_owners", "_spans")

    def __init__(
        self,
        lengths: Sequence[int],
        rollouts: Sequence[Rollout | RolloutArrays | None],
        owners: Sequence[int],
        ignore_index: int,
        arena: Arena | None,
    ) -> None:
        """One length, rollout and owner a segment: None and -1 for padding, None for a damaged rollout."""
        self._lengths = lengths
        self._owners = owners
        self._ignore_index = ignore_index
        self._arena = arena
        self._new: Allocate | None = None
        self._spans = [() if rollout is None else rollout.version_spans for rollout in rollouts]
        """Empty where there is no rollout: every rollout has one."""
        self._advantages = {
            i: np.array(rollout.columns["advantages"])
            for i, rollout in enumerate(rollouts)
            if rollout is not None and "advantages" in rollout.columns
        }
        """Segment -> its rollout's own column."""

    def __call__(self, micro_batch: MicroBatch, name: str) -> NDArray[Any]:
        """The column `name`, [T]."""
        out = self._empty(micro_batch.length, name)
        writers = {
            "position_ids": self._write_positions,
            "advantages": self._write_advantages,
            "targets": self._write_targets,
            "sample_index": self._write_owners,
            "policy_versions": self._write_versions,
        }
        writers[name](out, micro_batch)
        return out

    def _empty(self, tokens: int, name: str) -> NDArray[Any]:
        if self._new is None:
            size = sum(aligned((tokens,), dtype) for dtype in _DTYPES.values())
            self._new = np.empty if self._arena is None else self._arena.block(size)
        return self._new((tokens,), _DTYPES[name])

    def _write_positions(self, out: NDArray[Any], micro_batch: MicroBatch) -> None:
        ramp = np.arange(max(self._lengths), dtype=out.dtype)
        np.concatenate([ramp[:length] for length in self._lengths], out=out)

    def _write_owners(self, out: NDArray[Any], micro_batch: MicroBatch) -> None:
        out[:] = np.repeat(np.array(self._owners, out.dtype), self._lengths)

    def _write_advantages(self, out: NDArray[Any], micro_batch: MicroBatch) -> None:
        """The sample's advantage on trained tokens; a column ``advantages`` of the rollout wins."""
        samples = micro_batch.samples
        values = [samples[owner].advantage if owner >= 0 else 0.0 for owner in self._owners]
        out[:] = np.repeat(np.array(values, out.dtype), self._lengths)
        for i, own in self._advantages.items():
            start = int(micro_batch.cu_seqlens[i])
            out[start : start + len(own)] = own
        np.multiply(out, micro_batch.loss_mask, out=out)
        np.add(out, np.float32(0), out=out)  # a negative advantage times an untrained token is -0.0

    def _write_versions(self, out: NDArray[Any], micro_batch: MicroBatch) -> None:
        """The policy version that sampled each token; -1 where none did."""
        out.fill(-1)
        for start, spans in zip(micro_batch.cu_seqlens.tolist(), self._spans, strict=False):
            for version, first, end in spans:
                out[start + first : start + end] = version

    def _write_targets(self, out: NDArray[Any], micro_batch: MicroBatch) -> None:
        """The next token inside the same rollout; `ignore_index` at each end and where there is no rollout."""
        bounds = micro_batch.cu_seqlens
        out[:-1] = micro_batch.input_ids[1:]
        out[bounds[1:] - 1] = self._ignore_index
        for i, spans in enumerate(self._spans):
            if not spans:
                out[bounds[i] : bounds[i + 1]] = self._ignore_index
