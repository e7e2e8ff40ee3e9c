"""Drops in an archive: a row of the history as what was dropped, why, and when."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class DroppedGroup:
    """A group, or a part of one, that was not trained."""

    history_id: str
    """Id of its record in the run's history."""
    at_ms: int
    """Server time of the drop, in milliseconds."""
    group_id: str
    env: str
    reason: str
    """Reason of the drop, a :class:`~rlbuffer.records.states.Reason` by name."""
    detail: str
    """The rule that dropped it, with value and limit."""
    rollouts: int
    tokens: int
    reward: float | None
    """Mean over the scored rollouts."""
    min_version: int
    committed: int | None
    """The last step that was committed then; None where the archive does not say."""
    record: Mapping[str, Any]
    """Its whole record in the history; empty for a group of a step that was taken back, which has none of its own."""


def record_of(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The whole record of a row of the history; empty where it has none."""
    record = json.loads(row["record"] or "{}")
    return record if isinstance(record, dict) else {}


def drop_of(row: Mapping[str, Any], committed: int | None) -> DroppedGroup:
    """The drop of a row of the history; `committed`: the last step then."""
    return DroppedGroup(
        history_id=row["history_id"],
        at_ms=row["at_ms"],
        group_id=row["group_id"] or "",
        env=row["env"] or "",
        reason=row["reason"] or "",
        detail=row["detail"] or "",
        rollouts=row["rollouts"] or 0,
        tokens=row["tokens"] or 0,
        reward=row["reward"],
        min_version=row["min_version"] or 0,
        committed=committed,
        record=record_of(row),
    )
