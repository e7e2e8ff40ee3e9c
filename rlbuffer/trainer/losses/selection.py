"""Choosing tokens over a whole update: the k with the largest scores, on all ranks together.

Some losses treat a few of the update's tokens in another way: those of the largest covariance (kl_cov, clip_cov), those
of the highest entropy. Choosing them in each micro-batch would choose others for each way to cut the update. So scores
come from a pass without gradients over all of it, and the k-th largest score of all ranks is found exactly, by
counting: eight small histograms, one per byte of a float64, and no scores travel.

Chosen is every token whose score is at least the k-th largest: with equal scores at the border more than k.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlbuffer.config.losses import ClipCovOptions
from rlbuffer.trainer.losses.tokens import TrainedTokens

Total = Callable[[Tensor], Tensor]
"""[n] of this rank -> [n], the sum over all ranks, on the CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """Means over all trained tokens of the update."""

    tokens: int
    advantage: float
    logprob: float
    """Nats."""


Score = Callable[[TrainedTokens, Any, Means], Tensor]
"""(tokens, options, means of the update) -> [N] float64; -inf where a token is never chosen."""


def covariance(tokens: TrainedTokens, options: Any, means: Means) -> Tensor:
    """``(A - mean A)(logprob - mean logprob)``: this token's part of the entropy's fall. -> [N] float64."""
    return (tokens.advantages.double() - means.advantage) * (tokens.logprobs.detach().double() - means.logprob)


def drawn_covariance(tokens: TrainedTokens, options: ClipCovOptions, means: Means) -> Tensor:
    """Chance among the tokens with a covariance within (`cov_low`, `cov_high`) that are not clipped. -> [N] float64.

    Chance comes from each token's rollout and place (`TrainedTokens.draws`), so it is the same however the update is
    cut, and when it is trained again.
    """
    value = covariance(tokens, options, means)
    ratio, advantages = tokens.ratio.detach(), tokens.advantages
    within = ratio.clamp(1 - options.clip_low, 1 + options.clip_high)
    is_clipped = ratio * advantages > within * advantages
    is_candidate = (value > options.cov_low) & (value < options.cov_high) & ~is_clipped
    draws = torch.zeros_like(value) if tokens.draws is None else tokens.draws
    return torch.where(is_candidate, draws, torch.full_like(value, -torch.inf))


SCORES: dict[str, Score] = {"kl_cov": covariance, "clip_cov": drawn_covariance}
"""Of the losses that choose tokens."""


def means_of(parts: Sequence[TrainedTokens], total: Total) -> Means:
    """Means over `parts` of all ranks."""
    sums = torch.zeros(3, dtype=torch.float64)
    for part in parts:
        counted = torch.tensor(float(len(part.advantages)), dtype=torch.float64)
        sums += torch.stack(
            (part.advantages.double().sum().cpu(), part.logprobs.detach().double().sum().cpu(), counted)
        )
    advantage, logprob, count = total(sums).tolist()
    return Means(tokens=int(count), advantage=advantage / max(1.0, count), logprob=logprob / max(1.0, count))


def largest(scores: Sequence[Tensor], count: int, total: Total) -> list[Tensor]:
    """Marks the scores among the `count` largest of all ranks. [N] float64 each -> [N] bool each; -inf never is."""
    keys = [_ordered(part) for part in scores]
    is_candidate = [part > -torch.inf for part in scores]
    alive = torch.cat([key[is_in] for key, is_in in zip(keys, is_candidate, strict=True)]).cpu()
    if int(total(torch.tensor([len(alive)]))[0]) <= count:
        return is_candidate
    border = 0
    for shift in range(56, -1, -8):
        # The highest byte holds the sign: 128 more makes its order that of the numbers.
        digits = (alive >> shift) + 128 if shift == 56 else (alive >> shift) & 255
        counts = total(torch.bincount(digits, minlength=256))
        at_least = counts.flip(0).cumsum(0).flip(0)
        digit = int(torch.nonzero(at_least >= count).max())
        count -= int(at_least[digit] - counts[digit])
        border += (digit - 128 if shift == 56 else digit) << shift
        alive = alive[digits == digit]
    return [(key >= border) & is_in for key, is_in in zip(keys, is_candidate, strict=True)]


def _ordered(values: Tensor) -> Tensor:
    """[N] int64 in the order of the float64 `values`: the bits, those below the sign turned over where negative."""
    bits = (values.double() + 0.0).view(torch.int64)  # + 0.0 makes -0.0 the same as 0.0
    return bits ^ ((bits >> 63) & 0x7FFF_FFFF_FFFF_FFFF)
