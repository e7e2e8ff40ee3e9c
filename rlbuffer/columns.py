"""Columns: the arrays of a rollout, one value per token, and the rules they keep.

Packing and the wire know columns only by name, dtype and shape, never by meaning: a new quantity needs no new code.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlbuffer.errors import InvalidRollout

COLUMN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}\Z")


REQUIRED_COLUMNS: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {"tokens": np.dtype("<i4"), "loss_mask": np.dtype("?"), "logprobs": np.dtype("<f4")}
)

COLUMN_DTYPES = frozenset(
    np.dtype(d) for d in ("?", "u1", "i1", "<u2", "<i2", "<u4", "<i4", "<i8", "<f2", "<f4", "<f8")
)
"""Dtypes that a column or an attachment may have: fixed size, little-endian, no objects."""


def as_column(name: str, values: ArrayLike, dtype: np.dtype[Any] | None = None) -> NDArray[Any]:
    """`values` as a read-only, contiguous array of an allowed dtype."""
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise InvalidRollout(f"column {name}: not a rectangular array ({error})") from None
    if dtype is not None and array.dtype != dtype:
        if array.size and dtype.kind == "i" and array.dtype.kind not in "iu":
            raise InvalidRollout(f"column {name}: expected integers, got {array.dtype}")
        if array.size and dtype.kind == "b" and not (array.dtype.kind in "iu" and np.isin(array, (0, 1)).all()):
            raise InvalidRollout(f"column {name}: expected booleans, got {array.dtype}")
        if dtype.kind == "f" and array.dtype.kind not in "fiu":
            raise InvalidRollout(f"column {name}: expected numbers, got {array.dtype}")
        if dtype.kind == "i" and array.size:
            low, high = int(array.min()), int(array.max())
            if low < np.iinfo(dtype).min or high > np.iinfo(dtype).max:
                raise InvalidRollout(f"column {name}: {low}..{high} does not fit {dtype}")
        with np.errstate(over="ignore"):
            array = array.astype(dtype)
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    if array.dtype not in COLUMN_DTYPES:
        raise InvalidRollout(f"column {name}: dtype {array.dtype} is not supported")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        where = int(np.argmin(np.isfinite(array.reshape(len(array), -1)).all(axis=1))) if array.ndim else 0
        raise InvalidRollout(f"column {name}: not finite at position {where}")
    array = np.ascontiguousarray(array)
    if array.flags.writeable:
        array = array.view()
        array.flags.writeable = False
    return array


def as_finite(name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise InvalidRollout(f"{name}: expected a number, got {value!r}") from None
    if isinstance(value, bool) or not math.isfinite(number):
        raise InvalidRollout(f"{name}: expected a finite number, got {value!r}")
    return number


def same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, Mapping):
        return isinstance(b, Mapping) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return bool(a == b)
