"""RMS norms in float64, where the library's own round to float32 in between.

float64 is there to show that sums over ranks agree; a norm that rounds turns differences of 1e-16 into 1e-8.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

PLAIN_NORMS = frozenset({"LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm", "Qwen3MoeRMSNorm"})
"""Norms known to be weight * x / sqrt(mean(x^2) + epsilon); others keep their own arithmetic."""


def norms_in_float64(model: PreTrainedModel) -> None:
    """Lets the norms of :data:`PLAIN_NORMS` compute in the dtype of what they are given."""
    for module in model.modules():
        epsilon = getattr(module, "variance_epsilon", None)
        weight = getattr(module, "weight", None)
        is_plain = type(module).__name__ in PLAIN_NORMS
        if is_plain and isinstance(epsilon, float) and isinstance(weight, nn.Parameter):
            module.forward = MethodType(_exact_norm, module)  # bound: a copy of the model asks its own weights


def _exact_norm(module: Any, hidden_states: Tensor) -> Tensor:
    weight = module.weight  # asked for each time: sharding puts another tensor there
    return torch.nn.functional.rms_norm(hidden_states, (len(weight),), weight, module.variance_epsilon)
