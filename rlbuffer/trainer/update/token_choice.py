"""A pass over the micro-batches without gradients, for what must be known of all tokens before the first gradient.

Two things need it: ratios against the policy that a step started from, where the step has several updates; and tokens
that are chosen among all of an update's (kl_cov, clip_cov, the top fraction by entropy), on all ranks together. Where
nothing needs it, nothing is run.

With one update in the step the policy at its start is the one being trained: its logprobs are those of the training
pass itself, without their gradient, and cost nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rlbuffer.config.losses import LossChoice
from rlbuffer.records.micro_batch import MicroBatch
from rlbuffer.trainer.losses import TrainedTokens, get_loss, uses_old
from rlbuffer.trainer.losses.selection import Total, largest, means_of

Forward = Callable[[nn.Module, MicroBatch], TrainedTokens]
"""Runs the policy over a micro-batch that is on its device."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Known:
    """The facts about one micro-batch's trained tokens before its training pass; fields as in `TrainedTokens`."""

    old_logprobs: Tensor | None = None
    is_selected: Tensor | None = None
    is_uncertain: Tensor | None = None
    starts_here: bool = False
    """The policy being trained is the old one."""

    def add_to(self, tokens: TrainedTokens) -> TrainedTokens:
        """`tokens` with what is known of them."""
        old = tokens.logprobs.detach() if self.starts_here else self.old_logprobs
        return replace(tokens, old_logprobs=old, is_selected=self.is_selected, is_uncertain=self.is_uncertain)


@torch.no_grad()
def old_logprobs(
    policy: nn.Module, micro_batches: Sequence[MicroBatch], forward: Forward, device: torch.device
) -> list[Tensor]:
    """[N] logprobs per micro-batch under the policy as it is now."""
    return [forward(policy, micro_batch.to(device)).logprobs for micro_batch in micro_batches]


def collect_known(
    policy: nn.Module,
    micro_batches: Sequence[MicroBatch],
    choice: LossChoice,
    *,
    old: Sequence[Tensor] | None,
    forward: Forward,
    total: Total,
    device: torch.device,
) -> list[Known]:
    """Collects what is known before an update over `micro_batches`.

    All ranks call it for the same update, since they choose together. `total` adds up over ranks; `old` is what
    :func:`old_logprobs` gave at the start of the step, where it ran.
    """
    starts_here = old is None and uses_old(choice)
    old_values: Sequence[Tensor | None] = [None] * len(micro_batches) if old is None else old
    known = [Known(old_logprobs=logprobs, starts_here=starts_here) for logprobs in old_values]
    chooses = get_loss(choice.name).score is not None or choice.top_entropy < 1
    if not chooses:
        return known
    with torch.no_grad():
        parts = [
            replace(k.add_to(forward(policy, m.to(device))), draws=_draws(m, device))
            for k, m in zip(known, micro_batches, strict=True)
        ]
        selected, uncertain = choose(parts, choice, total)
    return [replace(k, is_selected=s, is_uncertain=u) for k, s, u in zip(known, selected, uncertain, strict=True)]


def choose(
    parts: Sequence[TrainedTokens], choice: LossChoice, total: Total
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Chooses among the tokens of all `parts` of all ranks. -> per part: selected by the loss, of high entropy."""
    loss = get_loss(choice.name)
    nothing: list[Tensor | None] = [None] * len(parts)
    selected, uncertain = nothing, nothing
    means = means_of(parts, total)
    if loss.score is not None:
        count = max(1, int(choice.options.cov_fraction * means.tokens))
        selected = [*largest([loss.score(part, choice.options, means) for part in parts], count, total)]
    if choice.top_entropy < 1:
        count = max(1, round(choice.top_entropy * means.tokens))
        uncertain = [*largest([part.entropy.double() for part in parts], count, total)]
    return selected, uncertain


def _draws(micro_batch: MicroBatch, device: torch.device) -> Tensor:
    """[N] float64 in [0, 1) per trained token, by its sequence and its place there: the same however it is cut."""
    mask = np.asarray(micro_batch.loss_mask)
    names = [f"{s.rollout_id}.{s.sequence}" if s.sequence else s.rollout_id for s in micro_batch.samples]
    seeds = np.array([*map(_seed, names)], dtype=np.uint64)
    places = np.asarray(micro_batch.position_ids)[mask].astype(np.uint64)
    if not len(places):
        return torch.zeros(0, dtype=torch.float64, device=device)
    return torch.from_numpy(_mixed(seeds[np.asarray(micro_batch.sample_index)[mask]] + places * _GOLDEN)).to(device)


def _seed(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mixed(state: NDArray[np.uint64]) -> NDArray[np.float64]:
    """splitmix64's output function, as a fraction. Source: Steele, Lea and Flood 2014, "Fast splittable PRNGs"."""
    with np.errstate(over="ignore"):
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((state ^ (state >> np.uint64(31))) >> np.uint64(11)).astype(np.float64) * 2.0**-53
