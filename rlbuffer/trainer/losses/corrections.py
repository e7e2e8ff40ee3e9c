"""Corrections: detached weights of a loss's tokens for what lies between the sampler and the trainer.

A loss with a clip around 1 wants ratios against the policy that the step started from; the samples are from another
one, older, and computed by another engine. A correction makes up for that with w = pi_old / pi_inference (behaviour
weight). Several multiply. A masked token still counts in the divisor.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rlbuffer.trainer.losses.tokens import LossSettings, TrainedTokens, ratio_of

Correction = Callable[[TrainedTokens, LossSettings], Tensor]
"""(tokens, settings) -> [N] weight per token, without gradient."""


def _log_weight(tokens: TrainedTokens) -> Tensor:
    """[N] log(pi_old / pi_inference)."""
    return (tokens.old - tokens.inference_logprobs).detach()


def _within(weight: Tensor, low: float, high: float) -> Tensor:
    return (weight >= low) & (weight <= high)


def truncated(tokens: TrainedTokens, settings: LossSettings) -> Tensor:
    """``min(w, cap)``, per token.

    Shapes: -> [N]. Source: truncated importance sampling, Yao et al. 2025, "Your efficient RL framework secretly brings
    you off-policy RL training"; as the behaviour weight of decoupled PPO: AReaL, arXiv 2505.24298, section 5.2.
    """
    return ratio_of(_log_weight(tokens)).clamp(max=settings.correction_cap)


def masked(tokens: TrainedTokens, settings: LossSettings) -> Tensor:
    """``w`` where `mask_low` <= w <= `mask_high`, else 0, per token.

    Shapes: -> [N]. Source: IcePop, "Small leak can sink a great ship" (Ling team, 2025); bounds 0.5 and 5.
    """
    weight = ratio_of(_log_weight(tokens))
    return torch.where(_within(weight, settings.mask_low, settings.mask_high), weight, torch.zeros_like(weight))


def sequence_truncated(tokens: TrainedTokens, settings: LossSettings) -> Tensor:
    """``min(product of w over the rollout's tokens, cap)``, the same for all of its tokens.

    Shapes: -> [N]. Source: Liu et al. 2025, "When speed kills stability" (sequence-level TIS).
    """
    return ratio_of(tokens.rollout_sums(_log_weight(tokens))).clamp(max=settings.correction_cap)


def sequence_masked(tokens: TrainedTokens, settings: LossSettings) -> Tensor:
    """The rollout's product of w where it is within `sequence_low` and `sequence_high`, else 0.

    Shapes: -> [N]. Source: Liu et al. 2025, "When speed kills stability" (sequence-level masked importance sampling).
    """
    weight = ratio_of(tokens.rollout_sums(_log_weight(tokens)))
    return torch.where(_within(weight, settings.sequence_low, settings.sequence_high), weight, torch.zeros_like(weight))


def geometric_mask(tokens: TrainedTokens, settings: LossSettings) -> Tensor:
    """1 where the rollout's geometric mean of w is within `sequence_low` and `sequence_high`, else 0.

    A product over a long answer leaves any bounds by itself; the mean per token does not. To be used with `tis`.

    Shapes: -> [N]. Source: Liu et al. 2025, "When speed kills stability" (geometric sequence mask).
    """
    mean = ratio_of(tokens.rollout_means(_log_weight(tokens)))
    return _within(mean, settings.sequence_low, settings.sequence_high).to(mean.dtype)


def negative_mask(tokens: TrainedTokens, settings: LossSettings) -> Tensor:
    """0 where A < 0 and the rollout's mean of log(pi_inference / pi) exceeds `mask_kl`, else 1.

    Bad answers that the policy would hardly give any more have little to teach, and much to break.

    Shapes: -> [N]. Source: off-policy sequence masking, DeepSeek-V3.2, arXiv 2512.02556, section 3.1.
    """
    drift = tokens.rollout_means((tokens.inference_logprobs - tokens.logprobs).detach())
    return ((tokens.advantages >= 0) | (drift <= settings.mask_kl)).to(drift.dtype)


CORRECTIONS: dict[str, Correction] = {
    "tis": truncated,
    "icepop": masked,
    "sequence_tis": sequence_truncated,
    "sequence_mask": sequence_masked,
    "geometric_mask": geometric_mask,
    "negative_mask": negative_mask,
}
"""Every correction by its name in ``trainer.loss.correction``."""
