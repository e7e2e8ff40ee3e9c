"""Losses that weigh the policy gradient by the ratio r = pi / pi_old: capped, penalised or masked, not clipped."""

from __future__ import annotations

import torch
from torch import Tensor

from rlbuffer.config.losses import CispoOptions, DppoOptions, KlCovOptions, MaskOptions, RatioOptions
from rlbuffer.trainer.losses.tokens import TrainedTokens, ratio_of


def capped_ratio(tokens: TrainedTokens, options: RatioOptions) -> Tensor:
    """``-min(r, cap) A``: plain importance weighting; the cap keeps one unlikely token from ruling the step.

    Shapes: -> [N]. Source: importance-weighted REINFORCE, with the cap of ACER, arXiv 1611.01224, section 3.
    """
    return -tokens.ratio.clamp(max=options.max_ratio) * tokens.advantages


def kl_cov(tokens: TrainedTokens, options: KlCovOptions) -> Tensor:
    """``-r A``, plus ``coefficient |logprob - old|`` for the selected tokens.

    Selected is the fraction `cov_fraction` of the update's tokens with the largest
    (A - mean A)(logprob - mean logprob): the ones whose gradient costs the policy most entropy.

    Shapes: -> [N]. Source: The Entropy Mechanism of RL, arXiv 2505.22617, section 4.3.
    """
    loss = -tokens.ratio * tokens.advantages
    if tokens.is_selected is None:
        return loss
    penalty = options.cov_coefficient * (tokens.logprobs - tokens.old).abs()
    return torch.where(tokens.is_selected, loss + penalty, loss)


def cispo(tokens: TrainedTokens, options: CispoOptions) -> Tensor:
    """``-sg(min(r, cap)) A logprob``: the weight is capped, and no token loses its gradient.

    Shapes: -> [N]; sg stops the gradient. Source: CISPO, MiniMax-M1, arXiv 2506.13585, section 3.1; the one-sided cap
    as in ScaleRL, 2510.13786, section 3.2.

    Example, with ratios of 1 and e^3, about 20, of which 8 is left:
        >>> tokens = TrainedTokens(
        ...     logprobs=torch.tensor([-1.0, -1.0]),
        ...     entropy=torch.zeros(2),
        ...     inference_logprobs=torch.tensor([-1.0, -4.0]),
        ...     advantages=torch.tensor([0.5, 0.5]),
        ...     rollout=torch.tensor([0, 0]),
        ... )
        >>> cispo(tokens, CispoOptions(max_ratio=8.0)).tolist()
        [0.5, 4.0]
    """
    weight = tokens.ratio.clamp(max=options.max_ratio).detach()
    return -weight * tokens.advantages * tokens.logprobs


def masked_ratio(tokens: TrainedTokens, options: MaskOptions) -> Tensor:
    """``-r A`` where `low` <= r <= `high`, else 0: a token that has moved too far teaches nothing, either
    way.

    Shapes: -> [N]; masked tokens still count in the divisor. Source: IcePop, "Small leak can sink a great ship"
    (Ling team, 2025), the mask; as a loss of its own in prime-rl 0.3.
    """
    ratio = tokens.ratio
    is_kept = (ratio >= options.low) & (ratio <= options.high)
    return torch.where(is_kept, -ratio * tokens.advantages, torch.zeros_like(ratio))


def dppo_tv(tokens: TrainedTokens, options: DppoOptions) -> Tensor:
    """``-keep A r + penalty (logprob - old)^2``, with d = pi - pi_old, the probability that has moved.

    A token is dropped where it already went far enough the way it is pushed: A > 0 and d > `tv_high`, or A <= 0 and
    d < -`tv_low`. |d| bounds the total variation, which a ratio does not: rare tokens may change by large factors.
    The penalty holds for dropped tokens, too.

    Shapes: -> [N]. Source: DPPO (binary TV), arXiv 2602.04879, section 4; the square from Kimi K2.5, 2602.02276; both
    together as prime-rl's default.
    """
    log_ratio = tokens.logprobs - tokens.old
    moved = torch.exp(tokens.logprobs) - torch.exp(tokens.old)
    is_dropped = torch.where(tokens.advantages > 0, moved > options.tv_high, moved < -options.tv_low)
    gain = torch.where(is_dropped, torch.zeros_like(log_ratio), tokens.advantages * ratio_of(log_ratio))
    return -gain + options.tv_penalty * log_ratio.square()
