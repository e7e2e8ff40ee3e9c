"""A step cut into updates: which micro-batches, over which counts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from samples import sample_of
from step_headers import header_of, step_of

from rlbuffer.config.losses import LossChoice
from rlbuffer.packing.assembly import PackItem, assemble
from rlbuffer.packing.pack import pack
from rlbuffer.process.ranks import Ranks
from rlbuffer.records.micro_batch import MicroBatch, Step
from rlbuffer.records.rollout import Rollout, TokenSequence
from rlbuffer.records.step_plan import Normalizers
from rlbuffer.testing import make_group
from rlbuffer.trainer.losses import TrainedTokens, loss_of
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


def of_lengths(*lengths: int) -> Rollout:
    """A rollout of sequences that train as many tokens."""
    sequences = [
        TokenSequence.from_turns(
            [
                {"role": "user", "tokens": [1, 2 + place]},
                {"role": "assistant", "tokens": [3] * length, "logprobs": [-0.5] * length},
            ],
            policy_version=0,
        )
        for place, length in enumerate(lengths)
    ]
    return Rollout.from_sequences(sequences, reward=1.0)


def cut_as(*held: Sequence[tuple[int, int, int]], masks_truncated: bool = False) -> list[float]:
    """The counts of rollouts of slices of one micro-batch each; in each (rollout, sequence, trained tokens)."""
    rollouts = [of_lengths(30, 10), of_lengths(20), of_lengths(5, 5, 10)]
    micro_batches = []
    for places in held:
        items = []
        for r, s, tokens in places:
            its = rollouts[r].sequences[s]
            sample = sample_of(
                str(r),
                length=len(its.tokens),
                sequence=s,
                sequences=len(rollouts[r].sequences),
                rollout_loss_tokens=rollouts[r].loss_tokens,
                is_truncated=r == 2,
            )
            items.append(PackItem(rollout=its if tokens else None, sample=sample))
        micro_batches += assemble([[tuple(range(len(items)))]], items, row_tokens=512, normalizers=WHOLE)
    header = header_of(masks_truncated=masks_truncated)
    parts = slices_of(step_of(*micro_batches, header=header), ALONE, len(micro_batches))
    assert [part.normalizers.loss_tokens for part in parts] == [sum(t for _, _, t in places) for places in held]
    return [part.normalizers.rollouts for part in parts]


def test_a_slice_counts_the_share_of_a_rollouts_tokens_that_lies_in_it() -> None:
    assert cut_as([(0, 0, 30)], [(0, 1, 10), (1, 0, 20)]) == [0.75, 1.25]
    assert cut_as([(2, 1, 5), (2, 2, 10)], [(2, 0, 5)]) == [0.75, 0.25]
    assert cut_as([(1, 0, 20)], [(0, 0, 30), (0, 1, 10)]) == [1.0, 1.0]


def test_a_damaged_sequence_counts_in_no_slice_and_its_rollout_with_the_rest() -> None:
    assert cut_as([(0, 0, 0), (1, 0, 20)], [(0, 1, 10)]) == [1.0, 0.25]
    assert cut_as([(1, 0, 0)], [(0, 0, 30), (0, 1, 10)]) == [0.0, 1.0]


def test_a_masked_rollout_counts_one_in_all() -> None:
    held = [(2, 0, 0), (1, 0, 20)], [(2, 1, 0), (0, 0, 30), (0, 1, 10)], [(2, 2, 0)]
    assert cut_as(*held, masks_truncated=True) == pytest.approx([4 / 3, 4 / 3, 1 / 3])
    assert cut_as(*held) == [1.0, 1.0, 0.0]  # the same, where the step does not mask: they are damaged


def test_a_slice_of_less_than_a_rollout_weighs_one_as_any_other() -> None:
    ones = torch.ones(4, dtype=torch.float64, requires_grad=True)
    held = TrainedTokens(
        logprobs=ones,
        entropy=torch.zeros(4),
        inference_logprobs=ones.detach(),
        advantages=torch.full((4,), -1.0, dtype=torch.float64),
        rollout=torch.zeros(4, dtype=torch.int64),
        samples=(sample_of("0", length=5, sequences=2, rollout_loss_tokens=40),),
    )
    counts = Normalizers(loss_tokens=4, rollouts=0.1, groups=1)
    for name, expected in (("clip", 1.0), ("dapo", 1.0), ("dr_grpo", 4 / (0.1 * 50))):
        assert float(loss_of(held, LossChoice(name=name), counts, longest=50).detach()) == pytest.approx(expected)


def test_a_slice_without_a_trained_token_has_no_gradient() -> None:
    logprobs = torch.zeros(0, dtype=torch.float64, requires_grad=True)
    nothing = torch.zeros(0, dtype=torch.float64)
    held = TrainedTokens(
        logprobs=logprobs,
        entropy=nothing,
        inference_logprobs=nothing,
        advantages=nothing,
        rollout=torch.zeros(0, dtype=torch.int64),
    )
    for normalizer in ("rollouts", "tokens", "longest"):
        choice = LossChoice(normalizer=normalizer, entropy_bonus=0.1)
        counts = Normalizers(loss_tokens=0, rollouts=0.0, groups=1)
        assert float(loss_of(held, choice, counts, longest=0).detach()) == 0.0


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
