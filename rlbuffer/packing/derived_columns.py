"""Derived columns: the arrays of a micro-batch that follow from its tokens, its segments and its samples.

Together they take 28 bytes a token beside the 9 of the stored ones, so each is written when it is asked for. What they
need of the rollouts is kept here, and the payloads are not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlbuffer.packing.arena import Allocate, Arena, aligned
from rlbuffer.records.micro_batch import MicroBatch, Sample
from rlbuffer.records.rollout import Rollout, RolloutArrays

_DTYPES: dict[str, Any] = {
    "position_ids": np.int32,
    "advantages": np.float32,
    "targets": np.int64,
    "sample_index": np.int32,
    "policy_versions": np.int64,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemFacts:
    """The facts of a rank's rollouts that derived columns and samples follow from; each sequence has one of each."""

    spans: Sequence[Sequence[Sequence[int]]]
    """(policy version, start, end) of every stretch that was sampled; () of a rollout that is missing or damaged."""
    advantages: Sequence[float]
    own_advantages: Mapping[int, NDArray[Any]]
    """Rollout -> its own column of them, which wins."""
    samples: Callable[[Sequence[int]], Callable[[], tuple[Sample, ...]]]
    """Takes numbers of rollouts, and makes a function that makes their records; it keeps no payload of others."""


def own_advantages(rollouts: Mapping[int, Rollout | RolloutArrays]) -> dict[int, NDArray[Any]]:
    """`ItemFacts.own_advantages` of these rollouts: copies, because payloads are not kept."""
    return {i: np.array(its.columns["advantages"]) for i, its in rollouts.items() if "advantages" in its.columns}


class DerivedColumns:
    """Writes the derived columns of one micro-batch, each into its own part of one block of memory."""

    __slots__ = (
        "_advantages",
        "_arena",
        "_ignore_index",
        "_items",
        "_lengths",
        "_new",
        "_own_advantages",
        "_samples",
        "_spans",
    )

    def __init__(
        self, lengths: Sequence[int], items: Sequence[int], facts: ItemFacts, ignore_index: int, arena: Arena | None
    ) -> None:
        """One length and one item a segment: the number of its rollout, -1 for padding. Of `facts` those of its own
        rollouts are kept: who keeps one micro-batch keeps no payload of another."""
        self._lengths = lengths
        self._items = items
        own = facts.own_advantages
        self._spans = [facts.spans[item] if item >= 0 else () for item in items]
        self._advantages = [facts.advantages[item] if item >= 0 else 0.0 for item in items]
        self._own_advantages = {i: own[item] for i, item in enumerate(items) if item in own} if own else {}
        self._samples = facts.samples([item for item in items if item >= 0])
        self._ignore_index = ignore_index
        self._arena = arena
        self._new: Allocate | None = None

    def __call__(self, micro_batch: MicroBatch, name: str) -> Any:
        """The column `name`, [T], or the samples."""
        if name == "samples":
            return self._samples()
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
        number = count()
        owners = [next(number) if item >= 0 else -1 for item in self._items]
        out[:] = np.repeat(np.array(owners, out.dtype), self._lengths)

    def _write_advantages(self, out: NDArray[Any], micro_batch: MicroBatch) -> None:
        """The sample's advantage on trained tokens; a column ``advantages`` of the rollout wins."""
        out[:] = np.repeat(np.array(self._advantages, out.dtype), self._lengths)
        for i, own in self._own_advantages.items():
            start = micro_batch.cu_seqlens[i]
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
