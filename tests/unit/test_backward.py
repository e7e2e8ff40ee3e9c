"""`mb.backward(loss)`: what it refuses, and what it makes of a loss in a single process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import rlbuffer
from rlbuffer.errors import InvalidLoss
from rlbuffer.packing import pack
from rlbuffer.testing import make_group


@pytest.fixture
def micro_batch() -> rlbuffer.MicroBatch:
    return pack(make_group(env="math", rewards=[0.0, 1.0]).rollouts, [-0.5, 0.5], row_tokens=128)


@pytest.mark.parametrize("world_size", [1, 4])
def test_the_gradient_is_that_of_the_loss_times_the_world_size_and_adds_up(
    micro_batch: rlbuffer.MicroBatch, world_size: int
) -> None:
    weight = torch.tensor([2.0, 3.0], requires_grad=True)
    of_ranks = replace(micro_batch, world_size=world_size)
    for mb in (of_ranks, of_ranks.to("cpu")):
        mb.backward((weight**2).sum())
    assert weight.grad is not None
    assert weight.grad.tolist() == [2 * world_size * 4.0, 2 * world_size * 6.0]


def test_a_dummys_loss_of_0_gives_the_gradient_that_other_ranks_wait_for() -> None:
    weight = torch.tensor([2.0], requires_grad=True)
    pack([], row_tokens=16).backward((weight * 0).sum())
    assert weight.grad is not None
    assert weight.grad.tolist() == [0.0]


WEIGHT = torch.tensor([2.0, 3.0], requires_grad=True)
WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "a float": (lambda: 0.0, r"got 0\.0 \(float\): where nothing is trained, take the model's output times 0"),
    "None": (lambda: None, r"got None \(NoneType\)"),
    "a vector": (lambda: WEIGHT * 2, r"got shape \[2\]: take its sum"),
    "no gradient": (lambda: (WEIGHT * 2).sum().detach(), r"the loss, 10, has no gradient"),
    "nan": (lambda: (WEIGHT * torch.nan).sum(), r"the loss is nan, .* \['math\.0/0', 'math\.0/1'\]$"),
    "infinite": (lambda: (WEIGHT / 0).sum(), "the loss is inf, "),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_loss_that_cannot_be_trained_is_refused_and_leaves_the_gradients(
    micro_batch: rlbuffer.MicroBatch, case: str
) -> None:
    loss, message = WRONG[case]
    with pytest.raises(InvalidLoss, match=message):
        micro_batch.backward(loss())  # type: ignore[arg-type]
    assert WEIGHT.grad is None
