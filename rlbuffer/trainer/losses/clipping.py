"""Losses that clip the ratio r = pi / pi_old around 1."""

from __future__ import annotations

import torch
from torch import Tensor

from rlbuffer.config.losses import ClipCovOptions, ClipOptions, SequenceClipOptions
from rlbuffer.trainer.losses.tokens import TrainedTokens, ratio_of


def clipped(tokens: TrainedTokens, options: ClipOptions) -> Tensor:
    """``-min(r A, clip(r, 1 - low, 1 + high) A)``: nothing is gained by moving further once the ratio has left the
    clip.

    Two-sided: with `clip_ceiling` d, r itself is at most d, so that a token with A < 0 that has become likely cannot
    weigh more than d. Dual: with `dual_clip` c, the loss of a token with A < 0 is at most -c A.

    Shapes: -> [N]. Source: PPO, arXiv 1707.06347, equation 7; GRPO, 2402.03300, section 4.1; low and high apart:
    DAPO, 2503.14476, section 3.1; two-sided: INTELLECT-2, 2505.07291, section 3.4; dual: 1912.09729, section 3.
    """
    ratio, advantages = tokens.ratio, tokens.advantages
    within = ratio.clamp(1 - options.clip_low, 1 + options.clip_high)
    if options.clip_ceiling is not None:
        ratio = ratio.clamp(max=options.clip_ceiling)
    loss = -torch.minimum(ratio * advantages, within * advantages)
    if options.dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -options.dual_clip * advantages), loss)
    return loss


def clip_cov(tokens: TrainedTokens, options: ClipCovOptions) -> Tensor:
    """`clipped`, and 0 for the few tokens that were selected: those whose gradient costs the policy most entropy.

    Selected are, by chance, a fraction `cov_fraction` of the update's tokens, among those whose
    (A - mean A)(logprob - mean logprob) is within (`cov_low`, `cov_high`) and that `clipped` does not clip.

    Shapes: -> [N]. Source: The Entropy Mechanism of RL, arXiv 2505.22617, section 4.2.
    """
    loss = clipped(tokens, options)
    return loss if tokens.is_selected is None else torch.where(tokens.is_selected, torch.zeros_like(loss), loss)


def sequence_clipped(tokens: TrainedTokens, options: SequenceClipOptions) -> Tensor:
    """``-min(s A, clip(s, 1 - low, 1 + high) A)`` with s = exp(mean over the sequence of logprob - old): one ratio for
    all of its tokens.

    The reward is given to a whole answer, so the ratio is the answer's, too: the geometric mean of its tokens' ratios.
    Tokens share it, gradient included, so the mean over a sequence's tokens is the sequence's own loss. A rollout of
    several sequences has a ratio for each, as each was sampled from a context of its own.

    Shapes: -> [N]. Source: GSPO, arXiv 2507.18071, equations 5 to 7; default clip of 3e-4 and 4e-4: section 5.1.
    """
    ratio = ratio_of(tokens.rollout_means(tokens.logprobs - tokens.old))
    within = ratio.clamp(1 - options.clip_low, 1 + options.clip_high)
    return -torch.minimum(ratio * tokens.advantages, within * tokens.advantages)
