"""Assembly: the rollouts of a rank's rows become micro-batches, column by column.

Nothing here looks at a token. Every column of a micro-batch is one `numpy.concatenate` of the rollouts' own arrays
into memory that an :class:`~rlbuffer.arena.Arena` reuses; positions and fills are slices of ready-made ramps. That
runs at several hundred million tokens a second on one core, near what copying the same bytes costs
(``python -m benchmarks.bench_assembly``), against a few million for lists of Python integers.

What a rollout cannot give is masked, never left out: a rollout that is missing or damaged becomes padding of its
planned length, so all ranks keep the same shapes and a replay gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlbuffer.arena import Allocate, Arena, aligned
from rlbuffer.batches import MicroBatch, Normalizers, Row, Sample
from rlbuffer.errors import PackingError
from rlbuffer.fills import ColumnSpec, column_spec
from rlbuffer.records import Rollout

DUMMY_TOKENS = 8
"""Tokens of a dummy micro-batch: enough for every layer to have something to multiply, too few to cost anything."""

FIXED_COLUMNS: tuple[tuple[str, Any], ...] = (
    ("input_ids", np.int32),
    ("position_ids", np.int32),
    ("loss_mask", np.bool_),
    ("advantages", np.float32),
    ("logprobs", np.float32),
    ("targets", np.int64),
    ("sample_index", np.int32),
)
"""Arrays [T] that every micro-batch has."""


@dataclass(frozen=True, slots=True)
class PackItem:
    """One rollout as assembly takes it."""

    rollout: Rollout | None
    """None when it is missing or damaged: masked padding of the planned length takes its place."""
    length: int
    """Tokens, as planned."""
    sample: Sample
    """What the trainer is told; its advantage is broadcast to the trained tokens (a column ``advantages`` wins)."""
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
    update: int = 0,
) -> tuple[MicroBatch, ...]:
    """Assembles one rank's micro-batches: ``rows[micro_step]`` are the rows of each, as indices into `items`.

    A micro-batch concatenates its rows, those of one adapter next to each other; the padding of a row is a segment
    of its own at the row's end. One whose rows are all () is a dummy: :data:`DUMMY_TOKENS` masked tokens in fresh
    arrays. All micro-batches have the same further columns: `columns` and every one that an item has; where a rollout
    lacks one, its declared fill stands in (:func:`~rlbuffer.fills.register_column`; 0 without declaration).

    Memory: without `arena` every array is fresh. With one, arrays are cut from memory that is used again once nobody
    holds an array of that micro-batch (see :mod:`rlbuffer.arena`).

    Raises:
        PackingError: a row exceeds `row_tokens` or mixes adapters; an index is out of range; a column comes in shapes
            or dtypes that do not go together, or is asked for in `columns` with nothing known of it.
    """
    if pad_to_multiple_of < 1:
        raise PackingError(f"assemble: pad_to_multiple_of = {pad_to_multiple_of} must be at least 1")
    schema = _schema(items, columns)
    layout = _Layout(
        schema=schema,
        row_tokens=row_tokens,
        pad_token_id=pad_token_id,
        pad_to_multiple_of=pad_to_multiple_of,
        ignore_index=ignore_index,
        normalizers=normalizers,
        update=update,
    )
    return tuple(_micro_batch(step, items, layout, arena) for step in rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """What all micro-batches of one call share."""

    schema: Mapping[str, ColumnSpec]
    row_tokens: int
    pad_token_id: int
    pad_to_multiple_of: int
    ignore_index: int
    normalizers: Normalizers
    update: int

    def size(self, tokens: int) -> int:
        """Bytes of a block that holds a micro-batch."""
        fixed = sum(aligned((tokens,), dtype) for _, dtype in FIXED_COLUMNS)
        return fixed + sum(aligned((tokens, *spec.shape), spec.dtype) for spec in self.schema.values())


# -- further columns ---------------------------------------------------------------------------------------------------
def _schema(items: Sequence[PackItem], required: Sequence[str]) -> dict[str, ColumnSpec]:
    """Name -> dtype, trailing shape and fill of every further column, in the order of names."""
    arrays: dict[str, dict[tuple[np.dtype[Any], tuple[int, ...]], str]] = {name: {} for name in required}
    for item in items:
        if item.rollout is not None:
            for name, array in item.rollout.columns.items():
                kinds = arrays.setdefault(name, {})
                kinds.setdefault((array.dtype, array.shape[1:]), item.sample.rollout_id)
    advantages = arrays.pop("advantages", {})
    for (dtype, shape), where in advantages.items():
        if shape or dtype.kind == "b":
            raise PackingError(
                f"assemble: column advantages of rollout {where!r} is {_kind(dtype, shape)}, not [T] numbers"
            )
    return {name: _spec(name, arrays[name]) for name in sorted(arrays)}


def _spec(name: str, kinds: Mapping[tuple[np.dtype[Any], tuple[int, ...]], str]) -> ColumnSpec:
    spec = column_spec(name)
    if spec is None:
        if not kinds:
            raise PackingError(
                f"assemble: column {name} is required, but no rollout here has it and its dtype is not declared: "
                f"call register_column({name!r}, fill=..., dtype=...)"
            )
        shapes = {shape for _, shape in kinds}
        dtype = np.result_type(*(dtype for dtype, _ in kinds))
        spec = ColumnSpec(fill=0, dtype=dtype, shape=next(iter(shapes)))
        wanted = " as in other rollouts"
    else:
        wanted = " as declared"
    for (dtype, shape), where in kinds.items():
        if shape != spec.shape or not _converts(dtype, spec.dtype):
            raise PackingError(
                f"assemble: column {name} of rollout {where!r} is {_kind(dtype, shape)}, "
                f"not {_kind(spec.dtype, spec.shape)}{wanted}"
            )
    return spec


def _converts(dtype: np.dtype[Any], to: np.dtype[Any]) -> bool:
    """Whether values keep their meaning: rounding to a float is fine, wrapping an integer is not."""
    return np.can_cast(dtype, to, "safe") or (to.kind == "f" and dtype.kind in "iuf")


def _kind(dtype: np.dtype[Any], shape: tuple[int, ...]) -> str:
    return f"{dtype.name} [{', '.join(['T', *map(str, shape)])}]"


# -- one micro-batch ---------------------------------------------------------------------------------------------------
def _micro_batch(rows: Sequence[Row], items: Sequence[PackItem], layout: _Layout, arena: Arena | None) -> MicroBatch:
    lengths: list[int] = []
    rollouts: list[Rollout | None] = []
    owners: list[int] = []
    samples: list[Sample] = []
    adapter_tokens: dict[str, int] = {}
    for adapter, row in _by_adapter(rows, items):
        tokens = 0
        for index in row:
            item = items[index]
            tokens += item.length
            lengths.append(item.length)
            rollouts.append(item.rollout)
            owners.append(len(samples))
            samples.append(item.sample)
        if tokens > layout.row_tokens:
            raise PackingError(
                f"assemble: a row of {len(row)} rollouts has {tokens} tokens; it holds {layout.row_tokens}"
            )
        padding = -tokens % layout.pad_to_multiple_of
        if padding:
            lengths.append(padding)
            rollouts.append(None)
            owners.append(-1)
        adapter_tokens[adapter] = adapter_tokens.get(adapter, 0) + tokens + padding
    is_dummy = not samples
    if is_dummy:
        lengths = [-(-min(DUMMY_TOKENS, layout.row_tokens) // layout.pad_to_multiple_of) * layout.pad_to_multiple_of]
        rollouts, owners = [None], [-1]
        adapter_tokens = {"": lengths[0]}
        arena = None  # a dummy is fresh: it must not wait for, or pin, memory sized for real ones
    total = sum(lengths)
    new: Allocate = np.empty if arena is None else arena.block(layout.size(total))
    arrays = {name: new((total,), dtype) for name, dtype in FIXED_COLUMNS}
    cu_seqlens = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=cu_seqlens[1:])
    bounds: list[int] = cu_seqlens.tolist()
    segments = list(zip(bounds[:-1], bounds[1:], rollouts, strict=True))

    for name, column, fill in (
        ("input_ids", "tokens", layout.pad_token_id),
        ("loss_mask", "loss_mask", False),
        ("logprobs", "logprobs", 0.0),
    ):
        parts = [None if rollout is None else getattr(rollout, column) for rollout in rollouts]
        _concatenate(arrays[name], parts, lengths, fill)
    ramp = np.arange(max(lengths), dtype=np.int32)
    np.concatenate([ramp[:length] for length in lengths], out=arrays["position_ids"])
    for owner, start, end in zip(owners, bounds[:-1], bounds[1:], strict=True):
        arrays["sample_index"][start:end] = owner
    _advantages(arrays["advantages"], arrays["loss_mask"], segments, owners, samples)
    _targets(arrays["targets"], arrays["input_ids"], cu_seqlens, segments, layout.ignore_index)
    columns = {}
    for name, spec in layout.schema.items():
        columns[name] = new((total, *spec.shape), spec.dtype)
        parts = [None if rollout is None else rollout.columns.get(name) for rollout in rollouts]
        _concatenate(columns[name], parts, lengths, spec.fill)
    return MicroBatch(
        **arrays,
        cu_seqlens=cu_seqlens,
        columns=columns,
        samples=tuple(samples),
        adapter_tokens=adapter_tokens,
        normalizers=layout.normalizers,
        is_dummy=is_dummy,
        update=layout.update,
    )


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
    blank = np.full((max(missing, default=0), *out.shape[1:]), fill, out.dtype)
    filled = [blank[:length] if part is None else part for part, length in zip(parts, lengths, strict=True)]
    np.concatenate(filled, out=out, casting="same_kind")


def _advantages(
    out: NDArray[np.float32],
    loss_mask: NDArray[np.bool_],
    segments: Sequence[tuple[int, int, Rollout | None]],
    owners: Sequence[int],
    samples: Sequence[Sample],
) -> None:
    """Each rollout's advantage, or its column ``advantages``, on trained tokens; 0 elsewhere."""
    for (start, end, rollout), owner in zip(segments, owners, strict=True):
        own = None if rollout is None else rollout.columns.get("advantages")
        if own is not None:
            out[start:end] = own
        else:
            out[start:end] = samples[owner].advantage if owner >= 0 else 0.0
    np.multiply(out, loss_mask, out=out)
    np.add(out, np.float32(0), out=out)  # a negative advantage times an untrained token is -0.0


def _targets(
    out: NDArray[np.int64],
    input_ids: NDArray[np.int32],
    cu_seqlens: NDArray[np.int32],
    segments: Sequence[tuple[int, int, Rollout | None]],
    ignore_index: int,
) -> None:
    """The next token inside the same rollout; `ignore_index` at each end and where there is no rollout."""
    out[:-1] = input_ids[1:]
    out[cu_seqlens[1:] - 1] = ignore_index
    for start, end, rollout in segments:
        if rollout is None:
            out[start:end] = ignore_index
