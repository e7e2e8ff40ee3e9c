"""A step that other ranks were planned for: what each rank then trains."""

from __future__ import annotations

import pytest
from store_runs import Run

from rlbuffer.client.step_pull import StepPull
from rlbuffer.packing.planner import redeal
from rlbuffer.records.step_plan import Plan
from rlbuffer.store.payloads import Trainable

pytest_plugins = ("store_fixtures",)

PLANNED = 8


@pytest.mark.parametrize(("groups", "group_size"), [(8, 2), (5, 3)], ids=["full", "dummies"])
@pytest.mark.parametrize("world_size", [1, 3, 16])
def test_a_rank_of_another_world_size_has_the_rows_that_redeal_gives_to_it(
    run: Run, world_size: int, groups: int, group_size: int
) -> None:
    for n in range(groups):
        run.push(f"a.{n}", size=group_size)
    header = run.step(world_size=PLANNED)
    parts = run.store.read_parts(1)
    ids = [[tuple(p.rollouts[i].info.rollout_id for i in row) for (row,) in p.rows] for p in parts]
    planned = Plan(
        rows=tuple(tuple((row,) for row in step) for step in zip(*ids, strict=True)),
        world_size=PLANNED,
        row_tokens=parts[0].row_tokens,
    )
    for rank in range(world_size):
        pull = StepPull(run.store, rank, world_size, Trainable(), pad_token_id=0, pad_to_multiple_of=1)
        part = pull.part(header)
        named = [tuple(tuple(part.rollouts[i].info.rollout_id for i in row) for row in rows) for rows in part.rows]
        assert named == [step[rank] for step in redeal(planned, world_size).rows]
