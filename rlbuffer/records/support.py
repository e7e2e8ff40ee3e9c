"""The support of restricted sampling: the tokens that top_k, top_p and min_p left, of which one was drawn.

What samples so is another distribution than the softmax over the vocabulary: a trainer that computes the latter is
wrong by the mass that was cut, and by its gradient. The cut moves with the policy, so nobody can find it out later: the
sampler records it, as a column.

The column ``support`` is [T, W] int32: the ids that were left, in any order, and -1 behind them. W may differ between
rollouts. A row without its own token is no record: such a token is of the whole vocabulary.

Source: DeepSeek-V3.2, arXiv 2512.02556, section 3.1 ("Keep Sampling Mask").
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

SUPPORT = "support"
"""Name of the column."""
NO_TOKEN = -1
"""Stands behind a row's tokens."""
TOO_WIDE = -2
"""Stands first in the row of a token whose support is too wide to be kept. It is sampled, and not trained."""
TIES = 12
"""Tokens beyond top_k that a row may have: engines leave all that tie with the k-th. In bfloat16 that is 39 % of the
rows of a real model at top_k 20, none with more than 6 (docs/log.md)."""
MOST_TOP_K = 1000
"""The largest top_k, so that a row has an end."""
WIDEST = MOST_TOP_K + TIES
"""The most tokens of a row."""


def support_words(top_k: int) -> str:
    """What a record takes of the server's memory, for people.

    Example:
        >>> support_words(20)
        'at most 128 bytes a token (top_k 20, 4 bytes for each token that is left, and up to 12 more where some tie)'
    """
    most = min(top_k + TIES, WIDEST)
    return (
        f"at most {4 * most} bytes a token (top_k {top_k}, 4 bytes for each token that is left, and up to {TIES} more "
        "where some tie)"
    )


def support_of(rows: Sequence[Sequence[int]], top_k: int) -> NDArray[np.int32]:
    """The tokens that an engine left, as an array.

    Whether a row is too wide depends on what stands before its token alone, so leaving it out favours no token.

    Args:
        rows: one per sampled token; an empty one is no record.
        top_k: what was asked for; a row of more than :data:`TIES` beyond it is too wide.

    Shapes: -> [C, W] int32.
    """
    most = min(top_k + TIES, WIDEST)
    widths = [len(row) for row in rows]
    out = np.full((len(rows), max((w for w in widths if w <= most), default=1) or 1), NO_TOKEN, np.int32)
    for target, row, width in zip(out, rows, widths, strict=True):
        if width > most:
            target[0] = TOO_WIDE
        else:
            target[:width] = row
    return out


def left_out(support: NDArray[np.int32], tokens: NDArray[np.int32], vocabulary: int) -> NDArray[np.bool_]:
    """What could not be drawn; nothing in a row without a record.

    Shapes: support [T, W], tokens [T] -> [T, vocabulary] bool.
    """
    ids = np.where((support >= 0) & (support < vocabulary), support, tokens[:, None])
    out = np.ones((len(support), vocabulary), np.bool_)
    np.put_along_axis(out, ids, False, axis=1)
    out[~(support == tokens[:, None]).any(axis=1)] = False
    return out


def is_support(column: NDArray[Any]) -> bool:
    """The column is of this kind: a push may have any."""
    return column.dtype == np.int32 and column.ndim == 2 and column.shape[1] <= WIDEST


def is_kept(support: NDArray[np.int32]) -> NDArray[np.bool_]:
    """[T, W] -> [T] bool: False where a support was too wide to be kept, so that its token must not be trained."""
    kept: NDArray[np.bool_] = support[:, 0] != TOO_WIDE
    return kept


def support_column(parts: Sequence[tuple[int, NDArray[np.int32] | None]]) -> NDArray[np.int32] | None:
    """The column of consecutive stretches of tokens: each its number of tokens, and its support where it has one.

    Shapes: [C, W] each -> [T, widest W] int32; None where no stretch has any.
    """
    if all(support is None for _, support in parts):
        return None
    widest = max(support.shape[1] for _, support in parts if support is not None)
    out = np.full((sum(length for length, _ in parts), widest), NO_TOKEN, np.int32)
    start = 0
    for length, support in parts:
        if support is not None:
            out[start : start + length, : support.shape[1]] = support
        start += length
    return out
