"""The table by age: how far the policy that trains is from the one that sampled, for tokens of each age.

Old tokens are off because the policy has moved; tokens of age 0 were sampled by the very weights that train them. So
what stands at age 0 is the sampler, and what grows with age is staleness. With d the trainer's logprob less the
sampler's q, sums of powers of d tell them apart: the mean of e^d is 1 for any two policies unless tokens of one cannot
be drawn by the other; another temperature makes d a line over q; and what a token surprises by (-q), less the entropy,
is 0 on average where it was drawn as it says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rlbuffer.state.step_record import DRIFT_AGES
from rlbuffer.trainer.losses.tokens import MOST_NATS, TrainedTokens

FAR_NATS = math.log(1.1)
"""A token is far off where its ratio is beyond 1.1, or below 1 / 1.1."""
SUMS = ("n", "d", "d2", "r", "r2", "k3", "far", "q", "q2", "dq", "c", "c2", "entropy")
"""Sums over tokens, in nats: d and q as above, r = e^d - 1 (which keeps the digits of a ratio near 1), k3 = r - d, and
c the surprise less the entropy."""
TAKEN = ("trained", "clipped", "corrected")
"""Counts of tokens: all, those that the loss itself takes the gradient from, those that a correction does."""


class Drift:
    """The sums of one rank's tokens in one step, by age.

    The thirteen :data:`SUMS` are of the step's first update: further ones train the same policy no more. The counts of
    :data:`TAKEN` are of all updates, as `clip_fraction` is.
    """

    def __init__(self) -> None:
        self.sums = torch.zeros(len(DRIFT_AGES), len(SUMS) + len(TAKEN), dtype=torch.float64)
        """[ages, sums], the ranks' add up."""

    @torch.no_grad()
    def add(
        self, tokens: TrainedTokens, masks: Mapping[str, Tensor], corrections: Sequence[str], *, is_first: bool
    ) -> None:
        """Takes in the tokens of a micro-batch; nothing of tokens without ages.

        Args:
            masks: stage -> [N] bool, what it leaves without a gradient.
            corrections: those stages that are corrections.
            is_first: the update is the step's first.
        """
        if tokens.ages is None or not len(tokens.ages):
            return
        none = torch.zeros_like(masks["clip"])
        corrected = torch.stack([none, *(masks[name] for name in corrections)]).any(0)
        taken = torch.stack([torch.ones_like(none), masks["clip"], corrected]).double()
        measured = _measured(tokens) if is_first else taken.new_zeros(len(SUMS), taken.shape[1])
        rows = tokens.ages.clamp(0, len(DRIFT_AGES) - 1)
        is_of = rows == torch.arange(len(DRIFT_AGES), device=rows.device)[:, None]
        self.sums += (is_of.double() @ torch.cat([measured, taken]).T).cpu()


def _measured(tokens: TrainedTokens) -> Tensor:
    """[13, N] float64: what each token adds to :data:`SUMS`. Differences beyond what a loss heeds count as that."""
    q = tokens.inference_logprobs.double()
    d = (tokens.logprobs.double() - q).clamp(-MOST_NATS, MOST_NATS)
    r, entropy = torch.expm1(d), tokens.entropy.double()
    c = -q - entropy
    far = (d.abs() > FAR_NATS).double()
    return torch.stack([torch.ones_like(d), d, d * d, r, r * r, r - d, far, q, q * q, d * q, c, c * c, entropy])


def drift_of(sums: Tensor) -> dict[str, dict[str, float]]:
    """The table of the record: age -> the numbers of its tokens; ages without tokens are left out.

    Shapes: ``sums`` [ages, sums], over all ranks.
    """
    rows = zip(DRIFT_AGES, sums.tolist(), strict=True)
    return {age: _row(dict(zip((*SUMS, *TAKEN), row, strict=True))) for age, row in rows if row[0]}


def _row(sums: Mapping[str, float]) -> dict[str, float]:
    """Means of the tokens of one age, and the standard errors of those that a verdict rests on.

    `ess` is the effective sample size over the number of tokens, 0 to 1: with w = e^d it is (sum w)^2 / (n sum w^2), in
    means mean(w)^2 / (mean(w)^2 + var(w)). So many tokens of the policy's own would say as much as these, reweighted.
    Source: Kong, "A note on importance sampling using standardized weights", University of Chicago, 1992.
    """
    count = sums["n"]
    mean = {name: sums[name] / count for name in SUMS}
    spread_q = _variance(mean["q2"], mean["q"])
    spread_d, spread_r = _variance(mean["d2"], mean["d"]), _variance(mean["r2"], mean["r"])
    slope = (mean["dq"] - mean["d"] * mean["q"]) / spread_q if spread_q else 0.0
    explained = min(slope * slope * spread_q, spread_d)
    return {
        "tokens": count,
        "ratio": 1.0 + mean["r"],
        "ratio_error": math.sqrt(spread_r / count),
        "ess": (1.0 + mean["r"]) ** 2 / ((1.0 + mean["r"]) ** 2 + spread_r),
        "far": mean["far"],
        "mean": mean["d"],
        "rms": math.sqrt(mean["d2"]),
        "kl": mean["k3"],
        "slope": slope,
        "slope_error": math.sqrt((spread_d - explained) / spread_q / count) if spread_q else 0.0,
        "fit": explained / spread_d if spread_d else 0.0,
        "surprise": mean["c"],
        "surprise_error": math.sqrt(_variance(mean["c2"], mean["c"]) / count),
        "entropy": mean["entropy"],
        "clipped": sums["clipped"] / sums["trained"],
        "corrected": sums["corrected"] / sums["trained"],
    }


def _variance(square: float, mean: float) -> float:
    """From the mean of the squares; a difference that is rounding is none."""
    variance = square - mean * mean
    return variance if variance > 1e-12 * square else 0.0
