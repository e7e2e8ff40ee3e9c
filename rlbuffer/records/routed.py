"""The experts that took each token in: the column :data:`ROUTED_EXPERTS` of models with experts.

[T, layers, K] integers: for each token and layer the K experts that computed it, in any order. Layers are counted as
the model's, those without experts too. A row of K different experts is a record. Every other one is none: 0 in every
place, as engines leave layers without experts and the last token of a rollout, which they never take in; -1 in a signed
column; a rollout without the column.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    is_recorded: NDArray[np.bool_] = (ordered[..., 1:] != ordered[..., :-1]).all(axis=-1) & (ordered[..., 0] >= 0)
    return is_recorded


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


def joined(parts: Sequence[tuple[int, NDArray[Any]]], length: int) -> NDArray[Any] | None:
    """The record of a sequence of `length` tokens by records of parts of it, each with the place where it ends. An
    engine reads tokens again: of two records of a token the later one counts. None where there is no part.

    Shapes: each part [R, layers, K] -> [length, layers, K], 0 where none has a record.

    Raises:
        InvalidRollout: they are of different models.
    """
    if not parts:
        return None
    shapes = sorted({rows.shape[1:] for _, rows in parts})
    if len(shapes) > 1:
        raise InvalidRollout(f"column {ROUTED_EXPERTS}: layers and experts of a token are {shapes} in one sequence")
    column = np.zeros((length, *shapes[0]), np.result_type(*(rows for _, rows in parts)))
    for end, rows in parts:
        np.copyto(column[end - len(rows) : end], rows, where=is_record(rows)[..., None])
    return column
