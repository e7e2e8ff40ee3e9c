"""Assembly: the rollouts of a rank's rows become micro-batches, column by column.

Nothing here looks at a token. Every column of a micro-batch is one `numpy.concatenate` of the rollouts' own arrays
into memory that an :class:`~rlbuffer.packing.arena.Arena` reuses; what follows from them is made when somebody asks for
it (:mod:`rlbuffer.packing.derived_columns`).
That runs at several hundred million tokens a second on one core, near what copying the same bytes costs (``python -m
benchmarks.bench_assembly``), against a few million for lists of Python integers.

A rollout that is missing or damaged is masked, never left out: it becomes padding of its planned length,
so all ranks keep the same shapes and a replay gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlbuffer.errors import PackingError
from rlbuffer.packing.arena import Allocate, Arena, aligned
from rlbuffer.packing.derived_columns import DerivedColumns
from rlbuffer.packing.further_columns import ColumnSpec, common_spec, shown_kind
from rlbuffer.records.micro_batch import MicroBatch, Sample, deriving
from rlbuffer.records.rollout import Rollout, RolloutArrays
from rlbuffer.records.step_plan import Normalizers, Row

DUMMY_TOKENS = 8
"""Tokens of a dummy micro-batch: enough for every layer to have something to multiply, too few to cost anything."""

SLAB_TOKENS = 65536
"""Tokens that are written in one go: several small micro-batches share the cost of the numpy calls, and what one call
wrote is still in the cache for the next."""

STORED_COLUMNS: tuple[tuple[str, Any], ...] = (
    ("input_ids", np.int32),
    ("loss_mask", np.bool_),
    ("logprobs", np.float32),
)
"""Arrays [T] that every micro-batch is assembled with; the others are derived from them."""


@dataclass(frozen=True, slots=True)
class PackItem:
    """One rollout as assembly takes it."""

    rollout: Rollout | RolloutArrays | None
    """None when it is missing or damaged: masked padding of the planned length takes its place."""
    length: int
    """Tokens, as planned."""
    sample: Sample
    """The trainer's record of it; its advantage is broadcast to the trained tokens (a column ``advantages`` wins)."""
    adapter: str = ""
    """"" is all weights."""

    def __post_init__(self) -> None:
        if self.length < 1:
            raise PackingError(f"assemble: rollout {self.sample.rollout_id!r} has length {self.length}")
        if self.rollout is not None and self.rollout.length != self.length:
            raise PackingError(
                f"assemble: rollout {self.sample.rollout_id!r} has {self.rollout.length} tokens, {self.length} planned"
            )


def assemble(
    rows: Sequence[Sequence[Row]],
    items: Sequence[PackItem],
    *,
    row_tokens: int,
    normalizers: Normalizers,
    pad_token_id: int = 0,
    pad_to_multiple_of: int = 1,
    ignore_index: int = -100,
    arena: Arena | None = None,
    columns: Sequence[str] = (),
    schema: Mapping[str, ColumnSpec] | None = None,
) -> tuple[MicroBatch, ...]:
    """Assembles one rank's micro-batches: ``rows[micro_step]`` are the rows of each, as indices into `items`.

    A micro-batch concatenates its rows, those of one adapter next to each other; the padding of a row is a segment
    of its own at the row's end. One whose rows are all () is a dummy: :data:`DUMMY_TOKENS` masked tokens in fresh
    arrays. All micro-batches have the same further columns: `columns` and every one that an item has; where a rollout
    lacks one, its declared fill stands in (:func:`~rlbuffer.packing.further_columns.register_column`; 0 without
    declaration), and `MicroBatch.lacking` says where. With `schema` the columns are those that it names, and every
    rollout must go with it (:func:`fits`): so all ranks of a step have the same ones.

    Memory: without `arena` every array is fresh. With one, arrays are cut from memory that is used again once nobody
    holds an array of that micro-batch (see :mod:`rlbuffer.packing.arena`).

    Raises:
        PackingError: a row exceeds `row_tokens` or mixes adapters; an index is out of range; a column comes in shapes
            or dtypes that do not go together, or is asked for in `columns` with nothing known of it.
    """
    if pad_to_multiple_of < 1:
        raise PackingError(f"assemble: pad_to_multiple_of = {pad_to_multiple_of} must be at least 1")
    layout = _Layout(
        schema=_schema(items, columns) if schema is None else schema,
        row_tokens=row_tokens,
        pad_token_id=pad_token_id,
        pad_to_multiple_of=pad_to_multiple_of,
        ignore_index=ignore_index,
        normalizers=normalizers,
    )
    made: list[MicroBatch] = []
    slab: list[_Segments] = []
    for step in rows:
        segments = _segments(step, items, layout)
        if not segments.samples:
            made += [*_write(slab, layout, arena), *_write([segments], layout, None)]
            slab = []
            continue
        slab.append(segments)
        if sum(s.tokens for s in slab) >= SLAB_TOKENS:
            made += _write(slab, layout, arena)
            slab = []
    made += _write(slab, layout, arena)
    return tuple(made)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """The values that all micro-batches of one call share."""

    schema: Mapping[str, ColumnSpec]
    row_tokens: int
    pad_token_id: int
    pad_to_multiple_of: int
    ignore_index: int
    normalizers: Normalizers


@dataclass(slots=True)
class _Segments:
    """The segments of one micro-batch, in order; padding has no rollout and no owner."""

    lengths: list[int] = field(default_factory=list)
    rollouts: list[Rollout | RolloutArrays | None] = field(default_factory=list)
    """None: masked, either padding or a damaged rollout."""
    owners: list[int] = field(default_factory=list)
    """Index into `samples`, -1 for padding."""
    samples: list[Sample] = field(default_factory=list)
    adapter_tokens: dict[str, int] = field(default_factory=dict)
    tokens: int = 0

    def add(self, length: int, rollout: Rollout | RolloutArrays | None, owner: int) -> None:
        self.lengths.append(length)
        self.rollouts.append(rollout)
        self.owners.append(owner)
        self.tokens += length


# -- further columns ---------------------------------------------------------------------------------------------------
def _schema(items: Sequence[PackItem], required: Sequence[str]) -> dict[str, ColumnSpec]:
    """Name -> dtype, trailing shape and fill of every further column, in the order of names."""
    arrays: dict[str, dict[tuple[np.dtype[Any], tuple[int, ...]], str]] = {name: {} for name in required}
    for item in items:
        if item.rollout is not None and item.rollout.columns:
            for name, array in item.rollout.columns.items():
                kinds = arrays.setdefault(name, {})
                kinds.setdefault((array.dtype, array.shape[1:]), item.sample.rollout_id)
    advantages = arrays.pop("advantages", {})
    for (dtype, shape), where in advantages.items():
        if shape or dtype.kind == "b":
            raise PackingError(
                f"assemble: column advantages of rollout {where!r} is {shown_kind(dtype, shape)}, not [T] numbers"
            )
    return {name: common_spec(name, arrays[name]) for name in sorted(arrays)}


# -- micro-batches -----------------------------------------------------------------------------------------------------
def _segments(rows: Sequence[Row], items: Sequence[PackItem], layout: _Layout) -> _Segments:
    out = _Segments()
    for adapter, row in _by_adapter(rows, items):
        before = out.tokens
        for index in row:
            item = items[index]
            out.add(item.length, item.rollout, len(out.samples))
            out.samples.append(item.sample)
        tokens = out.tokens - before
        if tokens > layout.row_tokens:
            raise PackingError(
                f"assemble: a row of {len(row)} rollouts has {tokens} tokens; it holds {layout.row_tokens}"
            )
        padding = -tokens % layout.pad_to_multiple_of
        if padding:
            out.add(padding, None, -1)
        out.adapter_tokens[adapter] = out.adapter_tokens.get(adapter, 0) + tokens + padding
    if not out.samples:
        tokens = min(DUMMY_TOKENS, layout.row_tokens)
        out.add(tokens + -tokens % layout.pad_to_multiple_of, None, -1)
        out.adapter_tokens[""] = out.tokens
    return out


def _write(slab: Sequence[_Segments], layout: _Layout, arena: Arena | None) -> list[MicroBatch]:
    """Writes the columns of consecutive micro-batches in one go and cuts them apart: views of the same arrays."""
    if not slab:
        return []
    lengths = [length for s in slab for length in s.lengths]
    rollouts = [rollout for s in slab for rollout in s.rollouts]
    sizes = np.array(lengths, np.int64)
    total = int(sizes.sum())
    new: Allocate = np.empty
    if arena is not None:
        stored = sum(aligned((total,), dtype) for _, dtype in STORED_COLUMNS)
        new = arena.block(stored + sum(aligned((total, *s.shape), s.dtype) for s in layout.schema.values()))
    arrays = {name: new((total,), dtype) for name, dtype in STORED_COLUMNS}
    for name, column, fill in (
        ("input_ids", "tokens", layout.pad_token_id),
        ("loss_mask", "loss_mask", False),
        ("logprobs", "logprobs", 0.0),
    ):
        parts = [None if rollout is None else getattr(rollout, column) for rollout in rollouts]
        _concatenate(arrays[name], parts, lengths, fill)
    further = {}
    for name, spec in layout.schema.items():
        further[name] = new((total, *spec.shape), spec.dtype)
        parts = [None if rollout is None else rollout.columns.get(name) for rollout in rollouts]
        _concatenate(further[name], parts, lengths, spec.fill)
    lacking = _lacking(rollouts, layout.schema, sizes)

    bounds = np.zeros(len(sizes) + 1, np.int32)
    np.cumsum(sizes, out=bounds[1:])
    made, start, first = [], 0, 0
    for segments in slab:
        end, last = start + segments.tokens, first + len(segments.lengths)
        made.append(
            deriving(
                DerivedColumns(segments.lengths, segments.rollouts, segments.owners, layout.ignore_index, arena),
                **{name: array[start:end] for name, array in arrays.items()},
                cu_seqlens=bounds[first : last + 1] - np.int32(start),
                columns={name: array[start:end] for name, array in further.items()},
                samples=tuple(segments.samples),
                adapter_tokens=segments.adapter_tokens,
                normalizers=layout.normalizers,
                is_dummy=not segments.samples,
                lacking={k: array[start:end] for k, array in lacking.items() if array[start:end].any()},
            )
        )
        start, first = end, last
    return made


def _lacking(
    rollouts: Sequence[Rollout | RolloutArrays | None], names: Iterable[str], lengths: NDArray[np.int64]
) -> dict[str, NDArray[np.bool_]]:
    """Column -> [T] bool, of those that some rollout came without; one that is missing itself lacks nothing."""
    out = {}
    for name in names:
        without = np.array([rollout is not None and name not in rollout.columns for rollout in rollouts])
        if without.any():
            out[name] = np.repeat(without, lengths)
    return out


def _by_adapter(rows: Sequence[Row], items: Sequence[PackItem]) -> list[tuple[str, Row]]:
    """The rows that are not empty, those of one adapter together, adapters in order of appearance."""
    named: dict[str, list[Row]] = {}
    for row in rows:
        if not row:
            continue
        if min(row) < 0 or max(row) >= len(items):
            raise PackingError(f"assemble: row {tuple(row)} is out of range for {len(items)} items")
        adapters = {items[index].adapter for index in row}
        if len(adapters) > 1:
            raise PackingError(f"assemble: a row mixes the adapters {', '.join(map(repr, sorted(adapters)))}")
        named.setdefault(adapters.pop(), []).append(row)
    return [pair for adapter, group in named.items() for pair in zip(repeat(adapter), group, strict=False)]


def _concatenate(out: NDArray[Any], parts: Sequence[NDArray[Any] | None], lengths: Sequence[int], fill: float) -> None:
    """Writes the parts one after the other into `out`; `fill` where a segment has none."""
    missing = [length for part, length in zip(parts, lengths, strict=True) if part is None]
    filled: Any = parts
    if missing:
        blank = np.full((max(missing), *out.shape[1:]), fill, out.dtype)
        filled = [blank[:length] if part is None else part for part, length in zip(parts, lengths, strict=True)]
    np.concatenate(filled, out=out, casting="same_kind")
