"""Logprobs and entropies of tokens without ever holding the logits of a whole row.

At T = 4,096 tokens and V = 32,000 symbols, logits, their softmax and both gradients peak at 1.5 GB; recomputing them
chunk by chunk in the backward pass peaks at 0.14 GB and costs one more matrix product.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK_ELEMENTS = 2**23
"""Logits held at once (chunk tokens x V): 32 MiB in float32."""


def chunk_tokens(vocabulary: int) -> int:
    """Tokens whose logits are held at once."""
    return max(1, CHUNK_ELEMENTS // max(1, vocabulary))


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: Tensor | float) -> Tensor:
    """[n, V] logits over the temperature, in float32 at least."""
    logits = torch.nn.functional.linear(hidden, weight, bias)
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    return logits / (temperature if isinstance(temperature, float) else temperature[:, None].to(logits.dtype))


class _ChunkedHead(torch.autograd.Function):
    """(hidden [N, D], weight [V, D], bias [V] | None, targets [N]) -> (logprobs [N], entropy [N]).

    With p = softmax(z), z the logits: d logprob / dz_j = [j = target] - p_j, and d entropy / dz_j = -p_j (log p_j + H).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: Tensor | float,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropies = [], []
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            scale = temperature if isinstance(temperature, float) else temperature[part]
            log_p = torch.log_softmax(_logits(hidden[part], weight, bias, scale), dim=-1)
            logprobs.append(log_p.gather(1, targets[part, None])[:, 0])
            entropies.append(-(log_p.exp() * log_p).sum(-1))
        ctx.save_for_backward(hidden, weight, bias, targets, temperature if isinstance(temperature, Tensor) else None)
        ctx.temperature = temperature if isinstance(temperature, float) else 0.0
        ctx.chunk = chunk
        return torch.cat(logprobs), torch.cat(entropies)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, temperatures = ctx.saved_tensors
        of_logprobs, of_entropy = gradients
        d_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        # A sum over chunks in 16 bit would lose what the chunks beyond the first few add.
        wide = torch.float32 if weight.dtype in (torch.float16, torch.bfloat16) else weight.dtype
        d_weight = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None
        d_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and ctx.needs_input_grad[2] else None
        for start in range(0, len(hidden), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            scale = ctx.temperature if temperatures is None else temperatures[part]
            log_p = torch.log_softmax(_logits(hidden[part], weight, bias, scale), dim=-1)
            p = log_p.exp()
            entropy = -(p * log_p).sum(-1, keepdim=True)
            d = -p * (of_logprobs[part, None] + of_entropy[part, None] * (log_p + entropy))
            d.scatter_add_(1, targets[part, None], of_logprobs[part, None].to(d.dtype))
            d = d / (scale if isinstance(scale, float) else scale[:, None].to(d.dtype))
            if d_bias is not None:
                d_bias += d.sum(0)
            narrow = d.to(weight.dtype)
            if d_hidden is not None:
                d_hidden[part] = narrow @ weight
            if d_weight is not None:
                d_weight += (narrow.T @ hidden[part]).to(wide)
        return (
            d_hidden,
            None if d_weight is None else d_weight.to(weight.dtype),
            None if d_bias is None or bias is None else d_bias.to(bias.dtype),
            None,
            None,
            None,
        )


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: Tensor | float = 1.0,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of the distribution it comes from, both differentiable.

    Shapes: ``hidden`` [N, D] (the hidden state that predicts the target), ``weight`` [V, D], ``targets`` [N] int64,
    ``temperature`` a number or [N]; -> ([N], [N]) in float32 at least. Units: nats.

    Source: chunks recomputed in the backward pass as in Liger Kernel's fused cross entropy, arXiv 2410.10989.
    """
    if not len(hidden):
        # Keeps every parameter in the graph, so that a rank without trained tokens joins the gradient exchange.
        nothing = hidden.sum(-1) + 0.0 * weight.sum() + (0.0 if bias is None else 0.0 * bias.sum())
        return nothing, nothing
    if isinstance(temperature, int):
        temperature = float(temperature)
    size = chunk or chunk_tokens(len(weight))
    logprobs, entropy = _ChunkedHead.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, targets, temperature, size
    )
    return logprobs, entropy
