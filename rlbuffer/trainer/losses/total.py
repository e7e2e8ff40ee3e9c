"""A micro-batch's share of the update's loss: losses per token, corrected and weighted, over counts of the update."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rlbuffer.config.losses import Divisor, LossChoice, corrections_of
from rlbuffer.records.step_plan import Normalizers
from rlbuffer.trainer.losses.corrections import CORRECTIONS
from rlbuffer.trainer.losses.registry import get_loss
from rlbuffer.trainer.losses.terms import kl_to_reference
from rlbuffer.trainer.losses.tokens import TrainedTokens


def per_token_of(tokens: TrainedTokens, choice: LossChoice) -> Tensor:
    """[N] what the loss itself gives, before corrections, weights and further terms."""
    return get_loss(choice.name).per_token(tokens, choice.options)


def weights_of(tokens: TrainedTokens, choice: LossChoice) -> dict[str, Tensor]:
    """Each correction in force -> [N] the weight that it gives, without gradient."""
    return {name: CORRECTIONS[name](tokens, options) for name, options in corrections_of(choice).items()}


def loss_of(
    tokens: TrainedTokens,
    choice: LossChoice,
    counts: Normalizers,
    *,
    longest: int,
    per_token: Tensor | None = None,
    corrections: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """This micro-batch's share of the update's loss, a scalar: over all micro-batches of all ranks, shares add up.

    Per token: (loss x corrections where it is uncertain enough, + beta KL) x the column ``weights``; then the sum over
    tokens by the divisor, minus the entropy bonus, which is a mean over all trained tokens, whatever the loss divides
    by and whichever tokens it leaves out. `counts` are the update's counts over all ranks; `longest` is the
    constant of dr_grpo, in tokens, used where its option `max_length` is 0. `per_token` is :func:`per_token_of` and
    `corrections` :func:`weights_of`, where they are known.
    """
    loss = get_loss(choice.name)
    per_token = per_token_of(tokens, choice) if per_token is None else per_token
    for weight in (weights_of(tokens, choice) if corrections is None else corrections).values():
        per_token = per_token * weight
    if tokens.is_uncertain is not None:
        per_token = torch.where(tokens.is_uncertain, per_token, torch.zeros_like(per_token))
    if choice.kl_beta:
        per_token = per_token + choice.kl_beta * kl_to_reference(tokens, choice.kl_estimator)
    if tokens.weights is not None:
        per_token = per_token * tokens.weights
    divisor = loss.facts.divisor if choice.normalizer == "auto" else choice.normalizer
    total = (per_token * token_weights(divisor, tokens).to(per_token.dtype)).sum()
    total = total / divisor_of(divisor, counts, getattr(choice.options, "max_length", 0) or longest)
    if choice.entropy_bonus:
        total = total - choice.entropy_bonus * tokens.entropy.sum() / max(1, counts.loss_tokens)
    return total


def token_weights(divisor: Divisor, tokens: TrainedTokens) -> Tensor:
    """[N] weight of each token: one over its rollout's trained tokens for ``rollouts``, else 1."""
    if divisor != "rollouts" or not len(tokens.rollout):
        return torch.ones_like(tokens.logprobs)
    counts = torch.bincount(tokens.rollout)
    for i, sample in enumerate(tokens.samples[: len(counts)]):
        if sample.sequences > 1:  # the others may be on other ranks
            counts[i] = sample.rollout_loss_tokens
    return 1.0 / counts[tokens.rollout].to(tokens.logprobs.dtype)


def divisor_of(divisor: Divisor, normalizers: Normalizers, longest: int) -> float:
    """The divisor of the weighted sum over all ranks: what the weights sum to, or 1 where nothing is trained.

    A slice's count of rollouts may be a fraction below 1.
    """
    if divisor == "rollouts":
        return normalizers.rollouts or 1
    if divisor == "tokens":
        return normalizers.loss_tokens or 1
    return normalizers.rollouts * longest or 1
