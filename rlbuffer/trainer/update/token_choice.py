"""Tokens chosen among all of an update's, on all ranks together: kl_cov, clip_cov, the top fraction by entropy."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlbuffer.config.losses import LossChoice
from rlbuffer.records.micro_batch import MicroBatch
from rlbuffer.trainer.losses import TrainedTokens, get_loss
from rlbuffer.trainer.losses.selection import Total, largest, means_of


def chooses(choice: LossChoice) -> bool:
    """True where a loss is on some of an update's tokens, or treats some of them in another way."""
    return get_loss(choice.name).score is not None or choice.top_entropy < 1


@torch.no_grad()
def choose(parts: Sequence[TrainedTokens], choice: LossChoice, total: Total) -> list[dict[str, Tensor]]:
    """Chooses among the tokens of all `parts` of all ranks. -> per part its `is_selected` and `is_uncertain`, where
    the loss has them. `total` adds up over ranks."""
    loss, means = get_loss(choice.name), means_of(parts, total)
    chosen: list[dict[str, Tensor]] = [{} for _ in parts]
    if loss.score is not None:
        count = max(1, int(choice.options.cov_fraction * means.tokens))
        scores = [loss.score(part, choice.options, means) for part in parts]
        for fields, mask in zip(chosen, largest(scores, count, total), strict=True):
            fields["is_selected"] = mask
    if choice.top_entropy < 1:
        count = max(1, round(choice.top_entropy * means.tokens))
        for fields, mask in zip(chosen, largest([p.entropy.double() for p in parts], count, total), strict=True):
            fields["is_uncertain"] = mask
    return chosen


def draws(micro_batch: MicroBatch, device: torch.device) -> Tensor:
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
