"""Headers of steps that were never committed."""

from __future__ import annotations

from dataclasses import replace

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
