"""A step that other ranks were planned for: who reads which of its parts, and what each then trains."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from store_runs import Run

from rlbuffer.client.step_pull import StepPull
from rlbuffer.packing.planner import redeal
from rlbuffer.records.step_plan import Plan
from rlbuffer.store.part_rollouts import StepPart
from rlbuffer.store.payloads import Trainable

pytest_plugins = ("store_fixtures",)

PLANNED = 8


@pytest.mark.parametrize(("group_size", "reads_all"), [(2, False), (3, True)])
@pytest.mark.parametrize("world_size", [1, 3, 4, 5, 16])
def test_a_rank_of_another_world_size_reads_the_parts_that_hold_its_rows(
    run: Run, world_size: int, group_size: int, reads_all: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 rollouts fill 16 rows of 8 ranks; 5 groups of 3 leave dummies, whose places stand in all parts only."""
    for n in range(8 if group_size == 2 else 5):
        run.push(f"a.{n}", size=group_size)
    header = run.step(world_size=PLANNED)
    parts = run.store.read_parts(1)
    ids = [[tuple(p.rollouts[i].info.rollout_id for i in row) for (row,) in p.rows] for p in parts]
    planned = Plan(
        rows=tuple(tuple((row,) for row in step) for step in zip(*ids, strict=True)),
        world_size=PLANNED,
        row_tokens=parts[0].row_tokens,
    )
    asked: set[int] = set()
    read_parts = run.store.read_parts

    def counted(step: int, ranks: Sequence[int] | None = None) -> list[StepPart]:
        asked.update(range(PLANNED) if ranks is None else ranks)
        return read_parts(step, ranks)

    monkeypatch.setattr(run.store, "read_parts", counted)
    dealt = redeal(planned, world_size)
    for rank in range(world_size):
        asked.clear()
        pull = StepPull(run.store, rank, world_size, Trainable(), pad_token_id=0, pad_to_multiple_of=1)
        part = pull.part(header)
        named = [tuple(tuple(part.rollouts[i].info.rollout_id for i in row) for row in rows) for rows in part.rows]
        assert named == [step[rank] for step in dealt.rows]
        rows = sum(len(micro_batch) for micro_batch in part.rows)
        assert len(asked) == PLANNED if reads_all else len(asked) <= rows + 1
