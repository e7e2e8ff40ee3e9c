"""Attention for packed rows: every segment attends causally to itself, and nothing else.

A library's attention either needs a dense [T, T] mask for packed rows (8,192 tokens in 16 rollouts cost 5.0 CPU
seconds forward and backward that way, 0.37 this way) or a kernel package. Here the rows are cut at their boundaries
instead: short segments of similar length are gathered into one right-padded batch (causal attention never looks at
what is padded to the right, so no mask is needed), long ones are sliced one by one. Sliding windows and soft caps are
done here too: a window shorter than a batch is a band mask of that batch alone, a cap spells the softmax out. 16-bit
CUDA tensors with a window go to torch's own variable-length kernel, which needs no mask.

:data:`ATTENTION` is registered with transformers on import. Transformers builds no masks for a name that it has no mask
function for, which is what keeps the forward pass linear in the number of rollouts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike
from torch import Tensor, nn
from transformers import AttentionInterface

from rlbuffer.errors import PackedForwardError

ATTENTION = "rlbuffer_segments"
"""Name of this attention in transformers' registry: ``model.set_attn_implementation(NAME)``."""

SMALLEST_CLASS = 16
"""Tokens: segments up to this length share one batch. Longer ones share one per power of two."""

LONGEST_BATCHED = 1024
"""Tokens: longer segments are attended to one by one; gathering them would cost more than it saves."""

Mask = Callable[[], Tensor | None]
"""Gives [n, width] bool, or None where nothing is padded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """Segments attended to in one call."""

    segments: int
    width: int
    """Tokens of the longest; shorter ones are padded on the right by repeating their last token."""
    gather: Tensor | slice
    """Places of the tokens in the row: [segments * width] int64, or a slice when nothing needs to move."""
    valid: Tensor | None
    """Indices of the gathered tokens that are not padding, or None when all are."""

    def mask(self) -> Tensor | None:
        """[segments, width] bool; True where a token is not padding. None when nothing is padded."""
        if self.valid is None:
            return None
        mask = torch.zeros(self.segments * self.width, dtype=torch.bool, device=self.valid.device)
        mask[self.valid] = True
        return mask.view(self.segments, self.width)


class SegmentPlan:
    """The attention over one micro-batch's segments; made once, used by every layer.

    Shapes: ``cu_seqlens`` [S + 1], ascending from 0 to T, the segment boundaries.

    Args:
        in_one_batch: all segments in one batch, however unlike in length: every rank then makes the same calls.
    """

    def __init__(
        self, cu_seqlens: ArrayLike, device: torch.device | str = "cpu", *, in_one_batch: bool = False
    ) -> None:
        bounds = np.asarray(cu_seqlens, dtype=np.int64)
        bounds = bounds[np.concatenate(([True], np.diff(bounds) > 0))]
        lengths = np.diff(bounds)
        if bounds[0] != 0 or not len(lengths):
            raise ValueError(f"cu_seqlens must ascend from 0, got {bounds.tolist()[:8]}")
        self.tokens = int(bounds[-1])
        self.longest = int(lengths.max())
        self.cu_seqlens = torch.from_numpy(bounds.astype(np.int32)).to(device)
        """[S + 1] int32 on the device, without empty segments: what variable-length kernels take."""
        classes = np.maximum(SMALLEST_CLASS, 2 ** np.ceil(np.log2(lengths)).astype(np.int64))
        if in_one_batch:
            classes = np.full_like(classes, SMALLEST_CLASS)
        self._batches: list[_Batch] = []
        order: list[np.ndarray[Any, np.dtype[np.int64]]] = []
        for width_class in np.unique(classes):
            members = np.flatnonzero(classes == width_class)
            if len(members) == 1 or width_class > LONGEST_BATCHED:
                for i in members:
                    start, end = int(bounds[i]), int(bounds[i + 1])
                    self._batches.append(_Batch(segments=1, width=end - start, gather=slice(start, end), valid=None))
                    order.append(np.arange(start, end))
                continue
            width = int(lengths[members].max())
            column = np.arange(width)
            index = bounds[members][:, None] + np.minimum(column[None], lengths[members][:, None] - 1)
            is_valid = column[None] < lengths[members][:, None]
            self._batches.append(
                _Batch(
                    segments=len(members),
                    width=width,
                    gather=torch.from_numpy(index.reshape(-1)).to(device),
                    valid=None if is_valid.all() else torch.from_numpy(np.flatnonzero(is_valid)).to(device),
                )
            )
            order.append(index[is_valid])
        placed = np.concatenate(order)
        inverse = np.empty(self.tokens, np.int64)
        inverse[placed] = np.arange(self.tokens)
        in_order = bool((placed == np.arange(self.tokens)).all())
        self._inverse = None if in_order else torch.from_numpy(inverse).to(device)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float | None,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Causal attention inside each segment.

        Shapes: ``query`` [T, H, D], ``key`` and ``value`` [T, K, D] with K a divisor of H; -> [T, H, D].

        Args:
            scale: what scores are multiplied by; None: 1 / sqrt(D).
            window: a token attends to itself and at most `window` - 1 tokens before it; None: to all of them.
            softcap: scores become ``softcap * tanh(score / softcap)``.
        """
        grouped = query.shape[1] != key.shape[1]

        def one_batch(width: int, parts: Sequence[Tensor], _: Mask) -> Tensor:
            q, k, v = (part.transpose(1, 2) for part in parts)
            band = _band(width, window, query.device) if window is not None and window < width else None
            if softcap is not None:
                return _capped(q, k, v, scale=scale, softcap=softcap, allowed=band).transpose(1, 2)
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=band, is_causal=band is None, scale=scale, enable_gqa=grouped
            )
            return out.transpose(1, 2)

        return self.map(one_batch, query, key, value)

    def map(self, function: Callable[[int, Sequence[Tensor], Mask], Tensor], *values: Tensor) -> Tensor:
        """Runs `function` on the segments of each batch, padded on the right, and puts what it gives back in place.

        Shapes: ``values`` [T, ...]; `function` gets the width, each of them as [n, width, ...], and what gives [n,
        width] bool, True where a token is not padding (None: nowhere is padding): making it holds a GPU up, so nobody
        makes one in vain. It gives [n, width, ...]. -> [T, ...].
        """
        pieces = []
        for batch in self._batches:
            n, width = batch.segments, batch.width
            parts = [x[batch.gather].view(n, width, *x.shape[1:]) for x in values]
            out = function(width, parts, batch.mask)
            out = out.reshape(n * width, *out.shape[2:])
            pieces.append(out if batch.valid is None else out[batch.valid])
        joined = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return joined if self._inverse is None else joined[self._inverse]


def _band(width: int, window: int, device: torch.device) -> Tensor:
    """[width, width] bool; True where the row's token may attend to the column's."""
    every = torch.ones(width, width, dtype=torch.bool, device=device)
    return every.tril() & every.triu(1 - window)


def _capped(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, softcap: float, allowed: Tensor | None
) -> Tensor:
    """Attention with a soft cap on its scores, for which there is no fused kernel. -> [n, H, width, D]."""
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    width = query.shape[2]
    if allowed is None:
        allowed = torch.ones(width, width, dtype=torch.bool, device=query.device).tril()
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = softcap * torch.tanh(scores / softcap)
    wide = torch.promote_types(scores.dtype, torch.float32)
    shares = torch.softmax(scores.masked_fill(~allowed, float("-inf")), dim=-1, dtype=wide)
    return shares.to(value.dtype) @ value


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, plan: SegmentPlan, scale: float | None, window: int | None
) -> Tensor:
    """torch's own variable-length kernel: CUDA, 16 bit."""
    from torch.nn.attention.varlen import varlen_attn

    # Before torch 2.12 nobody has to say that heads share keys: the kernel sees it from the shapes.
    is_grouped = query.shape[1] != key.shape[1]
    options: dict[str, Any] = {"enable_gqa": is_grouped} if "enable_gqa" in varlen_parameters() else {}
    out = varlen_attn(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        plan.cu_seqlens,
        plan.cu_seqlens,
        plan.longest,
        plan.longest,
        scale=scale,
        window_size=(-1, 0) if window is None else (window - 1, 0),
        **options,
    )
    if not isinstance(out, Tensor):
        raise PackedForwardError("torch's variable-length attention returned more than its output")
    return out


@cache
def varlen_parameters() -> frozenset[str]:
    """What torch's variable-length kernel can be told; nothing where this torch has none."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(varlen_attn).parameters)


def can_use_varlen(query: Tensor, value: Tensor) -> bool:
    """True when torch's variable-length kernel takes these; the gathered batches do the same on any device."""
    size = query.shape[-1]
    fits = size <= 256 and size % 8 == 0 and value.shape[-1] == size
    is_narrow = query.is_cuda and query.dtype in (torch.float16, torch.bfloat16)
    return is_narrow and fits and "window_size" in varlen_parameters()


def segment_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    segments: SegmentPlan | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function registered with transformers; the model passes `segments` through from its own keyword arguments.

    Shapes: ``query`` [1, H, T, D], ``key`` and ``value`` [1, K, T, D]; -> [1, T, H, D].

    Raises:
        PackedForwardError: the layer wants what this attention does not do (sinks, a bias of its own), or the model
            did not pass `segments` on.
    """
    name = type(module).__name__
    for what, asked in {"attention sinks": s_aux, "a position bias": kwargs.get("position_bias")}.items():
        if asked is not None:
            raise PackedForwardError(f"{name} wants {what}, which the segment attention does not do")
    if segments is None:
        raise PackedForwardError(f"the model does not pass its keyword arguments on to {name}")
    if query.shape[0] != 1 or query.shape[2] != segments.tokens or key.shape[2] != segments.tokens:
        raise PackedForwardError(
            f"segment attention over {segments.tokens} tokens was given queries {list(query.shape)} and keys "
            f"{list(key.shape)}"
        )
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        # Norms and rotary tables leave float32, and no kernel but torch's own casts by itself.
        query, key, value = (x.to(torch.get_autocast_dtype(kind)) for x in (query, key, value))
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    acts = sliding_window is not None and sliding_window < segments.longest
    if acts and softcap is None and can_use_varlen(q, v):
        attended = _varlen(q, k, v, segments, scaling, sliding_window)
    else:
        attended = segments.attend(q, k, v, scale=scaling, window=sliding_window, softcap=softcap)
    return attended[None], None


AttentionInterface.register(ATTENTION, segment_attention)
