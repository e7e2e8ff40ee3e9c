"""The input of a loss: the trained tokens of one micro-batch, and the numbers that were set for it.

Three policies may stand behind a token: the one being trained, the one that the step started from (*old*), and the one
that sampled it (*inference*: an older version, in another engine). Ratios are taken against `TrainedTokens.old`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlbuffer.errors import ConfigError
from rlbuffer.records.micro_batch import Sample

MOST_NATS = 20.0
"""Difference of logprobs above which a ratio grows no further, 4.9e8, and has no gradient. A sampler may report any
number for a token that it would hardly give; from 89 nats on its exponential is infinite, and so is every gradient."""


def ratio_of(difference: Tensor) -> Tensor:
    """``exp(min(difference, 20))``.

    Shapes: [N] -> [N]. Units: nats.
    """
    return torch.exp(difference.clamp(max=MOST_NATS))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainedTokens:
    """The trained tokens of one micro-batch. A sequence is never cut over micro-batches; the sequences of one rollout
    may lie in several. `rollout_sums` and `rollout_means` are of a sequence."""

    logprobs: Tensor
    """[N] under the policy being trained, differentiable; nats."""
    entropy: Tensor
    """[N] of the distribution that each token comes from, differentiable; nats."""
    inference_logprobs: Tensor
    """[N] under the policy version that sampled; nats."""
    advantages: Tensor
    """[N] advantage of each token."""
    rollout: Tensor
    """[N] int64; which segment of the micro-batch a token belongs to: index into `samples`."""
    samples: tuple[Sample, ...] = ()
    """The segments of the micro-batch, trained or not: env, rewards, answer, attachments, ..."""
    ages: Tensor | None = None
    """[N] int64; the policy version being trained minus the one that sampled the token. None outside of a step."""
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    """Every further column by name, [N] or [N, ...] in its own dtype, filled where a rollout came without it: see
    `lacking`. A loss that needs one asks `column` for it."""
    lacking: Mapping[str, Tensor] = field(default_factory=dict)
    """Column -> [N] bool; True where the token's rollout came without it. Only columns that some token lacks."""
    ref_logprobs: Tensor | None = None
    """[N] under the reference policy; nats."""
    old_logprobs: Tensor | None = None
    """[N] under the policy at the start of the step; nats. None: ratios are taken against the inference policy."""
    weights: Tensor | None = None
    """[N] the user's own weight of each token; None is 1."""
    is_selected: Tensor | None = None
    """[N] bool; what the loss chose among all tokens of the update (see `rlbuffer.trainer.losses.selection`)."""
    is_uncertain: Tensor | None = None
    """[N] bool; among the update's tokens of highest entropy. None: all are trained."""
    draws: Tensor | None = None
    """[N] float64 in [0, 1); chance that depends on the token's rollout and place alone."""

    @property
    def old(self) -> Tensor:
        """[N] logprobs that ratios are taken against."""
        return self.inference_logprobs if self.old_logprobs is None else self.old_logprobs

    @property
    def ratio(self) -> Tensor:
        """[N] probability under the policy over probability under the old one."""
        return ratio_of(self.logprobs - self.old)

    def column(self, name: str) -> Tensor:
        """[N] or [N, ...]: the column `name`, which every one of these tokens has. Empty where there are no tokens.

        Raises:
            ConfigError: some of them, or all, came without it; says of which envs they are.
        """
        if name in self.columns and not (envs := self.envs_without(name)):
            return self.columns[name]
        if not len(self.logprobs):
            return self.logprobs.detach()
        whose = f" of env {', '.join(envs)}" if name in self.columns else ""
        raise ConfigError(
            f"the loss reads column {name}, but the rollouts{whose} carry none: push it with them, and name it in "
            "trainer.loss.columns, so that a rollout without it is left out",
            setting="trainer.loss.columns",
        )

    def envs_without(self, name: str) -> tuple[str, ...]:
        """Envs that those of these tokens are of that lack the column `name`, where others have it."""
        if name not in self.lacking:
            return ()
        rollouts = self.rollout[self.lacking[name]].tolist()
        return tuple(sorted({self.samples[i].env for i in set(rollouts)}))

    def rollout_sums(self, values: Tensor) -> Tensor:
        """[N] -> [N]: each token gets the sum over its sequence's trained tokens."""
        if not len(values):
            return values
        sums = values.new_zeros(int(self.rollout.max()) + 1).index_add(0, self.rollout, values)
        return sums[self.rollout]

    def rollout_means(self, values: Tensor) -> Tensor:
        """[N] -> [N]: each token gets the mean over its sequence's trained tokens."""
        return self.rollout_sums(values) / self.rollout_sums(torch.ones_like(values))
