from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlbuffer.packing.further_columns import agree
from rlbuffer.records.group import Group
from rlbuffer.records.step_plan import GroupPart, Normalizers, Plan, PlannedRollouts, StepPlan
from rlbuffer.testing import make_group
from rlbuffer.wire.metadata import decode_info, encode_info


def group(seed: int, size: int = 1, **columns: Any) -> Group:
    return make_group(seed=seed, size=size, lengths=[4] * size, columns=[columns] * size)


def plan_of(groups: list[Group]) -> StepPlan:
    pushes = [
        GroupPart(
            entry_id=group.group_id,
            info=group.info(),
            joined=range(len(group.rollouts)),
            places=range(len(group.rollouts)),
            packed_tokens=group.info().tokens,
        )
        for group in groups
    ]
    refs = PlannedRollouts(pushes)
    return StepPlan(
        step=1,
        group_ids=tuple(group.group_id for group in groups),
        rollouts=refs,
        advantages=np.zeros(len(refs), np.float32),
        plan=Plan(rows=(), world_size=1, row_tokens=64),
        normalizers=Normalizers(loss_tokens=1, rollouts=len(refs), groups=len(groups)),
        tokens=4 * len(refs),
        closed_by="groups",
    )


def agreed(*groups: Group) -> tuple[Any, dict[str, str]]:
    return agree(plan_of(list(groups)))


def test_a_step_has_every_column_that_one_of_its_pushes_has() -> None:
    columns, odd = agreed(group(0), group(1, x=np.zeros((4, 2), np.int16)), group(2, y=np.zeros(4, np.float32)))
    assert columns == {"x": ("<i2", (2,)), "y": ("<f4", ())}
    assert odd == {}


def test_dtypes_of_one_shape_meet_in_one_that_holds_both() -> None:
    columns, odd = agreed(group(0, x=np.zeros(4, np.float32)), group(1, x=np.zeros(4, np.int32)))
    assert columns == {"x": ("<f8", ())}
    assert odd == {}


@pytest.mark.parametrize(
    ("sizes", "wanted", "left_out"), [((1, 2), "T, 3", "a.0"), ((2, 1), "T", "a.1"), ((1, 1), "T", "a.1")]
)
def test_the_shape_of_most_rollouts_counts_and_the_first_one_among_equals(
    sizes: tuple[int, int], wanted: str, left_out: str
) -> None:
    both = (group(0, sizes[0], x=np.zeros(4, np.int32)), group(1, sizes[1], x=np.zeros((4, 3), np.int32)))
    columns, odd = agreed(*both)
    arrived = {"T": "T, 3", "T, 3": "T"}[wanted]
    assert odd == {left_out: f"column x is int32 [{arrived}], but [{wanted}] in most rollouts of its step"}
    assert columns == {"x": ("<i4", (3,) if wanted == "T, 3" else ())}


@pytest.mark.parametrize(("values", "arrived"), [(np.zeros((4, 1)), "float64 [T, 1]"), (np.ones(4, bool), "bool [T]")])
def test_a_column_advantages_that_is_no_number_per_token_leaves_the_step(values: Any, arrived: str) -> None:
    columns, odd = agreed(group(0, advantages=np.zeros(4)), group(1, advantages=values))
    assert odd == {"a.1": f"column advantages is {arrived}, not [T] numbers"}
    assert columns == {}


def test_the_metadata_of_a_push_carries_the_kinds_of_its_columns() -> None:
    info = group(0, x=np.zeros((4, 2), np.int16), y=np.zeros(4, bool)).info()
    assert info.columns == (("x", "<i2", (2,)), ("y", "|b1", ()))
    assert decode_info(encode_info(info)) == info
