"""The payloads of a rank's part as a pull reads them: the arrays of each that is what its push announced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from rlbuffer.packing.further_columns import ColumnSpec, fits
from rlbuffer.records.rollout import Rollout, RolloutArrays
from rlbuffer.store.part_rollouts import PartRollouts
from rlbuffer.store.payloads import Trainable, chunks, decoded
from rlbuffer.store.viewer import Viewer
from rlbuffer.wire.views import view_rollouts


class PartPayloads(NamedTuple):
    """The payloads of a part, by rollout."""

    arrays: dict[int, RolloutArrays | Rollout]
    """Those that can be trained."""
    damaged: dict[int, str]
    """What is wrong with the others."""
    groups: dict[str, bytes | None]
    """Payload key -> encoded group part of the push."""

    def put(self, i: int, outcome: Rollout | str) -> None:
        """Notes what a payload is found to be that was decoded whole."""
        self.arrays.pop(i, None)
        if isinstance(outcome, str):
            self.damaged[i] = outcome
        else:
            self.arrays[i] = outcome


def read_part(store: Viewer, rollouts: PartRollouts, schema: Mapping[str, ColumnSpec], can: Trainable) -> PartPayloads:
    """Reads the rollouts of a part, and verifies each.

    The ranges of tokens, marks and logprobs are left to :func:`~rlbuffer.wire.views.in_range`, over many rollouts at
    once; :func:`~rlbuffer.store.payloads.decoded` then says what is wrong with one that is out of them.

    Args:
        schema: further columns of the step.
    """
    keys, names = rollouts.column("payload_key"), [*map(str, rollouts.column("index"))]
    sizes = rollouts.numbers["size"].tolist()
    is_refused = [bool(adapter) and not can.adapters for adapter in rollouts.column("adapter")]
    read, needed = PartPayloads({}, {}, {}), set(can.columns)
    for chunk in chunks(sizes):
        request: dict[str, dict[str, int]] = {}
        for i in chunk:
            request.setdefault(keys[i], {})[names[i]] = sizes[i]
        values, groups = store.read_fields(request, "group")
        read.groups.update(groups)
        data = [values[keys[i], names[i]] for i in chunk]
        views = view_rollouts(data, rollouts.numbers[chunk.start : chunk.stop])
        for i, its, view in zip(chunk, data, views, strict=True):
            if view and not is_refused[i] and view.columns.keys() >= needed and fits(view, schema):
                read.arrays[i] = view
            else:
                read.put(i, decoded(rollouts[i], its, schema, can))
    return read
