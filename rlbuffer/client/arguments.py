"""Arguments of public calls, checked where they come in: later they would end a loop, or mask every rollout of it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from rlbuffer.errors import InvalidRollout
from rlbuffer.records.checks import as_integer, shown


def whole_number(name: str, value: Any, *, low: int) -> int:
    """`value` as an int from `low` on. Raises ValueError."""
    try:
        return as_integer(name, value, low=low)
    except InvalidRollout:
        raise ValueError(f"{name}: expected an integer from {low} on, got {shown(value)}") from None


def duration(name: str, value: Any) -> float:
    """`value`, a number of seconds, as a float; infinite is without end. Raises ValueError."""
    try:
        seconds = math.nan if isinstance(value, str | bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        seconds = math.nan
    if not seconds >= 0:
        raise ValueError(f"{name}: expected seconds, 0 or more, got {shown(value)}")
    return seconds


def names(name: str, value: Any) -> tuple[str, ...]:
    """`value`, several names, as a tuple; a string alone would be a name per letter. Raises ValueError."""
    given = tuple(value) if isinstance(value, Iterable) and not isinstance(value, str | bytes) else (None,)
    if not all(isinstance(part, str) for part in given):
        raise ValueError(f"{name}: expected a list of names, got {shown(value)}")
    return given
