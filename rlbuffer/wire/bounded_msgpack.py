"""Bounded msgpack: small structured values to bytes and back, for metadata, state and headers.

msgpack by itself accepts extension types, NaN, duplicate keys, keys of any type and hundreds of levels. None of them is
ever written here, so none is read: what comes back is what :func:`rlbuffer.records.checks.plain` lets through.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgpack

from rlbuffer.errors import InvalidRollout, PayloadError
from rlbuffer.records.checks import MAX_DEPTH, plain, shown

MAX_LEVELS = MAX_DEPTH + 8
"""A record wraps its user's values in a few levels of its own."""
MAX_MESSAGE_ITEMS = 2**20
"""Items of one list or map. A decoder sets a list's memory aside by its declared length, before it has seen an item."""


def dumps(value: Any, *, max_items: int = MAX_MESSAGE_ITEMS) -> bytes:
    """`value` as msgpack; tuples become lists. Equal values in equal order give equal bytes.

    Raises:
        PayloadError: a type that msgpack does not have, a key that is no string, a number that is not finite.
    """
    try:
        value = plain("value", value, depth=MAX_LEVELS, items=max_items)
    except InvalidRollout as error:
        raise PayloadError(f"cannot be encoded: {error}") from None
    return pack(value)


def pack(value: Any) -> bytes:
    """`value`, which is plain already except for tuples, as msgpack.

    Raises:
        PayloadError: a string of more than 4 GiB.
    """
    try:
        return bytes(msgpack.Packer(use_bin_type=True).pack(value))
    except (ValueError, OverflowError) as error:
        raise PayloadError(f"cannot be encoded: {type(error).__name__}: {error}") from None


def loads(data: bytes | memoryview, *, limit: int, max_items: int = MAX_MESSAGE_ITEMS) -> Any:
    """The value of at most `limit` bytes of msgpack.

    Raises:
        PayloadError: too long, malformed, trailing bytes, an extension type, a key that is no string or occurs twice,
            a number that is not finite, too many items or levels.
    """
    if len(data) > limit:
        raise PayloadError(f"msgpack of {len(data)} bytes is above the limit of {limit}")
    most = min(len(data), max_items)
    try:
        value = msgpack.unpackb(data, **_STRICT, max_array_len=most, max_map_len=most)
    except _FAULTS as error:
        raise PayloadError(f"malformed msgpack: {str(error) or type(error).__name__}") from None
    check(value)
    return value


def check(value: Any) -> None:
    """Refuses what msgpack itself lets through, and what would therefore be written and never read.

    Raises:
        PayloadError: a number that is not finite, a key that is no string, too many levels.
    """
    _check([value], -1)


def without_duplicates(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
    """The pairs of a map, for a decoder. Raises ValueError when a key occurs twice."""
    out = dict(pairs)
    if len(out) != len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"key {shown(twice)} occurs twice in a map")
    return out


def _no_extension(code: int, data: bytes) -> Any:
    raise ValueError(f"extension type {code}")


_STRICT: dict[str, Any] = {
    "raw": False,
    "strict_map_key": True,
    "object_pairs_hook": without_duplicates,
    "ext_hook": _no_extension,
    "max_ext_len": 0,
}
_FAULTS = (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException)


def _check(container: Sequence[Any] | dict[Any, Any], level: int) -> None:
    if isinstance(container, dict):
        for key in container:
            if type(key) is not str:
                raise PayloadError("malformed msgpack: a key that is not a string")
        container = tuple(container.values())
    for item in container:
        if type(item) is float:
            if not math.isfinite(item):
                raise PayloadError("malformed msgpack: a number that is not finite")
        elif item and type(item) in (list, dict, tuple):
            if level + 1 >= MAX_LEVELS:
                raise PayloadError(f"malformed msgpack: nested more than {MAX_LEVELS} levels deep")
            _check(item, level + 1)
