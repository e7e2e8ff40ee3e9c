"""Rows of rollouts become micro-batches, column by column.

Rows are laid out before there is anything to write: a pull writes payloads there, a chunk after the other, and
:func:`assemble` rollouts that are in memory already. Nothing here looks at a token: every column of a slab of
micro-batches is one `numpy.concatenate` of the rollouts' own arrays, and what follows from them is made when somebody
asks for it (:class:`~rlbuffer.records.micro_batch.Segments`). That runs at several hundred million tokens a second on
one core, near what copying the same bytes costs.

A rollout that is missing or damaged is masked, never left out: it becomes padding of its planned length, so all ranks
keep the same shapes and a replay gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, repeat
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlbuffer.errors import PackingError
from rlbuffer.packing.further_columns import ColumnSpec, common_spec, shown_kind
from rlbuffer.records.memory import empty
from rlbuffer.records.micro_batch import IGNORE_INDEX, MicroBatch, Sample, Segments
from rlbuffer.records.rollout import TokenArrays, TokenSequence
from rlbuffer.records.step_plan import Normalizers, Row

DUMMY_TOKENS = 8
"""Tokens of a dummy micro-batch: enough for every layer to have something to multiply, too few to cost anything."""
SLAB_TOKENS = 65536
"""Tokens of a slab: several small micro-batches share the cost of the numpy calls, and what one call wrote is still in
the cache for the next."""


@dataclass(frozen=True, slots=True)
class PackItem:
    """One rollout, or one sequence of it, as :func:`assemble` takes it."""

    rollout: TokenSequence | None
    """None when it is missing or damaged: masked padding of the planned length takes its place."""
    sample: Sample
    """The trainer's record of it, with its planned length and its adapter; its advantage is broadcast to the trained
    tokens (a column ``advantages`` wins)."""

    def __post_init__(self) -> None:
        name, length = self.sample.rollout_id, self.sample.length
        if length < 1:
            raise PackingError(f"assemble: rollout {name!r} has length {length}")
        if self.rollout is not None and (tokens := len(self.rollout.tokens)) != length:
            raise PackingError(f"assemble: rollout {name!r} has {tokens} tokens, {length} planned")


def assemble(
    rows: Sequence[Sequence[Row]],
    items: Sequence[PackItem],
    *,
    row_tokens: int,
    normalizers: Normalizers,
    pad_token_id: int = 0,
    pad_to_multiple_of: int = 1,
    ignore_index: int = IGNORE_INDEX,
    columns: Sequence[str] = (),
    world_size: int = 1,
) -> tuple[MicroBatch, ...]:
    """Assembles one rank's micro-batches: ``rows[micro_step]`` are the rows of each, as indices into `items`.

    A micro-batch concatenates its rows, those of one adapter next to each other; the padding of a row is a segment
    of its own at the row's end. One whose rows are all () is a dummy, a few masked tokens (:data:`DUMMY_TOKENS`). All
    micro-batches have the same further columns: `columns` and every one that an item has; where a rollout lacks one,
    its declared fill stands in (:func:`~rlbuffer.packing.further_columns.register_column`; 0 without declaration), and
    `MicroBatch.lacking` says where.

    Raises:
        PackingError: a row exceeds `row_tokens` or mixes adapters; an index is out of range; a column comes in shapes
            or dtypes that do not go together, or is asked for in `columns` with nothing known of it.
    """
    layout = Layout(
        schema=_schema(items, columns),
        row_tokens=row_tokens,
        pad_token_id=pad_token_id,
        pad_to_multiple_of=pad_to_multiple_of,
        ignore_index=ignore_index,
        normalizers=normalizers,
        world_size=world_size,
    )
    samples = [item.sample for item in items]
    made = Assembly(rows, [sample.length for sample in samples], [sample.adapter for sample in samples], layout)
    rollouts = {i: item.rollout for i, item in enumerate(items) if item.rollout is not None}
    for run in made.runs(range(len(made.items))):
        made.write(run, rollouts)
    made.note(rollouts)
    return made.micro_batches(
        [sample.advantage for sample in samples], lambda places: partial(tuple, [samples[item] for item in places])
    )


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
    world_size: int = 1


@dataclass(slots=True)
class _Batch:
    """The segments of one micro-batch, in order: each a rollout, or the padding of a row."""

    lengths: list[int] = field(default_factory=list)
    items: list[int] = field(default_factory=list)
    """Number of the rollout; -1 for padding."""
    adapter_tokens: dict[str, int] = field(default_factory=dict)
    tokens: int = 0


Stored = tuple[NDArray[np.int32], NDArray[np.bool_], NDArray[np.float32]]
"""Tokens, marks and logprobs, each [T]."""


class _Slab(NamedTuple):
    """The arrays of consecutive micro-batches, which are cut from them."""

    first: int
    """Number of its first segment among all."""
    bounds: list[int]
    """First token of each segment, and the number of all tokens."""
    batches: list[_Batch]
    stored: Stored
    columns: dict[str, NDArray[Any]]
    """Further columns, each [T] or [T, ...]."""


class Run(NamedTuple):
    """Consecutive segments of one slab."""

    slab: _Slab
    segments: range


class Assembly:
    """One rank's micro-batches while they are written: ``rows[micro_step]`` are the rows of each.

    `lengths` and `adapters` have a value for each rollout; nothing of those in `masked` is trained.

    Raises:
        PackingError: a row exceeds the layout's tokens or mixes adapters; a rollout is not there, or has no token;
            `pad_to_multiple_of` is below 1.
    """

    def __init__(
        self,
        rows: Iterable[Sequence[Row]],
        lengths: Sequence[int],
        adapters: Sequence[str],
        layout: Layout,
        masked: Container[int] = (),
    ) -> None:
        if layout.pad_to_multiple_of < 1:
            raise PackingError(f"assemble: pad_to_multiple_of = {layout.pad_to_multiple_of} must be at least 1")
        self._layout, self._masked = layout, masked
        self.items: list[int] = []
        """Number of each segment's rollout; -1 for padding."""
        self._slabs: list[_Slab] = []
        self._spans: dict[int, Sequence[Sequence[int]]] = {}
        """Of each rollout that was written."""
        self._own_advantages: dict[int, NDArray[Any]] = {}
        self._lacking: dict[str, set[int]] = {}
        """Column -> rollouts that came without it."""
        waiting: list[_Batch] = []
        tokens = 0
        for micro_step in rows:
            waiting.append(_batch(micro_step, lengths, adapters, layout))
            tokens += waiting[-1].tokens
            if tokens >= SLAB_TOKENS:
                self._add_slab(waiting)
                waiting, tokens = [], 0
        if waiting:
            self._add_slab(waiting)

    def _add_slab(self, batches: list[_Batch]) -> None:
        bounds = [*accumulate([length for batch in batches for length in batch.lengths], initial=0)]
        total = bounds[-1]
        stored = empty((total,), np.int32), empty((total,), np.bool_), empty((total,), np.float32)
        columns = {name: empty((total, *spec.shape), spec.dtype) for name, spec in self._layout.schema.items()}
        self._slabs.append(_Slab(len(self.items), bounds, batches, stored, columns))
        self.items += [item for batch in batches for item in batch.items]

    def runs(self, segments: range) -> Iterator[Run]:
        """These segments, slab by slab."""
        for slab in self._slabs:
            span = range(max(segments.start, slab.first), min(segments.stop, slab.first + len(slab.bounds) - 1))
            if span:
                yield Run(slab, span)

    def write(self, run: Run, rollouts: Mapping[int, TokenArrays]) -> Stored:
        """Writes the segments of a run; one whose rollout is not given is masked. -> what it wrote."""
        slab, segments = run
        bounds = slab.bounds[segments.start - slab.first : segments.stop - slab.first + 1]
        items, whole = self.items[segments.start : segments.stop], slice(bounds[0], bounds[-1])
        records = [*map(rollouts.get, items)]
        tokens, marks, logprobs = slab.stored[0][whole], slab.stored[1][whole], slab.stored[2][whole]
        _concatenate(tokens, [None if r is None else r.tokens for r in records], bounds, self._layout.pad_token_id)
        _concatenate(marks, [None if r is None else r.loss_mask for r in records], bounds, False)
        _concatenate(logprobs, [None if r is None else r.logprobs for r in records], bounds, 0.0)
        for name, column in slab.columns.items():
            spec = self._layout.schema[name]
            parts = [None if r is None else spec.fitted(r.columns.get(name)) for r in records]
            _concatenate(column[whole], parts, bounds, spec.fill)
        if self._masked:
            for item, start, end in zip(items, bounds[:-1], bounds[1:], strict=True):
                if item in self._masked:
                    slab.stored[1][start:end] = False
        return tokens, marks, logprobs

    def note(self, rollouts: Mapping[int, TokenArrays]) -> None:
        """Keeps of rollouts that were written what derived arrays follow from, and nothing else of them."""
        for item, rollout in rollouts.items():
            self._spans[item] = rollout.version_spans
            if "advantages" in rollout.columns:
                self._own_advantages[item] = np.array(rollout.columns["advantages"])
            for name in self._layout.schema:
                if name not in rollout.columns:
                    self._lacking.setdefault(name, set()).add(item)

    def micro_batches(
        self, advantages: Sequence[float], samples: Callable[[Sequence[int]], Callable[[], tuple[Sample, ...]]]
    ) -> tuple[MicroBatch, ...]:
        """The micro-batches, of which all was written.

        Args:
            advantages: one each rollout.
            samples: takes numbers of rollouts, and makes a function that makes their records.
        """
        return tuple(made for slab in self._slabs for made in self._cut(slab, advantages, samples))

    def _cut(
        self,
        slab: _Slab,
        advantages: Sequence[float],
        samples: Callable[[Sequence[int]], Callable[[], tuple[Sample, ...]]],
    ) -> Iterator[MicroBatch]:
        bounds, first, given = np.array(slab.bounds, np.int32), 0, self._own_advantages
        spans, layout = self._spans, self._layout
        for batch in slab.batches:
            items, last = batch.items, first + len(batch.items)
            place = slice(slab.bounds[first], slab.bounds[last])
            are_samples = [item >= 0 for item in items]
            tokens, marks, logprobs = slab.stored
            yield MicroBatch(
                input_ids=tokens[place],
                cu_seqlens=bounds[first : last + 1] - bounds[first],
                loss_mask=marks[place],
                logprobs=logprobs[place],
                columns={name: column[place] for name, column in slab.columns.items()},
                adapter_tokens=batch.adapter_tokens,
                normalizers=layout.normalizers,
                world_size=layout.world_size,
                is_dummy=not any(are_samples),
                segments=Segments(
                    spans=[spans.get(item, ()) for item in items],
                    advantages=[advantages[item] if item >= 0 else 0.0 for item in items],
                    own_advantages={i: given[item] for i, item in enumerate(items) if item in given} if given else {},
                    are_samples=are_samples,
                    samples=samples([item for item in items if item >= 0]),
                    ignore_index=layout.ignore_index,
                ),
                lacking={
                    name: np.repeat([item in lacking for item in items], batch.lengths)
                    for name, lacking in self._lacking.items()
                    if not lacking.isdisjoint(items)
                },
            )
            first = last


def _batch(rows: Sequence[Row], lengths: Sequence[int], adapters: Sequence[str], layout: Layout) -> _Batch:
    out = _Batch()
    for adapter, row in _by_adapter(rows, adapters):
        row_lengths = [lengths[item] for item in row]
        if min(row_lengths) < 1:
            raise PackingError(f"assemble: row {tuple(row)} has a rollout of length {min(row_lengths)}")
        tokens = sum(row_lengths)
        if tokens > layout.row_tokens:
            raise PackingError(
                f"assemble: a row of {len(row)} rollouts has {tokens} tokens; it holds {layout.row_tokens}"
            )
        out.lengths += row_lengths
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
        row_adapters = {adapters[item] for item in row}
        if len(row_adapters) > 1:
            raise PackingError(f"assemble: a row mixes the adapters {', '.join(map(repr, sorted(row_adapters)))}")
        named.setdefault(row_adapters.pop(), []).append(row)
    return [pair for adapter, group in named.items() for pair in zip(repeat(adapter), group, strict=False)]


def _concatenate(out: NDArray[Any], parts: Sequence[NDArray[Any] | None], bounds: Sequence[int], fill: float) -> None:
    """Writes the parts one after the other into `out`; `fill` where a segment has none."""
    missing = [i for i, part in enumerate(parts) if part is None]
    if missing:
        filled = [*parts]
        blank = np.full((max(bounds[i + 1] - bounds[i] for i in missing), *out.shape[1:]), fill, out.dtype)
        for i in missing:
            filled[i] = blank[: bounds[i + 1] - bounds[i]]
        parts = filled
    np.concatenate(parts, out=out, casting="same_kind")  # type: ignore[call-overload]


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
