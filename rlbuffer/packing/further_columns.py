"""What packing must know of a column that a rollout may lack: its fill, its dtype and its trailing shape.

A column needs no declaration to be packed. It needs one where 0 means something (a temperature, a weight), or where
every rank must have the column though none of its rollouts does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from rlbuffer.errors import PackingError
from rlbuffer.records.columns import COLUMN_DTYPES, COLUMN_NAME, REQUIRED_COLUMNS


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnSpec:
    """How packing lays out a column, and what stands in for it where a rollout lacks it."""

    fill: float
    """Value of every token of a rollout without the column."""
    dtype: np.dtype[Any]
    """Dtype in micro-batches; pushed values are converted when no information is lost in kind (float to float)."""
    shape: tuple[int, ...] = ()
    """Trailing shape: a column is [T, *shape]."""


_SPECS: dict[str, ColumnSpec] = {}


def register_column(name: str, *, fill: float, dtype: DTypeLike, shape: tuple[int, ...] = ()) -> None:
    """Declares the fill, dtype and trailing shape of a column, for rollouts (and dummies) that lack it.

    A column needs no declaration to be packed: its dtype and shape are then those that arrive, and 0 (or False)
    stands in where a rollout lacks it. Declare it where 0 means something, or where every rank must have it though
    none of its rollouts does. Declaring a name again replaces what was declared.

    Raises:
        PackingError: the name or dtype is not allowed, or `fill` does not fit the dtype.

    Example:
        >>> register_column("my_routes", fill=-1, dtype="i2", shape=(2, 4))
        >>> column_spec("my_routes").shape
        (2, 4)
    """
    if not COLUMN_NAME.match(name) or name in REQUIRED_COLUMNS or name == "advantages":
        raise PackingError(f"register_column: name {name!r} is not allowed")
    kind = np.dtype(dtype).newbyteorder("<")
    if kind not in COLUMN_DTYPES:
        raise PackingError(f"register_column: {name}: dtype {kind} is not supported")
    trailing = tuple(int(size) for size in shape)
    if any(size < 1 for size in trailing):
        raise PackingError(f"register_column: {name}: shape {trailing} must be positive sizes")
    try:
        fits = math.isfinite(fill) and bool(np.isclose(float(np.array(fill).astype(kind)), fill, rtol=1e-3))
    except (TypeError, ValueError, OverflowError):
        fits = False
    if not fits:
        raise PackingError(f"register_column: {name}: fill {fill!r} does not fit {kind}")
    _SPECS[name] = ColumnSpec(fill=fill, dtype=kind, shape=trailing)


def column_spec(name: str) -> ColumnSpec | None:
    """What was declared for a column; None when nothing was."""
    return _SPECS.get(name)


for _name, _fill in (
    ("ref_logprobs", 0.0),
    ("teacher_logprobs", 0.0),
    ("temperatures", 1.0),
    ("weights", 1.0),
    ("entropy", 0.0),
):
    register_column(_name, fill=_fill, dtype=np.float32)
