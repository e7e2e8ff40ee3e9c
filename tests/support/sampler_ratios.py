"""Ratios of what a worker pushes to what the trainer computes, for the settings that every sampler may have."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from rlbuffer.config.settings import WorkerSettings
from rlbuffer.packing.pack import pack
from rlbuffer.records.group import Ticket
from rlbuffer.trainer.model.packed_policy import prepare
from rlbuffer.trainer.update.update import trained_tokens
from rlbuffer.worker.envs.digits import VCopy
from rlbuffer.worker.group_maker import GroupMaker
from rlbuffer.worker.samplers import Sampler

RATIO_TOLERANCE = 1e-5
SETTINGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "temperature 0.5": {"temperature": 0.5},
    "temperature 1.5": {"temperature": 1.5},
    "max_new_tokens": {"max_new_tokens": 2},
    "top_p": {"top_p": 0.6},
}
"""Settings of sampling that a worker may have, of every sampler."""


async def ratios_to_the_trainer(sampler: Sampler, model: PreTrainedModel, changed: dict[str, Any]) -> np.ndarray:
    """[N] ratios at age 0 of every token that a worker with such settings would push, as `rlbuffer train` has them."""
    settings = WorkerSettings(env="vcopy", group_size=8, **changed)
    maker = GroupMaker(VCopy(), sampler, settings, worker="w")
    groups = [
        await maker.make(Ticket(env="vcopy", number=number, group_id=f"vcopy.{number}"), maker.prompt(number))
        for number in range(4)
    ]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    row = pack(rollouts, row_tokens=sum(rollout.length for rollout in rollouts))
    with torch.no_grad():
        tokens = trained_tokens(prepare(copy.deepcopy(model)), row.to("cpu"))
    assert len(tokens.logprobs) >= len(rollouts) == 32
    return (tokens.logprobs.double() - tokens.inference_logprobs.double()).exp().numpy()


def check_name(check: Any) -> str:
    """For test ids."""
    return check.__name__ if callable(check) else str(check)
