"""Arguments of public calls, checked where they come in: later they would end a loop, or mask every rollout of it."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from typing import Any, TypeVar

from rlbuffer.errors import InvalidArgument, InvalidRollout
from rlbuffer.records.checks import as_integer, as_text, shown
from rlbuffer.records.info import ENV_NAME

T = TypeVar("T")


def whole_number(name: str, value: Any, *, low: int) -> int:
    """`value` as an int from `low` on. Raises InvalidArgument."""
    try:
        return as_integer(name, value, low=low)
    except InvalidRollout:
        raise InvalidArgument(f"{name}: expected an integer from {low} on, got {shown(value)}") from None


def duration(name: str, value: Any) -> float:
    """`value`, a number of seconds, as a float; infinite is without end. Raises InvalidArgument."""
    try:
        seconds = math.nan if isinstance(value, str | bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        seconds = math.nan
    if not seconds >= 0:
        raise InvalidArgument(f"{name}: expected seconds, 0 or more, got {shown(value)}")
    return seconds


def names(name: str, value: Any) -> tuple[str, ...]:
    """`value`, several names, as a tuple; a string alone would be a name per letter. Raises InvalidArgument."""
    given = tuple(value) if isinstance(value, Iterable) and not isinstance(value, str | bytes) else (None,)
    if not all(isinstance(part, str) for part in given):
        raise InvalidArgument(f"{name}: expected a list of names, got {shown(value)}")
    return given


def text(name: str, value: Any) -> str:
    """`value` as a string. Raises InvalidArgument."""
    try:
        return as_text(name, value)
    except InvalidRollout:
        raise InvalidArgument(f"{name}: expected a string, got {shown(value)}") from None


def env_name(name: str, value: Any) -> str:
    """`value` as the name of an env. Raises InvalidArgument."""
    if not isinstance(value, str) or not ENV_NAME.match(value):
        raise InvalidArgument(f"{name}: expected the name of an env, {ENV_NAME.pattern[:-2]}, got {shown(value)}")
    return value


def function(name: str, value: Any) -> None:
    """Raises InvalidArgument where `value` is neither None nor callable."""
    if value is not None and not callable(value):
        raise InvalidArgument(f"{name}: expected a function, got {shown(value)}")


def items_of(name: str, values: Any, kind: type[T]) -> list[T]:
    """`values`, several of a kind, as a list. Raises InvalidArgument."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise InvalidArgument(f"{name}: expected a list of {kind.__name__}s, got {shown(values)}")
    given = list(values)
    for value in given:
        if not isinstance(value, kind):
            raise InvalidArgument(f"{name}: expected {kind.__name__}s, got {shown(value)}")
    return given


def file_path(name: str, value: Any) -> str:
    """`value`, a path, as a string. Raises InvalidArgument."""
    if not isinstance(value, str | os.PathLike) or not isinstance(path := os.fspath(value), str):
        raise InvalidArgument(f"{name}: expected a path, got {shown(value)}")
    return path
