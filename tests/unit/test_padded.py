"""The padded view: the same rollouts as in the packed rows, one a row."""

from __future__ import annotations

import numpy as np
from step_headers import step_of
from test_packing import make_item, one

from rlbuffer.packing.assembly import assemble


def test_a_step_is_one_rollout_a_row() -> None:
    items = [make_item(4, mine=[1, 2, 3, 4], advantage=2.0), make_item(2, mine=[5, 6]), make_item(3, mine=[7, 8, 9])]
    step = step_of(
        one([(0, 1)], items, pad_to_multiple_of=8, pad_token_id=3, columns=["mine"]),
        one([(2,)], items, columns=["mine"]),
    )
    rows = step.padded(pad_token_id=9)
    assert rows.input_ids.tolist() == [[10, 11, 12, 13], [10, 11, 9, 9], [10, 11, 12, 9]]
    assert rows.attention_mask.tolist() == [[True] * 4, [True, True, False, False], [True, True, True, False]]
    assert rows.loss_mask.astype(int).tolist() == [[0, 1, 1, 1], [0, 1, 0, 0], [0, 1, 1, 0]]
    assert rows.advantages.tolist() == [[0, 2, 2, 2], [0, 1, 0, 0], [0, 1, 1, 0]]
    assert rows.logprobs.tolist() == [[0, -0.5, -0.5, -0.5], [0, -0.5, 0, 0], [0, -0.5, -0.5, 0]]
    assert rows.policy_versions.tolist() == [[3, 3, 3, 3], [3, 3, -1, -1], [3, 3, 3, -1]]
    assert rows.columns["mine"].tolist() == [[1, 2, 3, 4], [5, 6, 0, 0], [7, 8, 9, 0]]
    assert [sample.length for sample in rows.samples] == [4, 2, 3]
    assert rows.normalizers is step.micro_batches[0].normalizers
    (first, _) = step
    assert first.padded(pad_to_multiple_of=8).input_ids.shape == (2, 8)


def test_columns_of_any_shape_and_damaged_rollouts_keep_their_rows() -> None:
    items = [make_item(2, mine=[[1, 2], [3, 4]]), make_item(3, damaged=True)]
    rows = one([(0, 1)], items).padded()
    assert rows.columns["mine"].tolist() == [[[1, 2], [3, 4], [0, 0]], [[0, 0], [0, 0], [0, 0]]]
    assert not rows.loss_mask[1].any()
    assert rows.attention_mask[1].all()


def test_ranks_get_as_many_rows_as_they_ask_for_and_one_at_least() -> None:
    more = one([(0,)], [make_item(3)]).padded(rows=3)
    assert more.input_ids.shape == (3, 3)
    assert more.attention_mask.all(), "a row that attends to nothing would be NaN"
    assert (more.loss_mask.sum(), np.abs(more.advantages[1:]).sum(), len(more.samples)) == (2, 0, 1)
    (dummy,) = assemble([[()]], [], row_tokens=100, normalizers=more.normalizers)
    nothing = step_of(dummy).padded()
    assert (nothing.input_ids.shape, nothing.loss_mask.any(), nothing.samples) == ((1, 8), False, ())
