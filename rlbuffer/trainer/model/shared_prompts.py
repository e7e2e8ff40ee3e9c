"""Rollouts that begin alike: the tokens of a packed row that a model must compute, and where their results belong.

The rollouts of a group share their prompt. A causal model gives equal hidden states to equal tokens behind equal tokens
at equal positions, so these tokens go through embeddings, projections and feed-forward layers once. Before attention
queries, keys and values are spread over the whole row again, so attention is the plain row's, with its windows, caps
and kernels, and its own work is not saved. Gradients of all copies add up in the one that was computed.

Who shares is seen from the tokens: groups whose prompts are equal share, too, and so do turns that have parted later.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

LEAST_SAVED = 0.05
"""Share of a row's tokens that must be saved: below it the row is computed plain, as spreading costs more."""


class SharedTokens(NamedTuple):
    """The tokens of a row that stand for all of them."""

    kept: Tensor
    """[K] int64, ascending: places in the row of the tokens that are computed."""
    source: Tensor
    """[T] int64: for each token of the row, the index in `kept` of the one that stands for it."""


def shared_tokens(input_ids: Tensor, cu_seqlens: Tensor) -> SharedTokens | None:
    """Finds where segments begin alike. None where that saves less than :data:`LEAST_SAVED`.

    Shapes: ``input_ids`` [T], not negative; ``cu_seqlens`` [S + 1].

    Example:
        >>> shared_tokens(torch.tensor([5, 6, 7, 5, 6, 8, 9]), torch.tensor([0, 3, 7]))
        SharedTokens(kept=tensor([0, 1, 2, 5, 6]), source=tensor([0, 1, 2, 0, 1, 3, 4]))
    """
    tokens = input_ids.cpu().numpy().astype(">i4")  # big-endian: bytes sort as the numbers do
    segments = [slice(a, b) for a, b in pairwise(cu_seqlens.tolist())]
    segments.sort(key=lambda segment: tokens[segment].tobytes())
    stands = np.arange(len(tokens))
    for before, here in pairwise(segments):
        shorter = min(before.stop - before.start, here.stop - here.start)
        differs = tokens[before][:shorter] != tokens[here][:shorter]
        alike = int(differs.argmax()) if differs.any() else shorter
        stands[here][:alike] = stands[before][:alike]
    kept, source = np.unique(stands, return_inverse=True)
    if len(tokens) - len(kept) < LEAST_SAVED * len(tokens):
        return None
    return SharedTokens(*(torch.from_numpy(array).to(input_ids.device) for array in (kept, source)))
