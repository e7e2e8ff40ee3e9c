"""However a step is cut (rows, micro-batches, dummies, ranks), the gradient is that of the whole step at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from gradient_ranks import ROW_TOKENS, counts_of, items, step_of
from torch import Tensor

from rlbuffer.config.losses import LossChoice
from rlbuffer.config.trainer import TrainerSettings
from rlbuffer.packing.assembly import PackItem, assemble
from rlbuffer.process.ranks import Ranks
from rlbuffer.records.step_plan import Normalizers
from rlbuffer.trainer.model.packed_policy import PackedPolicy, prepare
from rlbuffer.trainer.update.update import Updates
from rlbuffer.weights.model import TINY_QWEN3, model_from_config

DAPO = LossChoice(name="dapo")


def policy() -> PackedPolicy:
    torch.manual_seed(0)
    return prepare(model_from_config(TINY_QWEN3, dtype=torch.float64))


def gradient(
    made: PackedPolicy,
    rows: Sequence[Sequence[tuple[int, ...]]],
    counts: Normalizers,
    *,
    of: Sequence[PackItem] = (),
    loss: LossChoice = DAPO,
    ranks: int = 1,
) -> Tensor:
    """The gradient of micro-batches of these rows, as one rank of some makes it."""
    # Not of a copy: norms in float64 hold on to the module that they were made for, and would be left out in silence.
    made.zero_grad(set_to_none=True)
    parts = assemble(rows, of or items(), row_tokens=ROW_TOKENS, normalizers=counts, pad_to_multiple_of=8)
    step = replace(step_of(parts, ranks), normalizers=counts)
    updates = Updates(made, step, TrainerSettings(loss=loss), Ranks(0, ranks, torch.device("cpu")), longest=ROW_TOKENS)
    (whole,) = updates.parts
    updates.accumulate(whole)
    gradients = [p.grad.reshape(-1) for p in made.parameters() if p.grad is not None]
    assert len(gradients) == len(list(made.parameters()))
    return torch.cat(gradients)


def test_a_dummy_reaches_every_parameter_and_changes_none() -> None:
    counts = Normalizers(loss_tokens=10, rollouts=1, groups=1)
    assert not gradient(policy(), [((),)], counts, loss=LossChoice(entropy_bonus=0.1)).any()


def test_a_damaged_rollout_is_not_trained_and_leaves_the_others_as_they_were() -> None:
    made, counts = policy(), counts_of(items()[:7])
    damaged = [replace(item, rollout=None) if i == 4 else item for i, item in enumerate(items())]
    with_damage = gradient(made, [((0, 1, 2),), ((4,),), ((3, 5, 6),)], counts, of=damaged)
    without = gradient(made, [((0, 1, 2),), ((3, 5, 6),)], counts)
    torch.testing.assert_close(with_damage, without, rtol=1e-12, atol=1e-14)
