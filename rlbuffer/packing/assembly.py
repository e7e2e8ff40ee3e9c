"""Assembly: rollouts that are in memory already become micro-batches, column by column. A pull has no use for it: it
receives rollouts where they are trained.

Nothing here looks at a token. Every column of a slab of micro-batches is one `numpy.concatenate` of the rollouts' own
arrays; what follows from them is made when somebody asks for it (:mod:`rlbuffer.packing.derived_columns`).
That runs at several hundred million tokens a second on one core, near what copying the same bytes costs (``python -m
benchmarks.bench_assembly``), against a few million for lists of Python integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from rlbuffer.errors import PackingError
from rlbuffer.packing.arena import Arena
from rlbuffer.packing.derived_columns import ItemFacts, own_advantages
from rlbuffer.packing.further_columns import ColumnSpec, common_spec, shown_kind
from rlbuffer.packing.slabs import IGNORE_INDEX, Layout, lay_out
from rlbuffer.records.micro_batch import MicroBatch, Sample
from rlbuffer.records.rollout import Rollout, RolloutArrays
from rlbuffer.records.step_plan import Normalizers, Row


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
    ignore_index: int = IGNORE_INDEX,
    arena: Arena | None = None,
    columns: Sequence[str] = (),
) -> tuple[MicroBatch, ...]:
    """Assembles one rank's micro-batches: ``rows[micro_step]`` are the rows of each, as indices into `items`.

    A micro-batch concatenates its rows, those of one adapter next to each other; the padding of a row is a segment
    of its own at the row's end. One whose rows are all () is a dummy, a few masked tokens in fresh arrays
    (:data:`~rlbuffer.packing.slabs.DUMMY_TOKENS`). All micro-batches have the same further columns: `columns` and every
    one that an item has; where a rollout lacks one, its declared fill stands in
    (:func:`~rlbuffer.packing.further_columns.register_column`; 0 without declaration), and `MicroBatch.lacking` says
    where.

    Memory: without `arena` every array is fresh. With one, arrays are cut from memory that is used again once nobody
    holds an array of that micro-batch (see :mod:`rlbuffer.packing.arena`).

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
    )
    rollouts = {i: item.rollout for i, item in enumerate(items) if item.rollout is not None}
    slabs = lay_out(rows, [item.length for item in items], [item.adapter for item in items], layout, arena)
    samples = [item.sample for item in items]
    facts = ItemFacts(
        spans=[() if item.rollout is None else item.rollout.version_spans for item in items],
        advantages=[sample.advantage for sample in samples],
        own_advantages=own_advantages(rollouts),
        samples=lambda its: partial(tuple, [samples[item] for item in its]),
    )
    for slab in slabs:
        slab.write(rollouts)
    return tuple(micro_batch for slab in slabs for micro_batch in slab.cut(facts, rollouts))


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
