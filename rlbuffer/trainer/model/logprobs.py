"""Logprobs and entropies of tokens without ever holding the logits of a whole row.

At T = 4,096 tokens and V = 32,000 symbols, logits, their softmax and both gradients peak at 1.5 GB; recomputing them
chunk by chunk in the backward pass peaks at 0.14 GB and costs one more matrix product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CHUNK_ELEMENTS = {"cpu": 2**23, "cuda": 2**27}
"""Logits held at once (chunk tokens x V), at least, by kind of device. CPU: 32 MiB in float32, the size from which
glibc always maps memory of its own and gives it back. Chunks a little smaller stay in its heap, where aligned ones of
equal size never fit into each other's place: the peak was 0.9 GB instead of 0.2 (docs/log.md). CUDA: 512 MiB, since
each chunk reads the head's whole matrix: chunks of 32 MiB take three times as long."""
LEAST_NATS = -1e4
"""Logprobs end here: for a symbol that the model masks (a logit of -inf), probability times logprob is 0, and not NaN.
Below this the probability is 0 in float64, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitShape:
    """The changes that a model makes to its logits after the matrix product: first the scale, then the cap."""

    scale: float = 1.0
    """Factor (Cohere's logit_scale, one over Granite's logits_scaling)."""
    cap: float = 0.0
    """Logits become ``cap * tanh(logits / cap)`` (Gemma 2's final_logit_softcapping); 0: they are not capped."""

    def apply(self, logits: Tensor) -> Tensor:
        """The logits of which the softmax is taken."""
        if self.scale != 1.0:
            logits = logits * self.scale
        return self.cap * torch.tanh(logits / self.cap) if self.cap else logits

    def backward(self, shaped: Tensor | None, gradient: Tensor) -> Tensor:
        """The gradient before :meth:`apply`, from what it gave (needed where there is a cap) and the gradient after
        it."""
        if self.cap and shaped is not None:
            gradient = gradient * (1 - (shaped / self.cap) ** 2)
        return gradient * self.scale if self.scale != 1.0 else gradient


PLAIN = LogitShape()
"""Nothing is done to them."""


def chunk_tokens(vocabulary: int, kind: str) -> int:
    """Tokens whose logits are held at once on this kind of device."""
    return -(-CHUNK_ELEMENTS[kind] // max(1, vocabulary))


class _ChunkedHead(torch.autograd.Function):
    """(hidden [N, D], weight [V, D], bias [V] | None, targets [N], support [N, W] | None) -> (logprobs, entropy), [N]
    each.

    With p = softmax(z), z the logits: d logprob / dz_j = [j = target] - p_j, and d entropy / dz_j = -p_j (log p_j + H).
    Outside of a support z is -inf and p is 0, so both hold as they stand.

    Products are made in the dtype of `hidden`, everything else in float32 at least. So a weight kept in float32 for a
    16-bit forward pass gets a gradient in float32: a sum over chunks in 16 bit would lose what later chunks add.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        support: Tensor | None,
        temperature: Tensor | float,
        shape: LogitShape,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        narrow = weight.to(hidden.dtype)
        logprobs, entropies = [], []
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            shaped = _shaped(hidden[part], narrow, bias, shape)
            cut = None if support is None else outside(support[part], targets[part], len(weight))
            log_p = _log_softmax(shaped, _scale(temperature, part, shaped), cut)
            del shaped
            logprobs.append(log_p.gather(1, targets[part, None])[:, 0])
            entropies.append(-log_p.exp().mul_(log_p).sum(-1))
            del log_p, cut  # before the next chunk takes its place
        temperatures = temperature if isinstance(temperature, Tensor) else None
        ctx.save_for_backward(hidden, weight, bias, targets, support, temperatures)
        ctx.temperature = temperature if isinstance(temperature, float) else 0.0
        ctx.shape, ctx.chunk = shape, chunk
        return torch.cat(logprobs), torch.cat(entropies)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, support, temperatures = ctx.saved_tensors
        of_logprobs, of_entropy = gradients
        temperature = ctx.temperature if temperatures is None else temperatures
        narrow = weight.to(hidden.dtype)
        wide = torch.promote_types(weight.dtype, torch.float32)
        d_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        d_weight = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None
        d_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and ctx.needs_input_grad[2] else None
        for start in range(0, len(hidden), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            shaped = _shaped(hidden[part], narrow, bias, ctx.shape)
            scale = _scale(temperature, part, shaped)
            cut = None if support is None else outside(support[part], targets[part], len(weight))
            log_p = _log_softmax(shaped, scale, cut)
            del cut
            for_cap = shaped if ctx.shape.cap else None
            del shaped  # else the fourth of four: they are the head's peak
            p = log_p.exp()
            entropy = -(p * log_p).sum(-1, keepdim=True)
            # d = -p * (of_logprobs + of_entropy * (log_p + entropy)), in place of log_p: memory is what this is for.
            d = log_p.add_(entropy).mul_(of_entropy[part, None]).add_(of_logprobs[part, None]).mul_(p).neg_()
            del log_p, p
            d.scatter_add_(1, targets[part, None], of_logprobs[part, None].to(d.dtype))
            d = ctx.shape.backward(for_cap, d.div_(scale))
            del for_cap
            if d_bias is not None:
                d_bias += d.sum(0)
            product = d.to(hidden.dtype)
            if d_hidden is not None:
                d_hidden[part] = product @ narrow
            if d_weight is not None:
                d_weight += (product.T @ hidden[part]).to(wide)
            del d, product
        return (
            d_hidden,
            None if d_weight is None else d_weight.to(weight.dtype),
            None if d_bias is None or bias is None else d_bias.to(bias.dtype),
            None,
            None,
            None,
            None,
            None,
        )


def has_record(support: Tensor, targets: Tensor) -> Tensor:
    """[N] bool: True where a row of a column ``support`` [N, W] has its own token, so that it says what was left."""
    return (support == targets[:, None]).any(1)


def outside(support: Tensor, targets: Tensor, vocabulary: int) -> Tensor:
    """[N, V] bool: True for the tokens that restricted sampling did not leave; nowhere in a row without a record.

    Shapes: ``support`` [N, W] (:mod:`rlbuffer.records.support`), ``targets`` [N]. Ids that the model does not have
    stand for nothing.
    """
    ids = torch.where((support >= 0) & (support < vocabulary), support.long(), targets[:, None])
    is_cut = torch.ones(len(support), vocabulary, dtype=torch.bool, device=support.device).scatter_(1, ids, False)
    return is_cut.logical_and_(has_record(support, targets)[:, None])


def _shaped(hidden: Tensor, weight: Tensor, bias: Tensor | None, shape: LogitShape) -> Tensor:
    """[n, V] logits as the model gives them, in float32 at least."""
    logits = torch.nn.functional.linear(hidden, weight, None if bias is None else bias.to(hidden.dtype))
    return shape.apply(logits.to(torch.promote_types(logits.dtype, torch.float32)))


def _log_softmax(logits: Tensor, scale: Tensor | float, cut: Tensor | None) -> Tensor:
    """[n, V] of the logits over `scale`, without those that are `cut` [n, V], in a tensor of its own; nothing below
    :data:`LEAST_NATS`."""
    is_one = isinstance(scale, float) and scale == 1.0
    scaled = logits if is_one else logits / scale
    if cut is not None:
        scaled = scaled.masked_fill(cut, -torch.inf) if is_one else scaled.masked_fill_(cut, -torch.inf)
    return torch.log_softmax(scaled, dim=-1).clamp_(min=LEAST_NATS)


def _scale(temperature: Tensor | float, part: slice, logits: Tensor) -> Tensor | float:
    """The divisor of these tokens' logits."""
    return temperature if isinstance(temperature, float) else temperature[part, None].to(logits.dtype)


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    support: Tensor | None = None,
    temperature: Tensor | float = 1.0,
    shape: LogitShape = PLAIN,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of the distribution it comes from, both differentiable.

    With `support` the distribution is that over the tokens which it has, of each row that has its own target
    (:mod:`rlbuffer.records.support`).

    Shapes: ``hidden`` [N, D] (the hidden state that predicts the target), ``weight`` [V, D], ``targets`` [N] int64,
    ``support`` [N, W] integers, ``temperature`` a number or [N]; -> ([N], [N]) in float32 at least. Units: nats.

    Source: chunks recomputed in the backward pass as in Liger Kernel's fused cross entropy, arXiv 2410.10989.
    """
    if not len(hidden):
        # Keeps every parameter in the graph, so that a rank without trained tokens joins the gradient exchange.
        nothing = hidden.sum(-1) + 0.0 * weight.sum() + (0.0 if bias is None else 0.0 * bias.sum())
        return nothing, nothing
    if isinstance(temperature, int):
        temperature = float(temperature)
    size = chunk or chunk_tokens(len(weight), hidden.device.type)
    logprobs, entropy = _ChunkedHead.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, targets, support, temperature, shape, size
    )
    return logprobs, entropy
