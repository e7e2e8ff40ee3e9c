"""A bandit under every pair of settings that nothing warns of: its gradient is the policy's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import product

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from rlbuffer.checks.check import Context
from rlbuffer.checks.settings import loss
from rlbuffer.config.loading import Loaded
from rlbuffer.config.losses import BUILT_IN_LOSSES, CORRECTION_FACTS, LossChoice, uses_old
from rlbuffer.config.settings import RunSettings
from rlbuffer.records.step_plan import Normalizers
from rlbuffer.trainer.losses import TrainedTokens, clipped_of, loss_of, per_token_of

THETA = torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64)
PER_VERSION = torch.tensor([-0.09, 0.09, -0.03], dtype=torch.float64) / 4
"""What each version takes from the logits of the one before: at age 4 within every clip, cap and mask."""
REWARD = torch.tensor([1.0, 0.0, 0.6], dtype=torch.float64)
AGES = (0, 1, 4)
CORRECTIONS = ((), *((name,) for name in CORRECTION_FACTS), ("tis", "icepop"), ("tis", "geometric_mask"))


def is_said(choice: LossChoice, age: int) -> bool:
    """`config check` has a word for the settings."""
    values = {"row_tokens": 64, "max_age": age, "lookahead": min(age, 1)}
    settings = RunSettings(batcher=values, trainer={"loss": choice.model_dump()})
    return any(loss(Context(loaded=Loaded(settings=settings, sources={}))))


def gradients(choice: LossChoice, age: int, per_version: Tensor = PER_VERSION) -> tuple[Tensor, Tensor, float]:
    """-> exact gradient, the loss's, share clipped. The sampler is `age` versions behind and computes in bfloat16."""
    logits = THETA.clone().requires_grad_()
    policy, sampler = THETA.softmax(0), (THETA + age * per_version).softmax(0)
    advantages = REWARD - (policy * REWARD).sum()
    (exact,) = torch.autograd.grad(-(logits.softmax(0) * advantages).sum(), logits)
    logprobs = logits.log_softmax(0)
    tokens = TrainedTokens(
        logprobs=logprobs,
        entropy=torch.zeros(3, dtype=torch.float64),
        inference_logprobs=sampler.log().bfloat16().double(),
        advantages=advantages,
        rollout=torch.arange(3),
        old_logprobs=logprobs.detach() if uses_old(choice) else None,
        weights=3 * sampler,  # in place of draws
    )
    counts = Normalizers(loss_tokens=3, rollouts=3, groups=1)
    clipped = clipped_of(tokens, per_token_of(tokens, choice))
    (gradient,) = torch.autograd.grad(loss_of(tokens, choice, counts, longest=1), logits)
    return exact, gradient, float(clipped.double().mean())


def choices() -> Iterator[LossChoice]:
    for name, old, correction in product(BUILT_IN_LOSSES, ("auto", "inference", "recomputed"), CORRECTIONS):
        with suppress(ValidationError):  # refused
            yield LossChoice(name=name, old_logprobs=old, correction={key: {} for key in correction})


@pytest.mark.parametrize("age", AGES)
def test_a_bandits_gradient_is_the_exact_one_wherever_nothing_is_said(age: int) -> None:
    allowed = 0
    for choice in choices():
        if not is_said(choice, age):
            exact, gradient, _ = gradients(choice, age)
            assert float((gradient - exact).norm() / exact.norm()) < 0.05, (choice.name, choice.old_logprobs, choice)
            allowed += 1
    assert allowed > 100


@pytest.mark.parametrize("correction", [(), ("geometric_mask",), ("negative_mask",)])
def test_what_is_said_of_recomputed_logprobs_is_off_as_far(correction: tuple[str, ...]) -> None:
    """Nothing weighs what an older version sampled."""
    choice = LossChoice(name="dapo", old_logprobs="recomputed", correction={key: {} for key in correction})
    exact, gradient, _ = gradients(choice, 4)
    assert is_said(choice, 4)
    assert float((gradient - exact).norm() / exact.norm()) > 0.05


def test_recomputed_logprobs_without_a_correction_have_a_component_of_the_wrong_sign_and_no_word_at_age_0() -> None:
    choice = LossChoice(name="dapo", old_logprobs="recomputed")
    exact, gradient, _ = gradients(choice, 4, per_version=torch.tensor([0.5, 0.1, -0.2], dtype=torch.float64))
    assert is_said(choice, 4)
    assert bool((exact * gradient < 0).any())
    assert not is_said(choice, 0)


@pytest.mark.parametrize("age", AGES)
@pytest.mark.parametrize("correction", [(), ("sequence_tis",), ("geometric_mask",)])
def test_gspo_as_it_comes_clips_nothing_while_the_policy_stands_still(age: int, correction: tuple[str, ...]) -> None:
    choice = LossChoice(name="gspo", correction={key: {} for key in correction})
    assert not is_said(choice, age)
    assert gradients(choice, age)[2] == 0.0
    assert is_said(LossChoice(name="gspo", old_logprobs="inference"), age)


def test_the_share_clipped_is_what_the_loss_takes_the_gradient_from() -> None:
    """Two rollouts of two tokens: each token of the first lies outside of the clip, its geometric mean within."""
    logprobs = torch.full((4,), -1.0, dtype=torch.float64, requires_grad=True) * 1.0
    moved = torch.tensor([0.1, -0.1, 0.1, 0.1], dtype=torch.float64)
    tokens = TrainedTokens(
        logprobs=logprobs,
        entropy=torch.zeros(4, dtype=torch.float64),
        inference_logprobs=logprobs.detach() - moved,
        advantages=torch.ones(4, dtype=torch.float64),
        rollout=torch.tensor([0, 0, 1, 1]),
    )

    def clipped(name: str, **values: float) -> list[bool]:
        choice = LossChoice(name=name, old_logprobs="inference", options=values)
        return list(clipped_of(tokens, per_token_of(tokens, choice)).tolist())

    bounds = {"clip_low": 0.05, "clip_high": 0.05}
    assert clipped("gspo", **bounds) == [False, False, True, True]
    assert clipped("dapo", **bounds) == [True, False, True, True]  # below 1 - 0.05 with A > 0 keeps its gradient
    assert clipped("ratio") == clipped("cispo") == [False] * 4
    assert clipped("masked_ratio", low=0.95, high=1.05) == [True] * 4
