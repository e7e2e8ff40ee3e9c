"""The experts that took each token in: the column :data:`ROUTED_EXPERTS` of models with experts.

[T, layers, K] integers: for each token and layer the K experts that computed it, in any order. Layers are counted as
the model's, those without experts too. A row of K different experts is a record. Every other one is none: 0 in every
place, as engines leave layers without experts and the last token of a rollout, which they never take in; -1 in a signed
column; a rollout without the column.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlbuffer.errors import InvalidRollout

ROUTED_EXPERTS = "routed_experts"
"""Name of the column."""
_DTYPES = ("u1", "<u2", "<i2", "<i4")
"""Dtypes of a column, the smallest first."""


def is_record(rows: NDArray[Any]) -> NDArray[np.bool_]:
    """True where a row is a record. [..., K] -> [...] bool."""
    ordered = np.sort(rows, axis=-1)
    known: NDArray[np.bool_] = (ordered[..., 1:] != ordered[..., :-1]).all(axis=-1) & (ordered[..., 0] >= 0)
    return known


def routed_column(rows: Any, length: int) -> NDArray[Any]:
    """An engine's record as the column of a sequence of `length` tokens: in the smallest dtype that holds it, with 0
    for the tokens at the end that it does not have. [T', layers, K], T' <= length -> [length, layers, K].

    Raises:
        InvalidRollout: it is no such array of integers, or has more tokens.
    """
    given = np.asarray(rows)
    if given.ndim != 3 or given.dtype.kind not in "iu" or len(given) > length or not all(given.shape[1:]):
        raise InvalidRollout(
            f"column {ROUTED_EXPERTS}: expected integers [{length} at most, layers, K], got {given.dtype} "
            f"{list(given.shape)}"
        )
    low, high = (int(given.min()), int(given.max())) if given.size else (0, 0)
    fitting = (np.dtype(d) for d in _DTYPES if np.iinfo(d).min <= low and high <= np.iinfo(d).max)
    dtype = next(fitting, None)
    if dtype is None:
        raise InvalidRollout(f"column {ROUTED_EXPERTS}: numbers from {low} to {high} are no experts")
    column = np.zeros((length, *given.shape[1:]), dtype)
    column[: len(given)] = given
    return column


def renewed(before: NDArray[Any] | None, rows: NDArray[Any]) -> NDArray[Any]:
    """The record of a sequence after an engine has read it again: the later one where it is a record, the earlier one
    elsewhere.

    Shapes: before [T, layers, K], rows [T', layers, K], T' >= T -> [T', layers, K].

    Raises:
        InvalidRollout: they are of different models.
    """
    if before is None:
        return rows
    if before.shape[1:] != rows.shape[1:]:
        raise InvalidRollout(
            f"column {ROUTED_EXPERTS}: {list(before.shape[1:])} layers and experts of a token, then "
            f"{list(rows.shape[1:])}"
        )
    out = rows.astype(np.result_type(before, rows))
    out[: len(before)] = np.where(is_record(rows[: len(before)])[..., None], rows[: len(before)], before)
    return out
