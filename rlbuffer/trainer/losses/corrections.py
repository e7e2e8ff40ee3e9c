"""Corrections: detached weights of a loss's tokens for what lies between the sampler and the trainer.

A loss with a clip around 1 wants ratios against the policy that the step started from; the samples are from another
one, older, and computed by another engine. A correction makes up for that with w = pi_old / pi_inference (behaviour
weight). Several multiply. A masked token still counts in the divisor.

Those of whole answers go by sequence: a rollout of several has a weight for each, as each was sampled from a context of
its own, and as no rank need have them all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlbuffer.config.losses import CapOptions, DriftOptions, MaskOptions, SequenceMaskOptions
from rlbuffer.trainer.losses.tokens import TrainedTokens, ratio_of

Correction = Callable[[TrainedTokens, Any], Tensor]
"""(tokens, options) -> [N] weight per token, without gradient."""


def _log_weight(tokens: TrainedTokens) -> Tensor:
    """[N] log(pi_old / pi_inference)."""
    return (tokens.old - tokens.inference_logprobs).detach()


def _within(weight: Tensor, low: float, high: float) -> Tensor:
    return (weight >= low) & (weight <= high)


def truncated(tokens: TrainedTokens, options: CapOptions) -> Tensor:
    """``min(w, cap)``, per token.

    Shapes: -> [N]. Source: truncated importance sampling, Yao et al. 2025, "Your efficient RL framework secretly brings
    you off-policy RL training"; as the behaviour weight of decoupled PPO: AReaL, arXiv 2505.24298, section 5.2.
    """
    return ratio_of(_log_weight(tokens)).clamp(max=options.cap)


def masked(tokens: TrainedTokens, options: MaskOptions) -> Tensor:
    """``w`` where `low` <= w <= `high`, else 0, per token.

    Shapes: -> [N]. Source: IcePop, "Small leak can sink a great ship" (Ling team, 2025); bounds 0.5 and 5.
    """
    weight = ratio_of(_log_weight(tokens))
    return torch.where(_within(weight, options.low, options.high), weight, torch.zeros_like(weight))


def sequence_truncated(tokens: TrainedTokens, options: CapOptions) -> Tensor:
    """``min(product of w over the sequence's tokens, cap)``, the same for all of its tokens.

    Shapes: -> [N]. Source: Liu et al. 2025, "When speed kills stability" (sequence-level TIS).
    """
    return ratio_of(tokens.rollout_sums(_log_weight(tokens))).clamp(max=options.cap)


def sequence_masked(tokens: TrainedTokens, options: SequenceMaskOptions) -> Tensor:
    """The sequence's product of w where it is within `low` and `high`, else 0.

    Shapes: -> [N]. Source: Liu et al. 2025, "When speed kills stability" (sequence-level masked importance sampling).
    """
    weight = ratio_of(tokens.rollout_sums(_log_weight(tokens)))
    return torch.where(_within(weight, options.low, options.high), weight, torch.zeros_like(weight))


def geometric_mask(tokens: TrainedTokens, options: SequenceMaskOptions) -> Tensor:
    """1 where the sequence's geometric mean of w is within `low` and `high`, else 0.

    A product over a long answer leaves any bounds by itself; the mean per token does not. To be used with `tis`.

    Shapes: -> [N]. Source: Liu et al. 2025, "When speed kills stability" (geometric sequence mask).
    """
    mean = ratio_of(tokens.rollout_means(_log_weight(tokens)))
    return _within(mean, options.low, options.high).to(mean.dtype)


def negative_mask(tokens: TrainedTokens, options: DriftOptions) -> Tensor:
    """0 where A < 0 and the sequence's mean of log(pi_inference / pi) exceeds `most`, else 1.

    Bad answers that the policy would hardly give any more have little to teach, and much to break.

    Shapes: -> [N]. Source: off-policy sequence masking, DeepSeek-V3.2, arXiv 2512.02556, section 3.1.
    """
    drift = tokens.rollout_means((tokens.inference_logprobs - tokens.logprobs).detach())
    return ((tokens.advantages >= 0) | (drift <= options.most)).to(drift.dtype)


CORRECTIONS: dict[str, Correction] = {
    "tis": truncated,
    "icepop": masked,
    "sequence_tis": sequence_truncated,
    "sequence_mask": sequence_masked,
    "geometric_mask": geometric_mask,
    "negative_mask": negative_mask,
}
"""Every correction by its name in ``trainer.loss.correction``."""
