"""The share of the device's arithmetic that a step used: model FLOPs utilisation.

    FLOPs = 6 N T + 6 layers x width x sum over rollouts of L^2,   MFU = FLOPs / (seconds x ranks x peak)

N: parameters that multiply (all but an embedding that is no head), T: tokens without padding, L: tokens of a rollout.
Forward 2 N T and backward 4 N T; causal attention's two products cost half of 12 layers x width x L^2. Recomputed
activations do not count: they are no use. Source: PaLM, arXiv 2204.02311, appendix B.
"""

from __future__ import annotations

from typing import Any

import torch

PEAK_FLOPS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
}
"""Part of a GPU's name -> dense bfloat16 FLOP/s, as its maker's data sheet says; the first that fits counts."""


def peak_of(device: torch.device, setting: float) -> float:
    """FLOP/s of one rank's device: the setting, or that of a known GPU; 0 where neither is known, as on a CPU."""
    if setting or device.type != "cuda":
        return setting
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), 0.0)


class PolicyWork:
    """FLOPs that a policy needs for its tokens."""

    def __init__(self, model: Any, parameters: int) -> None:
        """`parameters`: of the whole model, also where this rank holds a part of it."""
        config = getattr(model, "config", None)
        embedding = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        tied = embedding is not None and head is not None and embedding.weight is head.weight
        idle = 0 if embedding is None or tied else embedding.weight.numel()
        self._parameters = parameters - idle
        heads, size = getattr(config, "num_attention_heads", 0) or 0, getattr(config, "hidden_size", 0) or 0
        width = heads * (getattr(config, "head_dim", None) or (size // heads if heads else 0))
        self._per_square = 6 * (getattr(config, "num_hidden_layers", 0) or 0) * width

    def flops(self, tokens: float, squares: float) -> float:
        """The model FLOPs of one forward and backward pass. `squares`: sum of the rollouts' squared lengths."""
        return 6.0 * self._parameters * tokens + self._per_square * squares
