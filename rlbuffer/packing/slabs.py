"""The places of a rank's rollouts in its micro-batches, and the memory that they lie in.

Rows are laid out before there is anything to write: a pull copies the arrays of payloads there, and
:func:`~rlbuffer.packing.assembly.assemble` those of rollouts.

A rollout that is missing or damaged is masked, never left out: it becomes padding of its planned length, so all ranks
keep the same shapes and a replay gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlbuffer.errors import PackingError
from rlbuffer.packing.arena import Allocate, Arena, aligned
from rlbuffer.packing.derived_columns import DerivedColumns, ItemFacts
from rlbuffer.packing.further_columns import ColumnSpec
from rlbuffer.records.micro_batch import MicroBatch, deriving
from rlbuffer.records.rollout import Rollout, RolloutArrays
from rlbuffer.records.step_plan import Normalizers, Row

IGNORE_INDEX = -100
"""Target where there is no next token; what torch's cross entropy leaves out."""
DUMMY_TOKENS = 8
"""Tokens of a dummy micro-batch: enough for every layer to have something to multiply, too few to cost anything."""

SLAB_TOKENS = 65536
"""Tokens of a slab: several small micro-batches share the cost of the numpy calls, and what one call wrote is still in
the cache for the next."""

STORED_COLUMNS: tuple[tuple[str, str, Any], ...] = (
    ("input_ids", "tokens", np.int32),
    ("loss_mask", "loss_mask", np.bool_),
    ("logprobs", "logprobs", np.float32),
)
"""Arrays [T] that every micro-batch is assembled with, the column of a rollout that each is made of, its dtype; the
others are derived from them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The values that all micro-batches of one step share."""

    schema: Mapping[str, ColumnSpec]
    """Further columns."""
    row_tokens: int
    pad_token_id: int
    pad_to_multiple_of: int
    ignore_index: int
    normalizers: Normalizers

    def fills(self) -> dict[str, float]:
        """Array, or further column -> what stands where there is no rollout."""
        own = {"input_ids": self.pad_token_id, "loss_mask": False, "logprobs": 0.0}
        return own | {name: spec.fill for name, spec in self.schema.items()}


@dataclass(slots=True)
class _Segments:
    """The segments of one micro-batch, in order: each a rollout, or the padding of a row."""

    lengths: list[int] = field(default_factory=list)
    items: list[int] = field(default_factory=list)
    """Number of the rollout; -1 for padding."""
    adapter_tokens: dict[str, int] = field(default_factory=dict)
    tokens: int = 0


class Slab:
    """The arrays of consecutive micro-batches, which are cut from them."""

    def __init__(self, micro_batches: Sequence[_Segments], layout: Layout, arena: Arena | None) -> None:
        self._micro_batches, self._layout, self._arena = micro_batches, layout, arena
        self.items = [item for segments in micro_batches for item in segments.items]
        """Number of each segment's rollout; -1 for padding."""
        self.lengths = [length for segments in micro_batches for length in segments.lengths]
        """Tokens of each segment."""
        *self.starts, total = accumulate(self.lengths, initial=0)
        """First token of each segment."""
        kinds: dict[str, tuple[tuple[int, ...], Any]] = {name: ((total,), dtype) for name, _, dtype in STORED_COLUMNS}
        further = {name: ((total, *spec.shape), spec.dtype) for name, spec in layout.schema.items()}
        new: Allocate = np.empty
        if arena is not None:
            new = arena.block(sum(aligned(*kind) for kind in (*kinds.values(), *further.values())))
        self.arrays = {name: new(*kind) for name, kind in kinds.items()}
        """The :data:`STORED_COLUMNS`, each [T]."""
        self.columns = {name: new(*kind) for name, kind in further.items()}
        """Further columns, each [T] or [T, ...]."""

    def places(self) -> Iterator[tuple[int, slice]]:
        """Number of its rollout, or -1, and its tokens, of each segment."""
        its = zip(self.items, self.starts, self.lengths, strict=True)
        return ((item, slice(start, start + length)) for item, start, length in its)

    def put(self, place: slice, rollout: Rollout | RolloutArrays | None) -> None:
        """Writes one segment; None: masked."""
        fills = self._layout.fills()
        for name, of_rollout, _ in STORED_COLUMNS:
            self.arrays[name][place] = fills[name] if rollout is None else getattr(rollout, of_rollout)
        for name, column in self.columns.items():
            own = None if rollout is None else rollout.columns.get(name)
            values = np.full((), fills[name], column.dtype) if own is None else own
            np.copyto(column[place], values, casting="same_kind")

    def write(self, rollouts: Mapping[int, Rollout | RolloutArrays]) -> None:
        """Writes every segment, in one go; one whose rollout is not given is masked."""
        fills = self._layout.fills()
        its = [*map(rollouts.get, self.items)]
        for name, of_rollout, _ in STORED_COLUMNS:
            parts = [None if rollout is None else getattr(rollout, of_rollout) for rollout in its]
            _concatenate(self.arrays[name], parts, self.lengths, fills[name])
        for name, column in self.columns.items():
            parts = [None if rollout is None else rollout.columns.get(name) for rollout in its]
            _concatenate(column, parts, self.lengths, fills[name])

    def cut(self, facts: ItemFacts, rollouts: Mapping[int, Rollout | RolloutArrays]) -> Iterator[MicroBatch]:
        """The micro-batches: views of the arrays. `rollouts` say which further columns each has."""
        lacking = self._lacking(rollouts)
        bounds = np.array([*self.starts, self.starts[-1] + self.lengths[-1]], np.int32)
        start, first = 0, 0
        for segments in self._micro_batches:
            end, last = start + segments.tokens, first + len(segments.lengths)
            yield deriving(
                DerivedColumns(segments.lengths, segments.items, facts, self._layout.ignore_index, self._arena),
                **{name: array[start:end] for name, array in self.arrays.items()},
                cu_seqlens=bounds[first : last + 1] - np.int32(start),
                columns={name: array[start:end] for name, array in self.columns.items()},
                adapter_tokens=segments.adapter_tokens,
                normalizers=self._layout.normalizers,
                is_dummy=max(segments.items) < 0,
                lacking={k: array[start:end] for k, array in lacking.items() if array[start:end].any()},
            )
            start, first = end, last

    def _lacking(self, rollouts: Mapping[int, Rollout | RolloutArrays]) -> dict[str, NDArray[np.bool_]]:
        """Column -> [T] bool, of those that some rollout came without; one that is missing itself lacks nothing."""
        out = {}
        for name in self.columns:
            without = np.array([item in rollouts and name not in rollouts[item].columns for item in self.items])
            if without.any():
                out[name] = np.repeat(without, self.lengths)
        return out


def lay_out(
    rows: Iterable[Sequence[Row]],
    lengths: Sequence[int],
    adapters: Sequence[str],
    layout: Layout,
    arena: Arena | None = None,
) -> list[Slab]:
    """Memory for one rank's micro-batches, to be written: ``rows[micro_step]`` are the rows of each.

    `lengths` and `adapters` have a value for each rollout. A dummy has fresh arrays.

    Raises:
        PackingError: a row exceeds the layout's tokens or mixes adapters; a rollout is not there, or has no token;
            `pad_to_multiple_of` is below 1.
    """
    if layout.pad_to_multiple_of < 1:
        raise PackingError(f"assemble: pad_to_multiple_of = {layout.pad_to_multiple_of} must be at least 1")
    slabs: list[Slab] = []
    waiting: list[_Segments] = []
    tokens = 0

    def close() -> None:
        nonlocal tokens
        if waiting:
            slabs.append(Slab(waiting.copy(), layout, arena))
            waiting.clear()
        tokens = 0

    for micro_step in rows:
        segments = _segments(micro_step, lengths, adapters, layout)
        if max(segments.items) < 0:
            close()
            slabs.append(Slab([segments], layout, None))
            continue
        waiting.append(segments)
        tokens += segments.tokens
        if tokens >= SLAB_TOKENS:
            close()
    close()
    return slabs


def _segments(rows: Sequence[Row], lengths: Sequence[int], adapters: Sequence[str], layout: Layout) -> _Segments:
    out = _Segments()
    for adapter, row in _by_adapter(rows, adapters):
        its = [lengths[item] for item in row]
        if min(its) < 1:
            raise PackingError(f"assemble: row {tuple(row)} has a rollout of length {min(its)}")
        tokens = sum(its)
        if tokens > layout.row_tokens:
            raise PackingError(
                f"assemble: a row of {len(row)} rollouts has {tokens} tokens; it holds {layout.row_tokens}"
            )
        out.lengths += its
        out.items += row
        padding = -tokens % layout.pad_to_multiple_of
        if padding:
            out.lengths.append(padding)
            out.items.append(-1)
        out.adapter_tokens[adapter] = out.adapter_tokens.get(adapter, 0) + tokens + padding
        out.tokens += tokens + padding
    if not out.items:
        tokens = min(DUMMY_TOKENS, layout.row_tokens)
        out.lengths, out.items = [tokens + -tokens % layout.pad_to_multiple_of], [-1]
        out.adapter_tokens[""] = out.tokens = out.lengths[0]
    return out


def _by_adapter(rows: Sequence[Row], adapters: Sequence[str]) -> list[tuple[str, Row]]:
    """The rows that are not empty, those of one adapter together, adapters in order of appearance."""
    named: dict[str, list[Row]] = {}
    for row in rows:
        if not row:
            continue
        if min(row) < 0 or max(row) >= len(adapters):
            raise PackingError(f"assemble: row {tuple(row)} is out of range for {len(adapters)} items")
        its = {adapters[item] for item in row}
        if len(its) > 1:
            raise PackingError(f"assemble: a row mixes the adapters {', '.join(map(repr, sorted(its)))}")
        named.setdefault(its.pop(), []).append(row)
    return [pair for adapter, group in named.items() for pair in zip(repeat(adapter), group, strict=False)]


def _concatenate(out: NDArray[Any], parts: Sequence[NDArray[Any] | None], lengths: Sequence[int], fill: float) -> None:
    """Writes the parts one after the other into `out`; `fill` where a segment has none."""
    missing = [length for part, length in zip(parts, lengths, strict=True) if part is None]
    filled: Any = parts
    if missing:
        blank = np.full((max(missing), *out.shape[1:]), fill, out.dtype)
        filled = [blank[:length] if part is None else part for part, length in zip(parts, lengths, strict=True)]
    np.concatenate(filled, out=out, casting="same_kind")
