"""A step as several updates: `passes` over all of it, each of `updates_per_pass` consecutive slices.

A slice is a run of micro-steps, so it holds as many micro-batches on every rank, and it is an update of its own: it is
divided by its own counts over all ranks. They are exchanged here, because a rank knows only its own part of the step.

A planner sorts rows by cost, so the first slice of a step holds its longest rollouts, the last one its shortest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
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
    tokens of a damaged rollout are in no slice's count. A rollout counts where its first sequence lies.
    """
    parts = min(updates_per_pass, len(step))
    out: list[Slice] = []
    for first, last in pairwise([len(step) * i // parts for i in range(parts + 1)] if parts else []):
        cut = step.micro_batches[first:last]
        counts = cut[0].normalizers if parts == 1 else _counts(cut, ranks, step.groups)
        made = cut if parts == 1 else tuple(replace(m, normalizers=counts) for m in cut)
        out.append(Slice(start=first, micro_batches=made, normalizers=counts))
    return tuple(out)


def _counts(micro_batches: Sequence[MicroBatch], ranks: Ranks, groups: int) -> Normalizers:
    """Counts over all ranks. `groups` is the step's number of groups: no rank has more."""
    samples = [sample for micro_batch in micro_batches for sample in micro_batch.samples]
    names = sorted({_number(sample.group_id) for sample in samples})
    tokens = sum(int(micro_batch.loss_mask.sum()) for micro_batch in micro_batches)
    row = torch.zeros(2 + groups, dtype=torch.int64)
    row[0], row[1] = tokens, sum(sample.sequence == 0 for sample in samples)
    row[2 : 2 + len(names)] = torch.tensor(names, dtype=torch.int64)
    rows = ranks.gather(row)
    named = set(rows[:, 2:].flatten().tolist()) - {0}
    return Normalizers(loss_tokens=int(rows[:, 0].sum()), rollouts=int(rows[:, 1].sum()), groups=len(named))


def _number(group_id: str) -> int:
    """A group's name as a number above 0 that fits an int64."""
    return 1 + (int.from_bytes(hashlib.blake2b(group_id.encode(), digest_size=8).digest(), "little") >> 2)
