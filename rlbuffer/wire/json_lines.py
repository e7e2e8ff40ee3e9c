"""A group as a line of JSON that :func:`rlbuffer.wire.jsonl.group_from_line` reads again, byte for byte."""

from __future__ import annotations

import json
from typing import Any

from numpy.typing import NDArray

from rlbuffer.records.columns import REQUIRED_COLUMNS
from rlbuffer.records.group import Group
from rlbuffer.records.rollout import Rollout, TokenSequence
from rlbuffer.wire.json_bytes import without_bytes

_GROUP_VALUES = ("group_id", "env", "prompt_id", "planned_size", "adapter", "worker", "created")
_ROLLOUT_VALUES = ("rollout_id", "reward", "finish_reason", "is_truncated", "failure", "text")


def line_of(group: Group) -> str:
    """The group on one line, without what it does not have.

    Example:
        >>> from rlbuffer.testing import make_group
        >>> from rlbuffer.wire.jsonl import group_from_line
        >>> group = make_group(lengths=[8, 9])
        >>> group_from_line(line_of(group)).rollouts == group.rollouts
        True
    """
    record: dict[str, Any] = {name: getattr(group, name) for name in _GROUP_VALUES}
    record |= {"needs": list(group.needs), "answer": without_bytes(group.answer)}
    record |= {"metadata": without_bytes(dict(group.metadata)), "rollouts": [_rollout(r) for r in group.rollouts]}
    return json.dumps(_kept(record), ensure_ascii=False, allow_nan=False)


def _rollout(rollout: Rollout) -> dict[str, Any]:
    record: dict[str, Any] = {name: getattr(rollout, name) for name in _ROLLOUT_VALUES} | _sequence(rollout)
    record |= {"rewards": dict(rollout.rewards), "successes": dict(rollout.successes)}
    record |= {"further": [_kept(_sequence(sequence)) for sequence in rollout.further]}
    return _kept(record | {"metadata": without_bytes(dict(rollout.metadata))})


def _sequence(its: TokenSequence) -> dict[str, Any]:
    record: dict[str, Any] = {name: getattr(its, name).tolist() for name in REQUIRED_COLUMNS}
    record |= {"version_spans": [list(span) for span in its.version_spans], "name": its.name}
    record |= {"turns": [[*turn[:4], without_bytes(turn.metadata)] for turn in its.turns]}
    for table in ("columns", "attachments"):
        record[table] = {name: _array(array) for name, array in getattr(its, table).items()}
    return record


def _array(array: NDArray[Any]) -> dict[str, Any]:
    return {"dtype": array.dtype.str, "shape": list(array.shape), "values": array.ravel().tolist()}


def _kept(record: dict[str, Any]) -> dict[str, Any]:
    """Without what is as it would be anyway; an empty text or answer is another one than none."""
    always, unless_none = ("prompt_id", *REQUIRED_COLUMNS), ("text", "answer")
    return {
        name: value
        for name, value in record.items()
        if name in always
        or (value is not None and (name in unless_none or (value is not False and value not in ("", [], {}))))
    }
