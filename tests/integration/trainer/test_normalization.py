"""However a step is cut (rows, micro-batches, dummies, ranks), the gradient is that of the whole step at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rlbuffer.config.losses import LossChoice
from rlbuffer.config.trainer import TrainerSettings
from rlbuffer.packing.assembly import PackItem, assemble
from rlbuffer.process.ranks import Ranks
from rlbuffer.records.micro_batch import MicroBatch, Sample, Step
from rlbuffer.records.rollout import Rollout
from rlbuffer.records.step_plan import Normalizers, Plan
from rlbuffer.trainer.model.packed_policy import PackedPolicy, prepare
from rlbuffer.trainer.update.update import Updates
from rlbuffer.weights.model import TINY_QWEN3, model_from_config

SHAPES = ((3, 9), (5, 2), (1, 17), (4, 6), (2, 30), (7, 1), (3, 12))
"""(prompt tokens, sampled tokens) of the rollouts."""
ROW_TOKENS = 96
CPU = torch.device("cpu")


def rollouts() -> list[Rollout]:
    rng = np.random.default_rng(3)
    return [
        Rollout.from_completion(
            prompt_ids=rng.integers(0, 13, p),
            token_ids=rng.integers(0, 13, c),
            logprobs=rng.normal(-2.5, 0.3, c).clip(max=0),
            reward=float(rng.random()),
            policy_version=0,
            columns={"ref_logprobs": rng.normal(-2.5, 0.3, p + c).astype(np.float32)},
        )
        for p, c in SHAPES
    ]


def items(made: Sequence[Rollout]) -> list[PackItem]:
    advantages = np.linspace(-1, 1, len(made))
    return [
        PackItem(
            rollout=r,
            length=r.length,
            adapter="",
            sample=Sample(
                rollout_id=str(i),
                group_id="g",
                env="a",
                reward=r.reward,
                rewards={},
                advantage=float(advantages[i]),
                policy_versions=(0, 0),
                answer=None,
                prompt_tokens=r.prompt_tokens,
                length=r.length,
            ),
        )
        for i, r in enumerate(made)
    ]


def cut(plan: Plan, rank: int, normalizers: Normalizers) -> tuple[MicroBatch, ...]:
    return assemble(
        [step[rank] for step in plan.rows],
        items(rollouts()),
        row_tokens=ROW_TOKENS,
        normalizers=normalizers,
        pad_to_multiple_of=8,
    )


def policy() -> PackedPolicy:
    torch.manual_seed(0)
    return prepare(model_from_config(TINY_QWEN3, dtype=torch.float64))


def gradient(
    made: PackedPolicy, parts: Sequence[MicroBatch], settings: TrainerSettings, normalizers: Normalizers, ranks: int
) -> tuple[Tensor, Tensor]:
    # Not of a copy: norms in float64 hold on to the module that they were made for, and would be left out in silence.
    made.zero_grad(set_to_none=True)
    step = Step(
        number=1,
        epoch=0,
        digest="",
        world_size=ranks,
        micro_batches=tuple(parts),
        normalizers=normalizers,
        rollouts=len(SHAPES),
        groups=1,
    )
    updates = Updates(made, step, settings, Ranks(0, ranks, CPU), longest=ROW_TOKENS)
    (whole,) = updates.parts
    sums = updates.accumulate(whole)
    gradients = [p.grad.reshape(-1) for p in made.parameters() if p.grad is not None]
    assert len(gradients) == len(list(made.parameters()))
    return torch.cat(gradients), sums


def test_a_mean_of_means_would_be_another_gradient() -> None:
    """The counts that travel with a step are needed: dividing by each rank's own count is not the same."""
    made = policy()
    settings = TrainerSettings(loss=LossChoice(name="dapo"))
    plan = Plan(rows=((((0, 1, 2, 3, 5, 6),), ((4,),)),), world_size=2, row_tokens=ROW_TOKENS)
    counts = [sum(rollouts()[i].loss_tokens for i in plan.rows[0][rank][0]) for rank in (0, 1)]
    whole = Normalizers(loss_tokens=sum(counts), rollouts=7, groups=1)
    right = sum(gradient(made, cut(plan, r, whole), settings, whole, 2)[0] for r in (0, 1)) / 2
    own = [Normalizers(loss_tokens=c, rollouts=1, groups=1) for c in counts]
    wrong = sum(gradient(made, cut(plan, r, own[r]), settings, own[r], 1)[0] for r in (0, 1)) / 2
    assert isinstance(right, Tensor)
    assert isinstance(wrong, Tensor)
    assert float((wrong - right).norm() / right.norm()) > 0.05


def test_a_dummy_reaches_every_parameter_and_changes_none() -> None:
    made = policy()
    normalizers = Normalizers(loss_tokens=10, rollouts=1, groups=1)
    dummy = cut(Plan(rows=((((),),),), world_size=1, row_tokens=ROW_TOKENS), 0, normalizers)
    assert dummy[0].is_dummy
    gradient(made, dummy, TrainerSettings(loss=LossChoice(entropy_bonus=0.1)), normalizers, 1)
    for name, parameter in made.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


def test_a_damaged_rollout_is_not_trained_and_leaves_the_others_as_they_were() -> None:
    made = policy()
    settings = TrainerSettings(loss=LossChoice(name="dapo"))
    normalizers = Normalizers(loss_tokens=77, rollouts=7, groups=1)
    whole = items(rollouts())
    damaged = [
        PackItem(rollout=None if i == 4 else item.rollout, length=item.length, sample=item.sample, adapter="")
        for i, item in enumerate(whole)
    ]

    def of(rows: list[tuple[tuple[int, ...], ...]], made_of: list[PackItem]) -> Tensor:
        parts = assemble(rows, made_of, row_tokens=ROW_TOKENS, normalizers=normalizers)
        return gradient(made, parts, settings, normalizers, 1)[0]

    with_damage = of([((0, 1, 2),), ((4,),), ((3, 5, 6),)], damaged)
    without = of([((0, 1, 2),), ((3, 5, 6),)], whole)
    torch.testing.assert_close(with_damage, without, rtol=1e-12, atol=1e-14)
