"""One optimizer update: what is decayed, what is clipped, what is refused, and how fast it goes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rlbuffer.config.trainer import OptimizerSettings
from rlbuffer.trainer.update.update import make_optimizer, take_step


class Policy(nn.Module):
    """A matrix, a vector, and a parameter that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.ones(2, 2))
        self.vector = nn.Parameter(torch.ones(2))
        self.frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)


def step(policy: Policy, settings: OptimizerSettings, gradient: float, *, clip: float = 1.0) -> tuple[float, float]:
    """Takes one step with every gradient `gradient`. -> norm as reported, norm that the optimizer saw."""
    optimizer = make_optimizer(policy, settings)
    seen: list[float] = []

    def look(used: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        gradients = [p.grad.flatten() for group in used.param_groups for p in group["params"] if p.grad is not None]
        seen.append(float(torch.cat(gradients).norm()))

    optimizer.register_step_pre_hook(look)
    for parameter in (policy.matrix, policy.vector):
        parameter.grad = torch.full_like(parameter, gradient)
    norm = take_step(policy, optimizer, learning_rate=0.1, gradient_clip=clip, step=3)
    assert policy.matrix.grad is None
    return norm, seen[0]


def test_weight_decay_shrinks_matrices_only() -> None:
    policy = Policy()
    step(policy, OptimizerSettings(weight_decay=0.5), 0.0)
    assert torch.equal(policy.matrix, torch.full((2, 2), 0.95))  # 1 - rate x decay
    assert torch.equal(policy.vector, torch.ones(2))
    assert torch.equal(policy.frozen, torch.ones(2, 2))


def test_an_update_goes_at_the_rate_it_is_given_and_not_at_the_settings_own() -> None:
    policy = Policy()
    step(policy, OptimizerSettings(learning_rate=5.0), 1.0)
    assert torch.allclose(policy.vector, torch.full((2,), 0.9))  # Adam's first step is the rate itself


@pytest.mark.parametrize(("clip", "seen"), [(1.0, 1.0), (100.0, 6**0.5 * 2)])
def test_the_norm_is_the_one_before_clipping(clip: float, seen: float) -> None:
    assert step(Policy(), OptimizerSettings(), 2.0, clip=clip) == pytest.approx((6**0.5 * 2, seen), rel=1e-5)
