"""Scalars, names and free-form values of a record, checked once and made plain.

A user may hand over a numpy scalar, a tuple, or a nested dict and go on changing it. A record keeps a copy
in the types that msgpack knows, so that it equals itself after the wire and cannot change behind its checks.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from rlbuffer.errors import InvalidRollout

MAX_DEPTH = 32
"""Levels of lists and maps in metadata and answers: deep enough for any record, far from the interpreter's stack."""
MAX_ITEMS = 2**16
"""Items of one list or map in metadata and answers; more than that is an array."""
MAX_ROLLOUT_ID = 160
"""Characters: a group id, a slash and an index fit."""
MAX_COUNT = 2**53 - 1
"""Largest version or count: the last integer that a Lua number holds exactly."""
MAX_NUMBER = 1e12
"""Largest number that can be trained, either sign: a reward, or a float of a column. Training computes in float32, to
3.4e38, and the norm of a gradient sums squares: those of this number over a billion parameters still fit."""

NOT_GIVEN: Mapping[str, Any] = MappingProxyType({})
"""The mapping of a field that was not given."""


def as_finite(name: str, value: Any) -> float:
    """`value` as a finite float; strings and booleans are no numbers."""
    if type(value) is not float and isinstance(value, str | bytes | bytearray | bool | np.bool_):
        raise InvalidRollout(f"{name}: expected a number, got {shown(value)}")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise InvalidRollout(f"{name}: expected a number, got {shown(value)}") from None
    if not math.isfinite(number):
        raise InvalidRollout(f"{name}: expected a finite number, got {number!r}")
    return number


def as_number(name: str, value: Any) -> float:
    """`value` as a float of at most :data:`MAX_NUMBER`, either sign."""
    number = as_finite(name, value)
    if abs(number) > MAX_NUMBER:
        raise InvalidRollout(f"{name}: {number!r} is beyond the limit of {MAX_NUMBER:g}, either sign")
    return number


def as_integer(name: str, value: Any, *, low: int = 0, high: int = MAX_COUNT) -> int:
    """`value` as an int from `low` to `high`; floats and booleans are no integers."""
    try:
        if type(value) is not int and isinstance(value, bool | np.bool_):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise InvalidRollout(f"{name}: expected an integer, got {shown(value)}") from None
    if not low <= number <= high:
        raise InvalidRollout(f"{name}: {shown(number)} is outside {low}..{high}")
    return number


def as_flag(name: str, value: Any) -> bool:
    """`value` as a bool; nothing else is one, because ``bool("false")`` is True."""
    if type(value) is not bool and not isinstance(value, np.bool_):
        raise InvalidRollout(f"{name}: expected true or false, got {shown(value)}")
    return bool(value)


def as_text(name: str, value: Any, *, limit: int | None = None) -> str:
    """`value` if it is a string of at most `limit` characters that UTF-8 can hold."""
    if not isinstance(value, str) or (limit is not None and len(value) > limit):
        most = "" if limit is None else f" of at most {limit} characters"
        raise InvalidRollout(f"{name}: expected a string{most}, got {shown(value)}")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise InvalidRollout(f"{name}: not valid Unicode at position {error.start}") from None
    return str.__str__(value)  # of a subclass, whose own `__str__` may say something else, its characters


def escaped(text: str) -> str:
    """Text of anybody's for a record: what UTF-8 cannot hold (half of a surrogate pair) is written as an escape."""
    return text.encode(errors="backslashreplace").decode()


def as_mapping(name: str, value: Any) -> Mapping[Any, Any]:
    """`value` if it is a mapping."""
    if type(value) is not dict and not isinstance(value, Mapping):
        raise InvalidRollout(f"{name}: expected a mapping, got {shown(value)}")
    return value


def as_items(name: str, values: Any) -> Iterable[Any]:
    """`values` if they can be gone through; a string or a mapping is no list."""
    if type(values) is not tuple and (isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable)):
        raise InvalidRollout(f"{name}: expected a list, got {shown(values)}")
    return values


def plain(name: str, value: Any, *, depth: int = MAX_DEPTH, items: int = MAX_ITEMS) -> Any:
    """A deep copy of `value` in msgpack types: None, bool, int, finite float, str, bytes, list, dict with str keys.

    Tuples become lists and numpy scalars become Python's, as they would on the wire.

    Raises:
        InvalidRollout: another type, a number that is not finite or outside 64 bits, more than `depth` levels, or
            more than `items` in one list or map.
    """
    if _is_plain(value):
        return value
    kind = type(value)
    if not (kind is dict or kind is list or kind is tuple or isinstance(value, list | tuple | Mapping)):
        return _plain_leaf(name, value)
    if depth <= 0:
        raise InvalidRollout(f"{name}: nested too deeply")
    if len(value) > items:
        raise InvalidRollout(f"{name}: {len(value)} items, more than {items}; arrays belong to columns or attachments")
    if kind is not dict and not isinstance(value, Mapping):
        return [
            item if _is_plain(item) else plain(f"{name}[{i}]", item, depth=depth - 1, items=items)
            for i, item in enumerate(value)
        ]
    out = {}
    for key, item in value.items():
        if type(key) is not str or not key.isascii():
            key = _plain_key(name, key)
        out[key] = item if _is_plain(item) else plain(f"{name}.{key}", item, depth=depth - 1, items=items)
    return out


def read_only(name: str, value: object) -> Mapping[str, Any]:
    """A mapping as :func:`plain` makes it, which cannot be written to."""
    if value is NOT_GIVEN:
        return NOT_GIVEN
    return MappingProxyType(plain(name, as_mapping(name, value)))


def _plain_key(name: str, key: Any) -> str:
    if not isinstance(key, str):
        raise InvalidRollout(f"{name}: expected string keys, got {shown(key)}")
    return as_text(f"{name} key", key)


def _plain_leaf(name: str, value: Any) -> Any:
    """The plain form of a value that is neither plain already nor a list or map."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return as_text(name, value)
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, int | np.integer):
        return as_integer(name, value, low=-(2**63), high=2**64 - 1)
    if isinstance(value, float | np.floating):
        return as_finite(name, value)
    hint = "; arrays belong to columns or attachments" if isinstance(value, np.ndarray) else ""
    raise InvalidRollout(f"{name}: {type(value).__name__} cannot be stored{hint}")


def _is_plain(value: Any) -> bool:
    """True for a leaf that :func:`plain` returns as it is; saves naming the place of nearly every one."""
    kind = type(value)
    if kind is int:
        return bool(-(2**63) <= value < 2**64)
    if kind is float:
        return math.isfinite(value)
    if kind is str:
        return bool(value.isascii())
    return value is None or kind is bool or kind is bytes


def same(a: Any, b: Any) -> bool:
    """Equality in which arrays compare by dtype, shape and value, also inside mappings."""
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, Mapping):
        return isinstance(b, Mapping) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return bool(a == b)


def shown(value: Any) -> str:
    """`value` for a message: whatever it is, one short line. Huge ints have no repr, nor has what
    is nested too deeply; huge lists have too much of one, and so have records."""
    if is_dataclass(value) and not isinstance(value, type):
        return f"a value of type {type(value).__name__}"
    try:
        text = value[:80].__repr__() if isinstance(value, str | bytes | list | tuple) else repr(value)
    except (ValueError, RecursionError):
        return f"a value of type {type(value).__name__}"
    text = " ".join(text.split())
    return text if len(text) <= 100 else text[:97] + "..."
