"""A step as several updates: `passes` over all of it, each of `updates_per_pass` consecutive slices.

A slice is a run of micro-steps, so it holds as many micro-batches on every rank, and it is an update of its own: it is
divided by its own counts over all ranks. They are exchanged here, because a rank knows only its own part of the step.

A planner sorts rows by cost, so the first slice of a step holds its longest rollouts, the last one its shortest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from rlbuffer.process.ranks import Ranks
from rlbuffer.records.micro_batch import MicroBatch, Step
from rlbuffer.records.step_plan import Normalizers


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """The micro-batches that one update trains on, on this rank."""

    start: int
    """Index of its first micro-batch in the step."""
    micro_batches: tuple[MicroBatch, ...]
    normalizers: Normalizers
    """Divisors of this slice, over all ranks."""


def slices_of(step: Step, ranks: Ranks, updates_per_pass: int) -> tuple[Slice, ...]:
    """Cuts a step into at most `updates_per_pass` slices, none of them empty.

    Uncut, a step keeps the counts that were committed with the step. A slice counts what can be read: the trained
    tokens of a damaged rollout are in no slice's count. A rollout counts where its first sequence lies. The number of
    groups stays the step's: no loss divides by it.
    """
    parts = min(updates_per_pass, len(step))
    out: list[Slice] = []
    for first, last in pairwise([len(step) * i // parts for i in range(parts + 1)] if parts else []):
        cut = step.micro_batches[first:last]
        counts = cut[0].normalizers
        if parts > 1:
            samples = [sample for micro_batch in cut for sample in micro_batch.samples]
            tokens = sum(int(micro_batch.loss_mask.sum()) for micro_batch in cut)
            row = torch.tensor([tokens, sum(sample.sequence == 0 for sample in samples)])
            loss_tokens, rollouts = ranks.sum(row).tolist()
            counts = replace(counts, loss_tokens=loss_tokens, rollouts=rollouts)
        made = cut if parts == 1 else tuple(replace(m, normalizers=counts) for m in cut)
        out.append(Slice(start=first, micro_batches=made, normalizers=counts))
    return tuple(out)
