"""A step as several updates: `passes` over all of it, each of `updates_per_pass` consecutive slices.

A slice is a run of micro-steps, so it holds as many micro-batches on every rank, and it is an update of its own: it is
divided by its own counts over all ranks, so that its weights sum to 1 whatever it holds. The counts are exchanged here,
because a rank knows only its own part of the step.

A planner sorts rows by cost, so the first slice of a step holds its longest rollouts, the last one its shortest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from math import fsum

import torch

from rlbuffer.process.ranks import Ranks
from rlbuffer.records.micro_batch import MicroBatch, Sample, Step
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

    Uncut, a step keeps the counts that were committed with the step. A slice counts what can be read, over all ranks:
    its trained tokens, and of every rollout the share of its trained tokens that lies here. Those shares are what the
    tokens weigh in a mean over rollouts, so a slice's weights sum to its count, a fraction where some sequences of a
    rollout lie in other slices. A rollout of which the step trains nothing (a masked one) counts one in all, as in the
    uncut step: each of its sequences has an equal share. So the slices' counts add up to the step's, less what is
    damaged. The number of groups stays the step's: no loss divides by it.
    """
    parts = min(updates_per_pass, len(step))
    out: list[Slice] = []
    for first, last in pairwise([len(step) * i // parts for i in range(parts + 1)] if parts else []):
        cut = step.micro_batches[first:last]
        counts = cut[0].normalizers
        if parts > 1:
            trained = [
                (sample, int(mask.sum()))
                for micro_batch in cut
                for sample, mask in zip(micro_batch.samples, micro_batch.unpack(micro_batch.loss_mask), strict=True)
            ]
            rollouts = fsum(_share(sample, tokens, step.header.masks_truncated) for sample, tokens in trained)
            row = torch.tensor([sum(tokens for _, tokens in trained), rollouts], dtype=torch.float64)
            loss_tokens, rollouts = ranks.sum(row).tolist()
            counts = replace(counts, loss_tokens=int(loss_tokens), rollouts=rollouts)
        made = cut if parts == 1 else tuple(replace(m, normalizers=counts) for m in cut)
        out.append(Slice(start=first, micro_batches=made, normalizers=counts))
    return tuple(out)


def _share(sample: Sample, tokens: int, masks_truncated: bool) -> float:
    """The share of its rollout that a sequence counts, of which `tokens` are trained: the sum of their weights
    (:func:`~rlbuffer.trainer.losses.total.token_weights`)."""
    if sample.sequences == 1 and tokens:
        return 1.0
    if not sample.rollout_loss_tokens or (masks_truncated and sample.is_truncated):
        return 1.0 / sample.sequences
    return tokens / sample.rollout_loss_tokens
