"""Assembly: what each array of a micro-batch holds, what stands in for what is missing, and whose memory it is."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from samples import sample_of

from rlbuffer.errors import PackingError
from rlbuffer.packing import further_columns
from rlbuffer.packing.assembly import PackItem, assemble
from rlbuffer.packing.further_columns import register_column
from rlbuffer.packing.pack import pack
from rlbuffer.records.group import infos_of
from rlbuffer.records.micro_batch import MicroBatch
from rlbuffer.records.rollout import Rollout
from rlbuffer.records.spans import VersionSpan
from rlbuffer.records.step_plan import Normalizers

COUNTS = Normalizers(loss_tokens=1, rollouts=1, groups=1)


def make_rollout(length: int, *, first: int = 10, prompt: int = 1, name: str = "", **columns: Any) -> Rollout:
    mask = np.arange(length) >= prompt
    return Rollout(
        rollout_id=name,
        tokens=np.arange(first, first + length),
        loss_mask=mask,
        logprobs=np.where(mask, -0.5, 0.0),
        version_spans=(VersionSpan(3, 0, length),),
        columns={name: np.asarray(values) for name, values in columns.items()},
    )


def make_item(
    length: int, *, name: str = "r", advantage: float = 1.0, damaged: bool = False, adapter: str = "", **fields: Any
) -> PackItem:
    rollout = None if damaged else make_rollout(length, **fields)
    return PackItem(
        rollout, sample_of(name, length=length, advantage=advantage, policy_versions=(3, 3), adapter=adapter)
    )


def one_step(rows: Any, items: Any, **options: Any) -> tuple[MicroBatch, ...]:
    arguments: dict[str, Any] = {"row_tokens": 2000, "normalizers": COUNTS} | options
    return assemble([rows], items, **arguments)


def one(rows: Any, items: Any, **options: Any) -> MicroBatch:
    arguments: dict[str, Any] = {"row_tokens": 100, "normalizers": COUNTS} | options
    (micro_batch,) = assemble([rows], items, **arguments)
    return micro_batch


def test_pack_lays_rollouts_end_to_end_with_positions_targets_and_boundaries() -> None:
    rollouts = [make_rollout(3), make_rollout(2, first=20)]
    packed = pack(rollouts, [2.0, -1.0], row_tokens=8)
    assert packed.input_ids.tolist() == [10, 11, 12, 20, 21]
    assert packed.position_ids.tolist() == [0, 1, 2, 0, 1]
    assert packed.cu_seqlens.tolist() == [0, 3, 5]
    assert packed.targets.tolist() == [11, 12, -100, 21, -100]
    assert packed.loss_mask.tolist() == [False, True, True, False, True]
    assert packed.advantages.tolist() == [0, 2, 2, 0, -1]
    assert not np.signbit(packed.advantages[3])
    assert packed.logprobs.tolist() == [0, -0.5, -0.5, 0, -0.5]
    assert packed.sample_index.tolist() == [0, 0, 0, 1, 1]
    assert packed.normalizers == Normalizers(loss_tokens=3, rollouts=2, groups=1)
    assert packed.adapter_tokens == {"": 5}
    assert not packed.is_dummy
    assert [s.policy_versions for s in packed.samples] == [(3, 3), (3, 3)]
    assert [s.info for s in packed.samples] == [*infos_of(rollouts)]


def test_padding_is_a_masked_segment_of_its_own() -> None:
    packed = pack([make_rollout(3)], [1.0], row_tokens=8, pad_to_multiple_of=4, pad_token_id=7, ignore_index=-1)
    assert packed.input_ids.tolist() == [10, 11, 12, 7]
    assert packed.cu_seqlens.tolist() == [0, 3, 4]
    assert packed.position_ids.tolist() == [0, 1, 2, 0]
    assert packed.targets.tolist() == [11, 12, -1, -1]
    assert packed.loss_mask.tolist() == [False, True, True, False]
    assert packed.sample_index.tolist() == [0, 0, 0, -1]
    assert packed.advantages.tolist() == [0, 1, 1, 0]
    assert len(packed.unpack(packed.input_ids)) == 1


def test_unpack_refuses_values_of_another_length() -> None:
    with pytest.raises(PackingError, match="unpack: 4 values do not match 3 tokens"):
        pack([make_rollout(3)], row_tokens=8).unpack(np.zeros(4))


def test_attention_mask_is_causal_inside_each_segment_only() -> None:
    mask = pack([make_rollout(2), make_rollout(1)], row_tokens=8, pad_to_multiple_of=4).attention_mask()
    assert mask.astype(int).tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]


def test_attachments_of_equal_rows_are_joined_and_others_are_each_samples_own() -> None:
    given = [
        {"pixels": np.ones((2, 4), np.float32), "mixed": np.zeros(3, np.float32), "wide": np.zeros((1, 2))},
        {"mixed": np.array(2.0, np.float32)},
        {"pixels": np.zeros((1, 4), np.float32), "wide": np.zeros((1, 3))},
    ]
    made = pack([replace(make_rollout(4), attachments=its) for its in given], [1.0] * 3, row_tokens=16)
    for micro_batch in (made, made.to("cpu")):
        assert {name: array.tolist() for name, array in micro_batch.attachments.items()} == {
            "pixels": [[1.0] * 4, [1.0] * 4, [0.0] * 4]
        }
        assert [sorted(sample.attachments) for sample in micro_batch.samples] == [sorted(its) for its in given]


def test_column_advantages_wins_and_is_masked() -> None:
    batch = one([(0, 1)], [make_item(3, advantages=[9.0, 0.25, 0.5]), make_item(2, advantage=3.0)])
    assert batch.advantages.tolist() == [0, 0.25, 0.5, 0, 3]
    assert "advantages" not in batch.columns


def test_dummy_is_a_short_masked_segment_with_all_columns() -> None:
    items = [make_item(20, weights=np.full(20, 3.0))]
    real, dummy, again = assemble(
        [[(0,)], [()], [()]],
        items,
        row_tokens=100,
        normalizers=COUNTS,
        columns=["temperatures"],
        pad_token_id=5,
    )
    assert (real.is_dummy, dummy.is_dummy) == (False, True)
    assert dummy.length == 8
    assert set(dummy.input_ids.tolist()) == {5}
    assert set(dummy.targets.tolist()) == {-100}
    assert not dummy.loss_mask.any()
    assert set(dummy.sample_index.tolist()) == {-1}
    assert dummy.cu_seqlens.tolist() == [0, 8]
    assert dummy.columns["weights"].tolist() == [1.0] * 8
    assert dummy.columns["temperatures"].tolist() == [1.0] * 8
    assert dummy.samples == ()
    assert not np.shares_memory(dummy.input_ids, again.input_ids)
    assert all(not np.shares_memory(dummy.input_ids, array) for array in (real.input_ids, real.targets))


def test_rows_of_one_adapter_stand_together_and_their_tokens_cut_the_micro_batch() -> None:
    items = [make_item(3, adapter="x"), make_item(2, adapter="y", first=50), make_item(4, adapter="x", first=80)]
    batch = one([(0,), (1,), (2,)], items, pad_to_multiple_of=4)
    assert batch.adapter_tokens == {"x": 8, "y": 4}
    assert batch.input_ids.tolist() == [10, 11, 12, 0, 80, 81, 82, 83, 50, 51, 0, 0]


def test_further_columns_are_filled_where_a_rollout_lacks_them() -> None:
    items = [make_item(2, mine=np.array([[1, 2], [3, 4]], np.int16)), make_item(1)]
    batch = one([(0, 1)], items, columns=["ref_logprobs"])
    assert batch.columns["mine"].tolist() == [[1, 2], [3, 4], [0, 0]]
    assert batch.columns["mine"].dtype == np.int16
    assert batch.columns["ref_logprobs"].tolist() == [0, 0, 0]
    assert list(batch.columns) == ["mine", "ref_logprobs"]


@pytest.fixture
def declared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Declarations of a test do not outlive it."""
    monkeypatch.setattr(further_columns, "SPECS", dict(further_columns.SPECS))


@pytest.mark.usefixtures("declared")
def test_declared_column_gives_fill_dtype_and_shape() -> None:
    register_column("mine", fill=-1, dtype="i2", shape=(2,))
    items = [make_item(1, mine=np.array([[1, 2]], np.int8)), make_item(1)]
    batch = one([(0, 1)], items)
    assert batch.columns["mine"].tolist() == [[1, 2], [-1, -1]]
    assert batch.columns["mine"].dtype == np.int16
    assert one([()], [], columns=["mine"]).columns["mine"].shape == (8, 2)


@pytest.mark.usefixtures("declared")
@pytest.mark.parametrize(
    ("values", "arrived"),
    [(np.zeros((1, 3), np.int16), "int16 [T, 3]"), (np.zeros((1, 2), np.int32), "int32 [T, 2]")],
)
def test_column_that_disagrees_with_its_declaration_is_refused(values: Any, arrived: str) -> None:
    register_column("mine", fill=-1, dtype="i2", shape=(2,))
    with pytest.raises(PackingError):
        one([(0,)], [make_item(1, name="g/1", mine=values)])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("tokens", {"fill": 0, "dtype": "f4"}),
        ("advantages", {"fill": 0, "dtype": "f4"}),
        ("a b", {"fill": 0, "dtype": "f4"}),
        ("x", {"fill": 0, "dtype": "O"}),
        ("x", {"fill": 300, "dtype": "u1"}),
        ("x", {"fill": 0.5, "dtype": "i4"}),
        ("x", {"fill": float("nan"), "dtype": "f4"}),
        ("x", {"fill": 0, "dtype": "f4", "shape": (0,)}),
    ],
)
def test_declarations_that_cannot_hold_are_refused(name: str, options: Any) -> None:
    with pytest.raises(PackingError):
        register_column(name, **options)


def test_pack_counts_groups_by_the_ids_of_its_rollouts() -> None:
    packed = pack([make_rollout(2, name=n) for n in ("a/0", "a/1", "b/0")], row_tokens=9)
    assert packed.normalizers == Normalizers(loss_tokens=3, rollouts=3, groups=2)


def test_every_token_names_the_policy_version_that_sampled_it() -> None:
    spans = (VersionSpan(4, 1, 3), VersionSpan(6, 3, 4))
    mixed = PackItem(
        replace(make_rollout(5, prompt=4), version_spans=(*spans, VersionSpan(7, 4, 5))), sample_of("m", length=5)
    )
    packed = one([(0, 1, 2)], [mixed, make_item(2, damaged=True), make_item(2)], pad_to_multiple_of=4)
    assert packed.policy_versions.tolist() == [-1, 4, 4, 6, 7, -1, -1, 3, 3, -1, -1, -1]
    assert one([()], []).policy_versions.tolist() == [-1] * 8


DERIVED = ("position_ids", "advantages", "targets", "sample_index", "policy_versions")


def test_derived_columns_are_made_once() -> None:
    (batch,) = one_step([(0, 1)], [make_item(700), make_item(900)])
    assert not vars(batch).keys() & set(DERIVED)
    targets = batch.targets
    assert batch.targets is targets
    assert targets[:3].tolist() == [11, 12, 13]
    assert [len(getattr(batch, name)) for name in DERIVED] == [1600] * 5


@pytest.mark.parametrize("copied", [lambda b: pickle.loads(pickle.dumps(b)), copy.copy, copy.deepcopy, replace])
def test_copies_of_a_micro_batch_have_the_derived_columns_though_nobody_had_read_them(copied: Any) -> None:
    (batch,) = one_step([(0, 1)], [make_item(3), make_item(4, advantage=-2.0)], pad_to_multiple_of=8)
    (other,) = one_step([(0, 1)], [make_item(3), make_item(4, advantage=-2.0)], pad_to_multiple_of=8)
    twin = copied(other)
    for name in DERIVED:
        assert getattr(twin, name).tolist() == getattr(batch, name).tolist()


def test_micro_batch_moves_to_torch_and_still_unpacks() -> None:
    torch = pytest.importorskip("torch")
    packed = pack([make_rollout(3, mine=[1.0, 2.0, 3.0]), make_rollout(2)], row_tokens=8, pad_to_multiple_of=8)
    moved = packed.to("cpu")
    assert moved.input_ids.dtype == torch.int32
    assert moved.targets.dtype == torch.int64
    assert moved.columns["mine"].tolist() == [1, 2, 3, 0, 0, 0, 0, 0]
    assert [piece.tolist() for piece in moved.unpack(moved.input_ids)] == [[10, 11, 12], [10, 11]]
    assert np.array_equal(moved.attention_mask(), packed.attention_mask())
    moved.input_ids[0] = 99
    assert packed.input_ids[0] == 10
