"""Parts of a rollout's payload: the details and the arrays, each found small enough before it is copied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from numpy.typing import NDArray

from rlbuffer.errors import InvalidRollout, PayloadError
from rlbuffer.records.checks import MAX_ITEMS, plain
from rlbuffer.records.columns import COLUMN_DTYPES, REQUIRED_COLUMNS
from rlbuffer.records.rollout import Rollout
from rlbuffer.wire.bounded_msgpack import MAX_LEVELS, pack
from rlbuffer.wire.metadata import MAX_PAYLOAD_BYTES

HEADER_BYTES = 24
"""Bytes before the details."""
MAX_DETAILS_BYTES = 4 * 2**20
"""Turns and metadata of one rollout, or answer and metadata of one group: they become Python objects when read."""
CODES = {dtype: dtype.str.lstrip("<|") for dtype in COLUMN_DTYPES}
"""Dtype -> its name in the tables of arrays."""


def arrays_of(rollout: Rollout) -> list[NDArray[Any]]:
    """Every array in wire order.

    Raises:
        InvalidRollout: they and the text take more than 64 MiB, or one has a dimension beyond what is read.
    """
    required = (rollout.tokens, rollout.loss_mask, rollout.logprobs)
    arrays = [*required, *rollout.columns.values(), *rollout.attachments.values()]
    size = HEADER_BYTES + sum([array.nbytes for array in arrays]) + len(rollout.text or "")
    if size > MAX_PAYLOAD_BYTES:
        raise giant(rollout, arrays, size)
    for i, array in enumerate(arrays):
        # An array of no bytes, because another dimension is 0, is still more than a decoder believes.
        if array.size == 0 and max(array.shape) > MAX_PAYLOAD_BYTES:
            name = _names(rollout)[i]
            raise InvalidRollout(f"rollout {rollout.rollout_id}: {name} has the shape {list(array.shape)}")
    return arrays


def giant(rollout: Rollout, arrays: Sequence[NDArray[Any]], size: int) -> InvalidRollout:
    """The refusal of a payload of `size` bytes."""
    parts = [*zip(_names(rollout), (a.nbytes for a in arrays), strict=True), ("text", len(rollout.text or ""))]
    largest = sorted(parts, key=lambda item: -item[1])[:3]
    return InvalidRollout(
        f"rollout {rollout.rollout_id}: payload of {size} bytes is above the limit of {MAX_PAYLOAD_BYTES} (64 MiB); "
        f"the largest parts: {', '.join(f'{name} {n}' for name, n in largest)}"
    )


def _names(rollout: Rollout) -> list[str]:
    """Names of the arrays in messages: a column and an attachment may share a name."""
    return [*REQUIRED_COLUMNS, *rollout.columns, *(f"attachment {name}" for name in rollout.attachments)]


def packed_details(rollout: Rollout, text_bytes: int | None) -> bytes:
    """Everything that a payload says of its rollout beside the arrays.

    Only what a map holds can have changed since the record was checked, so only that is checked again.

    Raises:
        InvalidRollout: they take more than 4 MiB, or hold what msgpack cannot.
    """
    try:
        packed = pack(
            [
                rollout.rollout_id,
                rollout.reward,
                _map("value[2]", rollout.rewards),
                _map("value[3]", rollout.successes),
                rollout.finish_reason,
                rollout.is_truncated,
                [*chain.from_iterable(rollout.version_spans)],
                [
                    turn._replace(metadata=_map(f"value[7][{i}][4]", turn.metadata)) if turn.metadata else turn
                    for i, turn in enumerate(rollout.turns)
                ],
                [[name, CODES[a.dtype], *a.shape[1:]] for name, a in rollout.columns.items()],
                [[name, CODES[a.dtype], *a.shape] for name, a in rollout.attachments.items()],
                text_bytes,
                _map("value[11]", rollout.metadata),
            ]
        )
    except InvalidRollout as error:
        raise InvalidRollout(f"rollout {rollout.rollout_id}: metadata cannot be encoded: {error}") from None
    except PayloadError as error:
        raise InvalidRollout(f"rollout {rollout.rollout_id}: metadata {error}") from None
    if len(packed) > MAX_DETAILS_BYTES:
        raise InvalidRollout(
            f"rollout {rollout.rollout_id}: turns and metadata take {len(packed)} bytes, above the limit of "
            f"{MAX_DETAILS_BYTES}; large values belong to text, columns or attachments"
        )
    return packed


def _map(place: str, values: Mapping[str, Any]) -> Any:
    """A map of the details, plain. `place` has a bracket for each level above it."""
    return plain(place, values, depth=MAX_LEVELS - place.count("["), items=MAX_ITEMS) if values else {}
