"""Trained tokens, as a loss is given them: by the probability of each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlbuffer.trainer.losses import TrainedTokens

POLICY = [0.5, 0.9, 0.3, 0.1]
INFERENCE = [0.4, 0.5, 0.35, 0.6]
ADVANTAGES = [1.0, 1.0, -1.0, -1.0]


def logs(probabilities: list[float]) -> Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log()


def tokens(policy: list[float] = POLICY, rollout: list[int] | None = None, **fields: Any) -> TrainedTokens:
    """Of one rollout when `rollout` names none."""
    logprobs, count = logs(policy), len(policy)
    values = {
        "logprobs": logprobs,
        "entropy": -logprobs,
        "inference_logprobs": logs(INFERENCE[:count]),
        "advantages": torch.tensor(ADVANTAGES[:count], dtype=torch.float64),
        "rollout": torch.tensor(rollout or [0] * count),
    }
    return TrainedTokens(**(values | fields))
