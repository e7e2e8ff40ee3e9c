"""Columns: the arrays of a rollout, one value per token, and the rules they keep.

Packing and the wire know columns only by name, dtype and shape, never by meaning: a new quantity needs no new code.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlbuffer.errors import InvalidRollout
from rlbuffer.records.checks import MAX_NUMBER, shown

COLUMN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}\Z")
MAX_DIMENSIONS = 8
"""Dimensions that a column or an attachment may have."""
MAX_ARRAYS = 256
"""Columns, and attachments, that a rollout may have."""

REQUIRED_COLUMNS: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {"tokens": np.dtype("<i4"), "loss_mask": np.dtype("?"), "logprobs": np.dtype("<f4")}
)

COLUMN_DTYPES = frozenset(
    np.dtype(d) for d in ("?", "u1", "i1", "<u2", "<i2", "<u4", "<i4", "<i8", "<f2", "<f4", "<f8")
)
"""Dtypes that a column or an attachment may have: fixed size, little-endian, no objects."""


def as_column(
    name: str, values: ArrayLike, dtype: np.dtype[Any] | None = None, *, kind: str = "column"
) -> NDArray[Any]:
    """`values` as a read-only, contiguous array of an allowed dtype that nobody else can write to.

    An array that the caller could still change is copied, because a record is checked only once. One that is
    read-only down to its memory (decoded bytes, a frozen array) is kept as it is, without a copy.
    """
    label = f"{kind} {name}"
    try:
        given = np.asarray(values)
    except (ValueError, OverflowError):
        raise InvalidRollout(f"{label}: not a rectangular array of numbers") from None
    except (TypeError, RuntimeError) as error:  # of a tensor, or a list of them: numpy has no bfloat16, no gradients
        raise InvalidRollout(
            f"{label}: numpy cannot read it ({' '.join(str(error).split())}): give tensor.detach().cpu(), or "
            "tensor.detach().float().cpu() where it is bfloat16"
        ) from None
    array = given if dtype is None or given.dtype == dtype else _cast(label, given, dtype)
    if dtype is None and array.dtype not in COLUMN_DTYPES:
        if array.dtype.kind in "iuf":
            array = array.astype(array.dtype.newbyteorder("<"))
        if array.dtype.kind in "OUS" and not all(isinstance(value, int | float) for value in array.flat):
            raise _other_kind(label, "numbers", array)
        if array.dtype not in COLUMN_DTYPES:
            raise InvalidRollout(f"{label}: dtype {array.dtype} is not supported")
    if array.ndim > MAX_DIMENSIONS:
        raise InvalidRollout(f"{label}: {array.ndim} dimensions, at most {MAX_DIMENSIONS} are supported")
    array = np.asarray(array, order="C")
    if array is given and (array.flags.writeable or not _frozen(array)):
        array = array.copy()
    if array.size:
        _check_values(label, array, largest=MAX_NUMBER if kind == "column" else sys.float_info.max)
    array.setflags(write=False)
    return array


def trained_advantage(planned: float, columns: Mapping[str, NDArray[Any]], loss_mask: NDArray[np.bool_]) -> float:
    """The advantage that a rollout trains with, in one number: the mean of its own column over the trained tokens, else
    what was `planned`. `loss_mask` is [T]."""
    advantages = columns.get("advantages")
    if advantages is None or advantages.shape != loss_mask.shape or advantages.dtype.kind == "b" or not loss_mask.any():
        return planned
    return float(advantages[loss_mask].mean(dtype=np.float64))


def _check_values(label: str, array: NDArray[Any], *, largest: float) -> None:
    """Refuses numbers that are not finite or beyond `largest`, either sign, and bytes that are no booleans."""
    if array.dtype.kind == "b":
        # A byte above 1 under a bool view counts differently in every operation.
        marks = array.view(np.uint8)
        if marks.item(marks.argmax()) > 1:
            raise InvalidRollout(f"{label}: not a boolean at position {_first(marks > 1)}")
    elif (array.dtype.kind == "f" or label == "column advantages") and not (
        # `argmin` takes half as long as `min` does. A NaN is the smallest and the largest.
        array.item(array.argmin()) >= -largest and array.item(array.argmax()) <= largest
    ):
        bad = ~np.isfinite(array)
        if bad.any():
            raise InvalidRollout(f"{label}: not finite at position {_first(bad)}")
        place = _first(np.abs(array.astype(np.float64)) > largest)
        raise InvalidRollout(f"{label}: the number at position {place} is beyond the limit of {largest:g}, either sign")


def _cast(label: str, array: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    if not array.size:  # `[]` is float64 to numpy, and nothing is of any kind
        return np.empty(array.shape, dtype)
    if dtype.kind == "i" and array.dtype.kind not in "iu":
        raise _other_kind(label, "integers", array)
    if dtype.kind == "b" and not (array.dtype.kind in "iu" and np.isin(array, (0, 1)).all()):
        raise _other_kind(label, "booleans", array)
    if dtype.kind == "f" and array.dtype.kind not in "fiu":
        raise _other_kind(label, "numbers", array)
    if dtype.kind == "i":
        low, high = int(array.min()), int(array.max())
        if low < np.iinfo(dtype).min or high > np.iinfo(dtype).max:
            raise InvalidRollout(f"{label}: {low}..{high} does not fit {dtype}")
    with np.errstate(over="ignore"):
        return array.astype(dtype)


def _other_kind(label: str, expected: str, array: NDArray[Any]) -> InvalidRollout:
    """The refusal of values that are of another kind; it names the first of them."""
    are_right: Mapping[str, Callable[[Any], bool]] = {
        "integers": lambda value: isinstance(value, int),
        "numbers": lambda value: isinstance(value, int | float),
        "booleans": lambda value: value in (0, 1),
    }
    values = array.reshape(-1).tolist()
    at = next((i for i, value in enumerate(values) if not are_right[expected](value)), 0)
    place = f" at position {at}" if array.ndim else ""
    remedy = ": text: tokenize it first" if label == "column tokens" and isinstance(values[at], str | bytes) else ""
    return InvalidRollout(f"{label}: expected {expected}, got {shown(values[at])} ({array.dtype}){place}{remedy}")


def _first(bad: NDArray[np.bool_]) -> int:
    """Index along the first axis of the first True."""
    return int(np.argmax(bad.reshape(len(bad), -1).any(axis=1))) if bad.ndim else 0


def _frozen(array: NDArray[Any]) -> bool:
    """True when nothing that is in reach of others can write to the array's memory."""
    owner: Any = array
    while isinstance(owner, np.ndarray):
        if owner.flags.writeable:
            return False
        owner = owner.base
    if isinstance(owner, memoryview):
        owner = owner.obj
    return owner is None or isinstance(owner, bytes)
