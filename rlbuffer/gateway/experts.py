"""The experts of a call on the server: those of the tokens that are new in it, and of the last one before them.

An engine takes the last token of an answer in when it goes on behind it, so the next call has the record of it. What
lies further back stands in the earlier calls: a conversation of n calls keeps each row once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlbuffer.config.models import ExpertCounts, config_of, experts_in
from rlbuffer.config.settings import RunSettings
from rlbuffer.errors import ConfigError
from rlbuffer.records.routed import ROUTED_EXPERTS


def counts_of(settings: RunSettings) -> ExpertCounts | None:
    """The sizes of what is recorded; None where nothing is.

    Raises:
        ConfigError: experts are to be recorded of a model that has none, or of one that is not known here.
    """
    if not settings.gateway.record_experts:
        return None
    config = config_of(settings.model)
    counts = experts_in(config)
    if counts is None or not (counts.layers and counts.taken):
        which = f"of a model of kind {config.get('model_type')}" if config else f"at model.path = {settings.model.path}"
        raise ConfigError(
            f"gateway.record_experts = true, but the config {which} does not say how many layers and experts there are",
            setting="gateway.record_experts",
        )
    return counts


def kept_rows(rows: NDArray[Any] | None, start: int) -> dict[str, Any]:
    """The detail of a call that has the record [T, layers, K] from token `start` on; none where there is no record."""
    if rows is None:
        return {}
    sampled = np.ascontiguousarray(rows[start:])
    return {ROUTED_EXPERTS: [sampled.dtype.str, list(sampled.shape), sampled.tobytes()]}


def rows_of(details: Mapping[str, Any]) -> NDArray[Any] | None:
    """The record in the details of a call, of its last tokens; None where it has none."""
    kept = details.get(ROUTED_EXPERTS)
    if kept is None:
        return None
    dtype, shape, data = kept
    rows: NDArray[Any] = np.frombuffer(data, np.dtype(dtype)).reshape(shape)
    return rows
