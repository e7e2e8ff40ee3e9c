"""Rows are laid out before anything is written, and micro-batches make their samples when somebody reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from rlbuffer.errors import PackingError
from rlbuffer.packing.assembly import Assembly, Layout
from rlbuffer.packing.further_columns import ColumnSpec
from rlbuffer.records.micro_batch import Sample
from rlbuffer.records.step_plan import Normalizers
from rlbuffer.testing import make_group

COUNTS = Normalizers(loss_tokens=1, rollouts=1, groups=1)


def sample(item: int) -> Sample:
    return Sample(
        rollout_id=str(item),
        group_id="g",
        env="a",
        reward=None,
        rewards={},
        advantage=0.0,
        policy_versions=(0, 0),
        answer=None,
        prompt_tokens=1,
        length=3,
    )


def test_a_row_with_a_rollout_of_no_tokens_is_not_laid_out() -> None:
    layout = Layout(
        schema={}, row_tokens=8, pad_token_id=0, pad_to_multiple_of=1, ignore_index=-100, normalizers=COUNTS
    )
    with pytest.raises(PackingError, match=r"^assemble: row \(0, 1\) has a rollout of length 0$"):
        Assembly([[(0, 1)]], [3, 0], ["", ""], layout)


def test_samples_are_made_when_they_are_first_read() -> None:
    made: list[int] = []

    def samples(items: Sequence[int]) -> Callable[[], tuple[Sample, ...]]:
        def make() -> tuple[Sample, ...]:
            made.extend(items)
            return tuple(map(sample, items))

        return make

    layout = Layout(
        schema={}, row_tokens=8, pad_token_id=0, pad_to_multiple_of=4, ignore_index=-100, normalizers=COUNTS
    )
    assembly = Assembly([[(1,)], [(0,)]], [3, 3], ["", ""], layout)
    rollouts = dict(enumerate(make_group(lengths=[3, 3]).rollouts))
    for half in (range(2, 4), range(2)):  # two reads
        for run in assembly.runs(half):
            assembly.write(run, rollouts)
    assembly.note(rollouts)
    first, second = assembly.micro_batches([2.0, 3.0], samples)
    assert first.advantages.tolist() == [*np.where(rollouts[1].loss_mask, 3.0, 0.0).tolist(), 0.0]
    assert (first.sample_index.tolist(), first.is_dummy, made) == ([0, 0, 0, -1], False, [])
    assert [sample.rollout_id for sample in first.samples] == ["1"]
    assert first.samples is first.samples
    assert (second.targets.tolist(), made) == ([*rollouts[0].tokens[1:].tolist(), -100, -100], [1])


@pytest.mark.parametrize(("dtype", "fill"), [("?", 0), ("?", 1.0), ("i2", -1.0), ("u1", 255.0), ("f4", -1)])
def test_a_fill_stands_in_a_column_of_another_kind(dtype: str, fill: float) -> None:
    layout = Layout(
        schema={"extra": ColumnSpec(fill=fill, dtype=np.dtype(dtype), shape=())},
        row_tokens=8,
        pad_token_id=0,
        pad_to_multiple_of=4,
        ignore_index=-100,
        normalizers=COUNTS,
    )
    assembly = Assembly([[(0,)]], [3], [""], layout)
    rollouts = {0: make_group(lengths=[3]).rollouts[0]}
    (run,) = assembly.runs(range(2))
    assembly.write(run, rollouts)
    assembly.note(rollouts)
    (made,) = assembly.micro_batches([0.0], lambda items: tuple)
    assert made.columns["extra"].tolist() == np.full(4, fill, dtype).tolist()
    assert made.lacking["extra"].tolist() == [True] * 3 + [False]
