"""Bytes in values of JSON, which has none: ``{"base64": "AP8="}``.

A mapping of the user's own that looks like that gets a ``$`` before its key, and loses it when it is read.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from typing import Any

BYTES_KEY = "base64"
_LOOKS_LIKE = re.compile(r"\$*base64\Z")


def without_bytes(value: Any) -> Any:
    """`value`, in types of msgpack, as types of JSON; :func:`with_bytes` is the inverse.

    Example:
        >>> without_bytes({"key": b"ab", "base64": 1})
        {'key': {'base64': 'YWI='}, 'base64': 1}
        >>> with_bytes(without_bytes({"base64": "YWI="}))
        {'base64': 'YWI='}
    """
    if isinstance(value, bytes):
        return {BYTES_KEY: base64.b64encode(value).decode()}
    if isinstance(value, list | tuple):
        return [without_bytes(item) for item in value]
    if isinstance(value, Mapping):
        out = {key: without_bytes(item) for key, item in value.items()}
        return {f"${next(iter(out))}": next(iter(out.values()))} if _is_like_bytes(out) else out
    return value


def with_bytes(value: Any) -> Any:
    """The value that :func:`without_bytes` was given; a ``base64`` that is none stays as it is."""
    if isinstance(value, list | tuple):
        return [with_bytes(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    if not _is_like_bytes(value):
        return {key: with_bytes(item) for key, item in value.items()}
    key, item = next(iter(value.items()))
    if key != BYTES_KEY:
        return {key[1:]: with_bytes(item)}
    try:
        return base64.b64decode(item, validate=True) if isinstance(item, str) else {key: with_bytes(item)}
    except (binascii.Error, ValueError):
        return {key: item}


def _is_like_bytes(value: Mapping[Any, Any]) -> bool:
    return len(value) == 1 and all(isinstance(key, str) and _LOOKS_LIKE.match(key) for key in value)
