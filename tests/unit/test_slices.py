"""A step cut into updates: which micro-batches, over which counts."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import trees
from step_headers import step_of

from rlbuffer.packing.pack import pack
from rlbuffer.process.ranks import Ranks
from rlbuffer.records.micro_batch import MicroBatch, Step
from rlbuffer.records.step_plan import Normalizers
from rlbuffer.testing import make_group
from rlbuffer.trainer.update.slices import slices_of
from rlbuffer.trainer.update.token_choice import draws

ALONE = Ranks(0, 1, torch.device("cpu"))
WHOLE = Normalizers(loss_tokens=1000, rollouts=100, groups=10)


def micro_batch(seed: int, size: int = 2) -> MicroBatch:
    group = make_group(size=size, seed=seed, rollout_ids=[f"g{seed}/{i}" for i in range(size)])
    return pack(group.rollouts, [0.5] * size, row_tokens=256, normalizers=WHOLE)


def step(count: int) -> Step:
    return step_of(*(micro_batch(seed) for seed in range(count)))


def test_a_step_in_one_piece_keeps_the_counts_that_were_committed() -> None:
    (only,) = slices_of(step(3), ALONE, 1)
    assert (only.start, len(only.micro_batches), only.normalizers) == (0, 3, WHOLE)
    assert all(m.normalizers == WHOLE for m in only.micro_batches)


@pytest.mark.parametrize(
    ("count", "wanted", "sizes"), [(4, 2, [2, 2]), (5, 2, [2, 3]), (5, 3, [1, 2, 2]), (3, 3, [1, 1, 1]), (2, 5, [1, 1])]
)
def test_slices_are_consecutive_and_none_is_empty(count: int, wanted: int, sizes: list[int]) -> None:
    whole = step(count)
    parts = slices_of(whole, ALONE, wanted)
    assert [len(part.micro_batches) for part in parts] == sizes
    assert [part.start for part in parts] == [sum(sizes[:i]) for i in range(len(sizes))]
    ids = [m.samples[0].rollout_id for part in parts for m in part.micro_batches]
    assert ids == [m.samples[0].rollout_id for m in whole]


def test_a_slice_is_divided_by_its_own_counts() -> None:
    first, second = slices_of(step(3), ALONE, 2)
    for part in (first, second):
        expected = Normalizers(
            loss_tokens=sum(int(m.loss_mask.sum()) for m in part.micro_batches),
            rollouts=2 * len(part.micro_batches),
            groups=WHOLE.groups,
        )
        assert part.normalizers == expected
        assert all(m.normalizers == expected for m in part.micro_batches)


def test_a_rollout_counts_in_the_slice_of_its_first_sequence() -> None:
    rollout = trees.rollout(np.random.default_rng(2))
    assert len(rollout.sequences) > 1
    packed = pack([rollout, *make_group(size=1).rollouts], [0.5, 0.5], row_tokens=512, normalizers=WHOLE)
    first, _ = slices_of(dataclasses.replace(step(2), micro_batches=(packed, packed)), ALONE, 2)
    assert first.normalizers.rollouts == 2


def test_a_step_of_no_micro_batches_has_no_updates() -> None:
    assert slices_of(dataclasses.replace(step(1), micro_batches=()), ALONE, 2) == ()


def test_the_chance_of_a_token_is_the_same_in_whatever_micro_batch() -> None:
    group = make_group(size=3, seed=1, rollout_ids=["g/0", "g/1", "g/2"])
    together = draws(pack(group.rollouts, row_tokens=256), torch.device("cpu"))
    alone = torch.cat([draws(pack([r], row_tokens=256), torch.device("cpu")) for r in reversed(group.rollouts)])
    assert sorted(together.tolist()) == sorted(alone.tolist())
    assert len(set(together.tolist())) == len(together)
    assert draws(pack([], row_tokens=256), torch.device("cpu")).tolist() == []


def test_chance_is_even() -> None:
    packed = pack([r for seed in range(40) for r in make_group(size=4, seed=seed).rollouts], row_tokens=10**5)
    samples = tuple(dataclasses.replace(s, rollout_id=f"r{i}") for i, s in enumerate(packed.samples))
    named = dataclasses.replace(packed, segments=dataclasses.replace(packed.segments, samples=lambda: samples))
    counts, _ = np.histogram(draws(named, torch.device("cpu")).numpy(), bins=10, range=(0.0, 1.0))
    assert counts.sum() == packed.normalizers.loss_tokens
    assert counts.min() > 0.8 * counts.mean()
    assert counts.max() < 1.2 * counts.mean()
