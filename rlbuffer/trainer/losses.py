"""Losses by name: pure functions of per-token tensors, each with the count over all ranks that it divides by.

With r = exp(logprob - inference logprob) and A the advantage:

========  ===================================================  =====================================
name      loss per token                                       divided by
========  ===================================================  =====================================
clip      -min(r A, clip(r, 1 - low, 1 + high) A)              rollouts (of the mean over its tokens)
dapo      the same                                             trained tokens
dr_grpo   the same                                             rollouts x longest length
ratio     -min(r, cap) A                                       trained tokens
========  ===================================================  =====================================

A KL term to the column ``ref_logprobs``, beta (exp(d) - d - 1) with d = ref - logprob, adds to each of them. An
entropy bonus is the mean over all trained tokens, whatever the loss divides by.

Nothing here is a mean over a micro-batch: every term is a sum, and the divisor is a constant of the whole update. So a
step gives the same gradient in however many pieces and on however many ranks it is trained, where a mean of means was
24 % off.

Source: GRPO (arXiv 2402.03300), DAPO (2503.14476), Dr. GRPO (2503.20783), PPO (1707.06347).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rlbuffer.batches import Normalizers
from rlbuffer.errors import ConfigError
from rlbuffer.settings import TrainerSettings

Divisor = Literal["rollouts", "tokens", "longest"]
"""``rollouts``: each rollout's mean over its trained tokens, over the update's rollouts. ``tokens``: the update's
trained tokens. ``longest``: rollouts x a constant number of tokens."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainedTokens:
    """The trained tokens of one micro-batch."""

    logprobs: Tensor
    """[N] under the policy being trained, differentiable; nats."""
    entropy: Tensor
    """[N] of the distribution that each token comes from, differentiable; nats."""
    inference_logprobs: Tensor
    """[N] under the policy version that sampled; nats."""
    advantages: Tensor
    """[N]."""
    rollout: Tensor
    """[N] int64; which rollout of the micro-batch a token belongs to."""
    ref_logprobs: Tensor | None = None
    """[N] under the reference policy; nats."""

    @property
    def ratio(self) -> Tensor:
        """[N] probability under the policy over probability when sampled."""
        return torch.exp(self.logprobs - self.inference_logprobs)


TokenLoss = Callable[[TrainedTokens, TrainerSettings], Tensor]
"""(tokens, settings) -> [N] loss per token, differentiable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A registered loss."""

    name: str
    per_token: TokenLoss
    divisor: Divisor


_LOSSES: dict[str, Loss] = {}


def register_loss(name: str, per_token: TokenLoss, *, divisor: Divisor = "tokens") -> None:
    """Makes a loss available as ``trainer.loss = name``."""
    if divisor not in ("rollouts", "tokens", "longest"):
        raise ConfigError(f"loss {name!r}: divisor {divisor!r} must be rollouts, tokens or longest")
    _LOSSES[name] = Loss(name=name, per_token=per_token, divisor=divisor)


def get_loss(name: str) -> Loss:
    """The loss registered as `name`.

    Raises:
        ConfigError: there is none.
    """
    if name not in _LOSSES:
        raise ConfigError(
            f"trainer.loss = {name!r} is not a loss: {', '.join(sorted(_LOSSES))}", setting="trainer.loss"
        )
    return _LOSSES[name]


def clipped(tokens: TrainedTokens, settings: TrainerSettings) -> Tensor:
    """[N]: the pessimistic one of the ratio's and the clipped ratio's gain."""
    ratio = tokens.ratio
    within = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    return -torch.minimum(ratio * tokens.advantages, within * tokens.advantages)


def capped_ratio(tokens: TrainedTokens, settings: TrainerSettings) -> Tensor:
    """[N]: plain importance weighting; the cap keeps one unlikely token from ruling the step."""
    return -tokens.ratio.clamp(max=settings.max_ratio) * tokens.advantages


register_loss("clip", clipped, divisor="rollouts")
register_loss("dapo", clipped, divisor="tokens")
register_loss("dr_grpo", clipped, divisor="longest")
register_loss("ratio", capped_ratio, divisor="tokens")


def kl_to_reference(tokens: TrainedTokens) -> Tensor:
    """[N] >= 0: unbiased estimate, per token, of the KL divergence from the policy to the reference.

    Source: the k3 estimator, as in GRPO.
    """
    if tokens.ref_logprobs is None:
        raise ConfigError(
            "trainer.kl_beta is above 0, but the rollouts carry no column ref_logprobs: push it with them, "
            "or set trainer.kl_beta = 0",
            setting="trainer.kl_beta",
        )
    difference = tokens.ref_logprobs - tokens.logprobs
    return torch.exp(difference) - difference - 1


def loss_of(tokens: TrainedTokens, settings: TrainerSettings, normalizers: Normalizers, *, longest: int) -> Tensor:
    """This micro-batch's share of the update's loss, a scalar: over all micro-batches of all ranks, shares add up.

    `normalizers` are the update's counts over all ranks; `longest` is the constant of dr_grpo, in tokens, used where
    ``settings.max_length`` is 0.
    """
    loss = get_loss(settings.loss)
    per_token = loss.per_token(tokens, settings)
    if settings.kl_beta:
        per_token = per_token + settings.kl_beta * kl_to_reference(tokens)
    total = (per_token * token_weights(loss.divisor, tokens.rollout, per_token)).sum()
    total = total / divisor_of(loss.divisor, normalizers, settings.max_length or longest)
    if settings.entropy_bonus:
        total = total - settings.entropy_bonus * tokens.entropy.sum() / max(1, normalizers.loss_tokens)
    return total


def token_weights(divisor: Divisor, rollout: Tensor, like: Tensor) -> Tensor:
    """[N] weight of each token: one over its rollout's trained tokens for ``rollouts``, else 1.

    A rollout is never cut over micro-batches, so its own count is known here.
    """
    if divisor != "rollouts" or not len(rollout):
        return torch.ones_like(like)
    counts = torch.bincount(rollout)
    return 1.0 / counts[rollout].to(like.dtype)


def divisor_of(divisor: Divisor, normalizers: Normalizers, longest: int) -> int:
    """What the weighted sum over all ranks is divided by."""
    if divisor == "rollouts":
        return max(1, normalizers.rollouts)
    if divisor == "tokens":
        return max(1, normalizers.loss_tokens)
    return max(1, normalizers.rollouts * longest)
