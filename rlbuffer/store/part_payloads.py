"""The payloads of a rank's part as a pull receives them: into the memory in which they are trained.

A payload without further columns, attachments and text is received in pieces, its arrays in their places; any other one
is received whole and its arrays are views, to be written to their places.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlbuffer.packing.arena import Arena
from rlbuffer.packing.further_columns import ColumnSpec
from rlbuffer.records.rollout import Rollout, RolloutArrays
from rlbuffer.store.part_rollouts import PartRollouts
from rlbuffer.store.payloads import Trainable, chunks, viewed
from rlbuffer.store.received import InPlace
from rlbuffer.store.viewer import Viewer
from rlbuffer.wire.in_place import Pieces, Spans, checked, checksum_of, gaps, head_sizes

Outcome = RolloutArrays | Rollout | str
"""The arrays of a rollout that do not lie in their place yet, or what is wrong with it."""


class Memory(NamedTuple):
    """Memory of consecutive tokens of many rollouts."""

    tokens: memoryview
    loss_mask: memoryview
    logprobs: memoryview
    marks: NDArray[np.bool_]
    """[T] bool; the same memory as `loss_mask`."""


Place = tuple[Memory, int]
"""The memory of a rollout, and its first token there."""


class PartPayloads(NamedTuple):
    """The payloads of a part; a list has one of each rollout."""

    pieces: list[Pieces]
    """The bytes of each."""
    loose: dict[int, Outcome]
    """Those whose arrays do not lie in their places. The others lie there, and all but the range of their values is
    checked."""
    spans: list[Spans]
    """Version spans; () where something is wrong."""
    groups: dict[str, bytes | None]
    """Payload key -> encoded group part of the push."""

    def loosen(self, i: int, outcome: Outcome) -> None:
        """Notes what is known of rollout i."""
        self.loose[i] = outcome
        self.spans[i] = () if isinstance(outcome, str) else outcome.version_spans


def receive(
    store: Viewer,
    rollouts: PartRollouts,
    places: Sequence[Place],
    schema: Mapping[str, ColumnSpec],
    can: Trainable,
    arena: Arena,
) -> PartPayloads:
    """Receives the rollouts of a part, and verifies each.

    The ranges of tokens, marks and logprobs are left to :func:`~rlbuffer.wire.views.in_range`, over many rollouts at
    once; :func:`~rlbuffer.store.payloads.decoded` then says what is wrong with one that is out of them.

    Args:
        schema: further columns of the step.
        arena: memory for what does not lie in the places.
    """
    numbers, names = rollouts.numbers, [*map(str, rollouts.column("index"))]
    sizes, lengths = (numbers[name].astype(np.int64) for name in ("size", "length"))
    heads = np.zeros_like(sizes) if schema or can.columns else head_sizes(sizes, lengths)
    if not can.adapters:
        heads[[adapter != "" for adapter in rollouts.column("adapter")]] = 0
    columns = [column.tolist() for column in (sizes, heads, *gaps(lengths), lengths)]
    its_sizes, its_heads, *_, its_lengths = columns
    layout = [*zip(*columns, places, strict=True)]
    pulled = PartPayloads([], {}, [()] * len(rollouts), {})
    for chunk in chunks(its_sizes):
        pieces = pulled.pieces
        pieces += _pieces(layout[chunk.start : chunk.stop], arena)
        of_key: dict[str, list[int]] = {}
        for i, key in zip(chunk, rollouts.column("payload_key")[chunk.start : chunk.stop], strict=True):
            of_key.setdefault(key, []).append(i)
        request = {key: [(names[i], its_sizes[i], pieces[i]) for i in its] for key, its in of_key.items()}
        values, groups = store.receive_pushed(request, checksum_of)
        pulled.groups.update(groups)
        checksums: dict[int, int] = {}
        for key, its in of_key.items():
            received = values[key]
            if isinstance(received, InPlace):
                checksums |= zip(its, received.checksums, strict=True)
        placed = [i for i in checksums if its_heads[i]]
        all_spans = checked(
            [pieces[i] for i in placed],
            [checksums[i] for i in placed],
            [memory.marks[first : first + its_lengths[i]] for i in placed for memory, first in (places[i],)],
            numbers[placed],
        )
        for i, spans in zip(placed, all_spans, strict=True):
            pulled.spans[i] = spans or ()
        for key, its in of_key.items():
            for n, i in enumerate(its):
                if not pulled.spans[i]:
                    received = values[key]
                    data = b"".join(pieces[i]) if isinstance(received, InPlace) else received[n]
                    pulled.loosen(i, viewed(rollouts[i], data, schema, can))
    return pulled


def _pieces(layout: Sequence[tuple[int, int, int, int, int, Place]], arena: Arena) -> Iterator[Pieces]:
    """Memory for each payload: (its size, bytes before the tokens, the two gaps between arrays, its tokens, its place).

    A payload with no bytes before the tokens has an unknown layout, and is received in one piece."""
    total = sum([head + gap + other if head else size for size, head, gap, other, _, _ in layout])
    block, at = arena.block(total)((total,), np.uint8).data, 0
    for size, head, gap, other, length, ((tokens, loss_mask, logprobs, _), first) in layout:
        if head:
            end, a, b = first + length, at + head, at + head + gap
            wide = slice(4 * first, 4 * end)
            yield [block[at:a], tokens[wide], block[a:b], loss_mask[first:end], block[b : b + other], logprobs[wide]]
            at = b + other
        else:
            yield [block[at : at + size]]
            at += size
