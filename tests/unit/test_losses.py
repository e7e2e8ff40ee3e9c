"""Losses: the numbers of the papers' formulas, their gradients, and what they divide by."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from trained_tokens import ADVANTAGES, INFERENCE, POLICY, tokens

from rlbuffer.config.losses import BUILT_IN_LOSSES, LOSSES, LossChoice
from rlbuffer.errors import ConfigError
from rlbuffer.records.step_plan import Normalizers
from rlbuffer.trainer.losses import (
    TrainedTokens,
    divisor_of,
    get_loss,
    kl_to_reference,
    loss_of,
)
from rlbuffer.trainer.update.token_choice import choose


def settings(**values: Any) -> LossChoice:
    """`values` of the loss's own are options; clips are 0.2 both ways."""
    read = LOSSES[values.get("name", "clip")].options
    assert read is not None
    options = {key: values.pop(key) for key in list(values) if key in read.model_fields}
    clips = {key: 0.2 for key in ("clip_low", "clip_high") if key in read.model_fields}
    return LossChoice(**values, options=clips | options)


def counts(rollouts: int = 1, loss_tokens: int = 4) -> Normalizers:
    return Normalizers(loss_tokens=loss_tokens, rollouts=rollouts, groups=1)


def test_corrections_multiply_with_each_other_and_with_the_losses_own() -> None:
    made = tokens(rollout=[0, 0, 1, 1])
    made = replace(made, old_logprobs=made.logprobs.detach())
    both = settings(name="tis", correction={"geometric_mask": {}}, normalizer="tokens")
    weights = [1.25, 1.8, 0.0, 0.0]  # the mask leaves out the second rollout
    expected = -sum(w * a for w, a in zip(weights, ADVANTAGES, strict=True)) / 4  # the ratio to itself is 1
    assert float(loss_of(made, both, counts(), longest=1)) == pytest.approx(expected)


def test_a_correction_that_would_be_one_is_refused() -> None:
    with pytest.raises(ValidationError):
        settings(name="icepop", old_logprobs="inference")
    settings(name="clip", correction={"negative_mask": {}}, old_logprobs="inference")


def test_every_loss_has_the_normaliser_of_the_table_and_a_setting_overrides_it() -> None:
    by_rollout = {"clip", "gspo", "tis"}
    for name in BUILT_IN_LOSSES:
        expected = "rollouts" if name in by_rollout else "longest" if name == "dr_grpo" else "tokens"
        assert get_loss(name).facts.divisor == expected, name
    own = loss_of(tokens(), settings(name="clip"), counts(2, 4), longest=1)
    over = loss_of(tokens(), settings(name="clip", normalizer="tokens"), counts(2, 4), longest=1)
    assert float(over) == pytest.approx(-0.1857143, abs=1e-7)
    assert float(own) == pytest.approx(-0.1857143 / 2, abs=1e-7)


def test_weights_of_tokens_weigh_the_loss_and_its_kl_and_leave_the_divisor() -> None:
    reference = torch.tensor([0.45, 0.8, 0.3, 0.2], dtype=torch.float64).log()
    chosen = settings(name="dapo", kl_beta=0.5)
    weights = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    value = loss_of(tokens(ref_logprobs=reference, weights=weights), chosen, counts(), longest=1)
    d = math.log(0.45 / 0.5)
    assert float(value) == pytest.approx((-1.2 + 0.5 * (math.exp(d) - d - 1)) / 4)


def test_the_loss_is_on_uncertain_tokens_only_and_kl_and_bonus_on_all() -> None:
    made = tokens(ref_logprobs=torch.full((4,), -1.0, dtype=torch.float64))
    chosen = settings(name="dapo", top_entropy=0.25, kl_beta=0.1, entropy_bonus=0.2)
    [fields] = choose([made], chosen, lambda values: values)
    uncertain = fields["is_uncertain"]
    assert uncertain.tolist() == [False, False, False, True]  # the least likely one
    value = loss_of(replace(made, is_uncertain=uncertain), chosen, counts(), longest=1)
    d = -1.0 - made.logprobs
    terms = 0.1 * float((d.exp() - d - 1).sum()) - 0.2 * float(made.entropy.sum())
    assert float(value) == pytest.approx((0.8 + terms) / 4)  # A < 0 and r below the clip: held at 0.8


def test_a_kl_term_without_reference_logprobs_is_refused() -> None:
    with pytest.raises(ConfigError):
        loss_of(tokens(), settings(kl_beta=0.1), counts(), longest=1)


def test_the_weighted_k3_is_unbiased_on_tokens_of_another_policy_and_k3_is_not() -> None:
    """Expectations over all tokens of a vocabulary of four, value and gradient, against the KL itself."""
    sampler, reference = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.4, 0.1, 0.25, 0.25]], dtype=torch.float64)
    logits = torch.tensor([0.5, -0.3, 0.1, 0.9], dtype=torch.float64, requires_grad=True)
    logprobs = logits.log_softmax(0)
    exact = (logprobs.exp() * (logprobs - reference.log())).sum()
    (of_exact,) = torch.autograd.grad(exact, logits, retain_graph=True)
    every = TrainedTokens(
        logprobs=logprobs,
        entropy=torch.zeros(4, dtype=torch.float64),
        inference_logprobs=sampler.log(),
        advantages=torch.zeros(4, dtype=torch.float64),
        rollout=torch.zeros(4, dtype=torch.int64),
        ref_logprobs=reference.log(),
    )
    for estimator, is_exact in (("weighted_k3", True), ("k3", False)):
        expected = (sampler * kl_to_reference(every, estimator)).sum()
        (gradient,) = torch.autograd.grad(expected, logits, retain_graph=True)
        near = [abs(float((expected - exact).detach())) < 1e-12, float((gradient - of_exact).abs().max()) < 1e-12]
        assert near == [is_exact, is_exact]


def test_the_entropy_bonus_is_a_mean_over_tokens_whatever_the_loss_divides_by() -> None:
    for name in ("clip", "dr_grpo"):
        plain = loss_of(tokens(), settings(name=name), counts(2, 8), longest=3)
        with_bonus = loss_of(tokens(), settings(name=name, entropy_bonus=0.5), counts(2, 8), longest=3)
        assert float(with_bonus - plain) == pytest.approx(-0.5 * float(tokens().entropy.sum()) / 8)


@pytest.mark.parametrize("number", [-1e12, -89.0, 1e12])
@pytest.mark.parametrize("name", [*BUILT_IN_LOSSES])
def test_any_logprob_that_a_rollout_may_bring_has_a_finite_gradient(name: str, number: float) -> None:
    """A rank that ends at a step ends at every replay of it."""
    leaf = torch.tensor(POLICY).log().requires_grad_()
    odd = torch.full((4,), number)
    made = tokens(
        logprobs=leaf,
        entropy=-leaf,
        inference_logprobs=odd,
        advantages=torch.tensor(ADVANTAGES),
        old_logprobs=torch.tensor(INFERENCE).log() if number == 1e12 else odd,
        ref_logprobs=-odd,
        is_selected=torch.tensor([False, True, False, True]),
    )
    chosen = settings(name=name, kl_beta=0.01)
    (gradient,) = torch.autograd.grad(loss_of(made, chosen, counts(), longest=4), leaf)
    assert torch.isfinite(gradient).all()
    assert torch.isfinite(gradient.square().sum())


def test_an_update_without_tokens_divides_by_one() -> None:
    assert divisor_of("tokens", counts(rollouts=0, loss_tokens=0), 0) == 1


def test_max_length_replaces_the_row_length_in_dr_grpo() -> None:
    short = loss_of(tokens(), settings(name="dr_grpo", max_length=5), counts(), longest=10)
    long = loss_of(tokens(), settings(name="dr_grpo"), counts(), longest=10)
    assert float(short) == pytest.approx(2 * float(long))
