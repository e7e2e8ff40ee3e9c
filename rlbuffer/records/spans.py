"""Stretches of a rollout: which policy version sampled which tokens, and which role spoke them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlbuffer.errors import InvalidRollout
from rlbuffer.records.checks import MAX_COUNT, as_integer, as_items, as_number, as_text, plain, shown

MAX_SPANS = 2**14
"""Version spans, and turns, of one rollout."""


class VersionSpan(NamedTuple):
    """Tokens ``start`` to ``end`` (exclusive) were sampled by ``policy_version``."""

    policy_version: int
    """The version that sampled them, from 0."""
    start: int
    """Position of the first token, from 0."""
    end: int
    """Position behind the last one."""


class Turn(NamedTuple):
    """Tokens ``start`` to ``end`` (exclusive) belong to ``role``; reward and metadata of the turn are optional."""

    role: str
    """Speaker: user, assistant, tool ..."""
    start: int
    """Position of the first token, from 0."""
    end: int
    """Position behind the last one."""
    reward: float | None = None
    """Reward of this turn alone; None: it has none."""
    metadata: Mapping[str, Any] | None = None
    """The user's own; msgpack types only."""


def as_spans(spans: Any, mask: NDArray[np.bool_]) -> tuple[VersionSpan, ...]:
    """Checked version spans: ascending, disjoint, covering all trained tokens of a rollout's mask [T]."""
    length = len(mask)
    out, gaps, position = [], [], 0
    for item in as_items("version_spans", spans):
        try:
            version, start, end = item
        except (TypeError, ValueError):
            raise InvalidRollout(f"version_spans: expected (policy_version, start, end), got {shown(item)}") from None
        if not type(version) is type(start) is type(end) is int or not (
            0 <= version <= MAX_COUNT and position <= start < end <= length
        ):
            version, start, end = _span(version, start, end, position, length)
        if position < start:
            gaps.append((position, start))
        position = end
        out.append(VersionSpan(version, start, end))
    _check_count("version_spans", len(out))
    if not out:
        raise InvalidRollout("version_spans: at least one is required")
    if position < length:
        gaps.append((position, length))
    for start, end in gaps:
        if mask[bare := start + mask[start:end].argmax()]:
            raise InvalidRollout(f"version_spans: the trained token at position {bare} is in no span")
    return tuple(out)


def _span(version: Any, start: Any, end: Any, position: int, length: int) -> tuple[int, int, int]:
    """A span of Python's integers, where it is not one already or breaks a rule."""
    version = as_integer("version_spans", version)
    start, end = _bounds("version_spans", start, end, position, length)
    if start == end:
        raise InvalidRollout(f"version_spans: [{start}, {end}) is empty")
    return version, start, end


def as_turns(turns: Any, length: int) -> tuple[Turn, ...]:
    """Checked turns: ascending and disjoint inside a rollout of `length` tokens; a turn may be empty."""
    out, position = [], 0
    for i, item in enumerate(as_items("turns", turns)):
        try:
            if isinstance(item, str | bytes | Mapping):
                raise TypeError
            turn = Turn(*item)
        except TypeError:
            raise InvalidRollout(f"turns: expected (role, start, end, reward?, metadata?), got {shown(item)}") from None
        start, position = _bounds("turns", turn.start, turn.end, position, length)
        role = as_text(f"turns[{i}].role", turn.role, limit=64)
        reward = None if turn.reward is None else as_number(f"turns[{i}].reward", turn.reward)
        metadata = None
        if turn.metadata is not None:
            if not isinstance(turn.metadata, Mapping):
                raise InvalidRollout(f"turns[{i}].metadata: expected a mapping, got {shown(turn.metadata)}")
            metadata = plain(f"turns[{i}].metadata", turn.metadata) or None
        out.append(Turn(role, start, position, reward, metadata))
    _check_count("turns", len(out))
    return tuple(out)


def _bounds(name: str, start: Any, end: Any, position: int, length: int) -> tuple[int, int]:
    low, high = (as_integer(name, x, low=-(2**63), high=2**63 - 1) for x in (start, end))
    if not position <= low <= high <= length:
        raise InvalidRollout(f"{name}: [{low}, {high}) is out of order or outside {length} tokens")
    return low, high


def _check_count(name: str, count: int) -> None:
    if count > MAX_SPANS:
        raise InvalidRollout(f"{name}: {count} are more than {MAX_SPANS}")
