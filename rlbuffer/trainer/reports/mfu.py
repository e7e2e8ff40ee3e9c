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


class Utilization:
    """What a policy's tokens cost, against what one rank's device could do.

    Args:
        parameters: of the whole model, also where this rank holds a part of it.
        passes: times that a step is trained.
    """

    def __init__(self, model: Any, parameters: int, device: torch.device, *, passes: int) -> None:
        config = model.config.get_text_config()
        layers, heads, size = (
            getattr(config, name, 0) or 0 for name in ("num_hidden_layers", "num_attention_heads", "hidden_size")
        )
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        is_tied = head is not None and embedding.weight is head.weight
        self._parameters = parameters - (0 if is_tied else embedding.weight.numel())
        width = heads * (getattr(config, "head_dim", None) or size // max(1, heads))
        self._per_square = 6 * layers * width * passes
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        self._peak = next((peak for part, peak in PEAK_FLOPS.items() if part in name), 0.0)

    def flops(self, tokens: float, squares: float) -> float:
        """Of `tokens`, those of all passes; `squares`: sum of the rollouts' squared lengths."""
        return 6.0 * self._parameters * tokens + self._per_square * squares

    def share(self, tokens: float, squares: float, seconds: float) -> float | None:
        """Their share of so many seconds of one device; None where its peak is not known, as a CPU's."""
        return self.flops(tokens, squares) / (seconds * self._peak) if self._peak else None
