"""Steps that were never committed, and headers of such."""

from __future__ import annotations

from dataclasses import replace

from rlbuffer.records.micro_batch import MicroBatch, Step
from rlbuffer.records.states import ClosedBy
from rlbuffer.records.step_header import StepHeader


def header_of(**fields: object) -> StepHeader:
    """A header of step 1, with other values."""
    empty = StepHeader(
        step=1,
        epoch=1,
        digest="d",
        previous_digest="",
        world_size=1,
        normalizers={},
        rollouts=8,
        sequences=8,
        tokens=1,
        group_ids=("a", "b"),
        closed_by=ClosedBy.GROUPS,
        fill=1.0,
        envs={},
        reward=0.5,
        age=0.0,
        max_age=0,
        committed_ms=1,
        columns={},
    )
    return replace(empty, **fields)  # type: ignore[arg-type]


def step_of(*micro_batches: MicroBatch, **fields: object) -> Step:
    """Step 1 of one rank, counted as its first micro-batch is, or with other values."""
    values: dict[str, object] = {"number": 1, "epoch": 1, "digest": "", "world_size": 1, "rollouts": 2, "groups": 1}
    counts = micro_batches[0].normalizers if micro_batches else None
    return Step(**{**values, "micro_batches": micro_batches, "normalizers": counts, **fields})  # type: ignore[arg-type]
