"""Columns beyond the required ones: what stands in where a rollout lacks one, and what a whole step agrees on.

A column needs no declaration to be packed. It needs one where 0 means something (a temperature, a weight), or where
every rank must have the column though none of its rollouts does.

The further columns of a step are decided once, when it is committed, for all ranks. A rank sees only its own
rollouts: if each made up its mind from those, one rank's micro-batches could have a column that another's lack, and two
rollouts that disagree about a column would stop one rank and not the others. So the step's header says it, and pushes
that do not fit the others of their step do not get into it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from rlbuffer.errors import PackingError
from rlbuffer.records.columns import COLUMN_DTYPES, COLUMN_NAME, REQUIRED_COLUMNS
from rlbuffer.records.info import ColumnKind
from rlbuffer.records.rollout import TokenArrays
from rlbuffer.records.step_plan import StepPlan
from rlbuffer.records.support import NO_TOKEN, SUPPORT, WIDEST


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnSpec:
    """The layout of a column in a micro-batch, and the value that stands in for it where a rollout lacks it."""

    fill: float
    """Value of every token of a rollout without the column."""
    dtype: np.dtype[Any]
    """Dtype in micro-batches; pushed values are converted when no information is lost in kind (float to float)."""
    shape: tuple[int, ...] = ()
    """Trailing shape: a column is [T, *shape]."""
    widest: int = 0
    """Above 0: rollouts have rows of any length up to this, a step has the longest, and `fill` stands behind the
    others."""

    def has(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> bool:
        """A column of this dtype and trailing shape fits in."""
        if self.widest:
            return len(shape) == 1 and 0 < shape[0] <= min(self.shape[0], self.widest) and _converts(dtype, self.dtype)
        return shape == self.shape and _converts(dtype, self.dtype)

    def fitted(self, values: NDArray[Any] | None) -> NDArray[Any] | None:
        """`values` [T, ...] with rows as long as the step's."""
        if values is None or values.shape[1:] == self.shape:
            return values
        out = np.full((len(values), *self.shape), self.fill, self.dtype)
        out[:, : values.shape[1]] = values
        return out


SPECS: dict[str, ColumnSpec] = {}
"""Columns that this process has declared, by name."""


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
    SPECS[name] = ColumnSpec(fill=fill, dtype=kind, shape=trailing)


def column_spec(name: str) -> ColumnSpec | None:
    """The declaration of a column; None when there is none."""
    return SPECS.get(name)


for _name, _fill in (
    ("ref_logprobs", 0.0),
    ("teacher_logprobs", 0.0),
    ("temperatures", 1.0),
    ("weights", 1.0),
    ("entropy", 0.0),
):
    register_column(_name, fill=_fill, dtype=np.float32)
SPECS[SUPPORT] = ColumnSpec(fill=NO_TOKEN, dtype=np.dtype("<i4"), shape=(1,), widest=WIDEST)


Columns = dict[str, tuple[str, tuple[int, ...]]]
"""Name -> dtype and trailing shape."""


def specs_of(columns: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, ColumnSpec]:
    """The layouts of a committed step's columns: as this process declares them, else as they came, filled with 0."""
    return {name: _spec_of(name, np.dtype(dtype), shape) for name, (dtype, shape) in columns.items()}


def _spec_of(name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> ColumnSpec:
    spec = column_spec(name)
    if spec is None:
        return ColumnSpec(fill=0, dtype=dtype, shape=shape)
    return replace(spec, shape=shape) if spec.widest and len(shape) == 1 else spec


def agree(plan: StepPlan, needed: Sequence[str] = ()) -> tuple[Columns, dict[str, str]]:
    """The columns of a planned step, and which of its pushes do not fit them, with the reason.

    A column's trailing shape is the one that most rollouts come with, the earliest selected among equals; its dtype
    holds the values of all pushes with that shape. One whose rows may have any length is as wide as the widest.
    `needed` are columns that no push may lack.
    """
    votes: dict[str, dict[tuple[int, ...], int]] = {}
    for use in plan.rollouts.pushes:
        for name, _, shape in use.info.columns:
            if name != "advantages":
                counts = votes.setdefault(name, {})
                counts[shape] = counts.get(shape, 0) + len(use.places)
    shapes = {name: _shape_for(name, counts) for name, counts in votes.items()}
    shapes["advantages"] = ()
    dtypes: dict[str, list[str]] = {}
    odd: dict[str, str] = {}
    for use in plan.rollouts.pushes:
        entry_id, kinds = use.entry_id, use.info.columns
        misfit = next((kind for kind in kinds if not _goes_with(kind, shapes)), None)
        if misfit is not None:
            odd[entry_id] = _misfit(misfit, shapes)
            continue
        lacking = sorted(set(needed).difference(name for name, _, _ in kinds))
        if lacking:
            odd[entry_id] = f"it lacks column {', '.join(lacking)}, without which the trainer cannot train"
            continue
        for name, dtype, _ in kinds:
            dtypes.setdefault(name, []).append(dtype)
    dtypes.pop("advantages", None)
    columns = {name: (np.result_type(*dtypes[name]).str, shapes[name]) for name in sorted(dtypes)}
    return columns, odd


def _shape_for(name: str, counts: Mapping[tuple[int, ...], int]) -> tuple[int, ...]:
    spec = column_spec(name)
    if spec is not None and spec.widest:
        return _wide_enough(spec, counts).shape
    return max(counts, key=lambda shape: counts[shape])


def _wide_enough(spec: ColumnSpec, shapes: Iterable[tuple[int, ...]]) -> ColumnSpec:
    """The spec of a column with rows of any length, for all of these trailing shapes that it may have."""
    sizes = [shape[0] for shape in shapes if len(shape) == 1 and shape[0] <= spec.widest]
    return replace(spec, shape=(max(1, *sizes),) if sizes else (1,))


def _goes_with(kind: ColumnKind, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    name, dtype, shape = kind
    spec = column_spec(name)
    if spec is not None and spec.widest:
        return replace(spec, shape=shapes[name]).has(np.dtype(dtype), shape)
    return shape == shapes[name] and (name != "advantages" or np.dtype(dtype).kind != "b")


def _misfit(kind: ColumnKind, shapes: Mapping[str, tuple[int, ...]]) -> str:
    name, dtype, shape = kind
    arrived = f"column {name} is {shown_kind(np.dtype(dtype), shape)}"
    if name == "advantages":
        return f"{arrived}, not [T] numbers"
    spec = column_spec(name)
    if spec is not None and spec.widest:
        return f"{arrived}, not {spec.dtype.name} [T, 1 to {spec.widest}]"
    expected_shape = ", ".join(["T", *map(str, shapes[name])])
    return f"{arrived}, but [{expected_shape}] in most rollouts of its step"


def misfit(rollout: TokenArrays, schema: Mapping[str, ColumnSpec]) -> str:
    """The first further column of a rollout that `schema` does not have, or not in its shape, or in a dtype that
    does not convert; "" where all fit."""
    for name, array in rollout.columns.items():
        shape, spec = array.shape[1:], schema.get(name)
        if name == "advantages":
            if shape or array.dtype.kind == "b":
                return f"column advantages is {shown_kind(array.dtype, shape)}, not [T] numbers"
        elif spec is None:
            return f"column {name} is none that its step has"
        elif not spec.has(array.dtype, shape):
            return (
                f"column {name} is {shown_kind(array.dtype, shape)}, and {shown_kind(spec.dtype, spec.shape)} is what "
                "its step has, or what this process has declared"
            )
    return ""


def common_spec(name: str, kinds: Mapping[tuple[np.dtype[Any], tuple[int, ...]], str]) -> ColumnSpec:
    """The layout of a column for all rollouts: as declared, else in a dtype that holds the values of every kind.

    Args:
        kinds: (dtype, trailing shape) that rollouts come with -> id of the first that has it.

    Raises:
        PackingError: a kind does not fit, or there is neither a kind nor a declaration.
    """
    spec = column_spec(name)
    if spec is None:
        if not kinds:
            raise PackingError(
                f"assemble: column {name} is required, but no rollout here has it and its dtype is not declared: "
                f"call register_column({name!r}, fill=..., dtype=...)"
            )
        dtype = np.result_type(*(dtype for dtype, _ in kinds))
        spec = ColumnSpec(fill=0, dtype=dtype, shape=next(iter(kinds))[1])
        origin = " as in other rollouts"
    else:
        origin = " as declared"
        if spec.widest:
            spec = _wide_enough(spec, (shape for _, shape in kinds))
    for (dtype, shape), where in kinds.items():
        if not spec.has(dtype, shape):
            raise PackingError(
                f"assemble: column {name} of rollout {where!r} is {shown_kind(dtype, shape)}, "
                f"not {shown_kind(spec.dtype, spec.shape)}{origin}"
            )
    return spec


def _converts(dtype: np.dtype[Any], to: np.dtype[Any]) -> bool:
    """True when values keep their meaning: rounding to a float is fine, wrapping an integer is not."""
    return np.can_cast(dtype, to, "safe") or (to.kind == "f" and dtype.kind in "iuf")


def shown_kind(dtype: np.dtype[Any], shape: tuple[int, ...]) -> str:
    """A dtype and a trailing shape for people: ``float32 [T, 2]``."""
    return f"{dtype.name} [{', '.join(['T', *map(str, shape)])}]"
