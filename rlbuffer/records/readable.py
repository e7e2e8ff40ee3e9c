"""What can be read of a record that anybody may have written: the one check of whatever comes out of a heartbeat.

Each field is held against its annotation. One of another type, or with a number that is not finite, counts as not
written, so nothing that stands there ends a process or a page.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from functools import cache
from typing import Any, get_type_hints

import msgspec


def readable(cls: Any, record: Any) -> dict[str, Any]:
    """The fields of the dataclass `cls` in `record`, of the types that it annotates; {} of what is no map.

    Example:
        >>> from rlbuffer.records.waiting import Waiting
        >>> readable(Waiting, {"kind": "filling", "step": "7", "done": 1, "seconds": float("nan")})
        {'kind': <Wait.FILLING: 'filling'>, 'done': 1.0}
    """
    found = {}
    for name, kind in _annotations(cls).items():
        if isinstance(record, Mapping) and name in record:
            with suppress(msgspec.ValidationError):
                value = msgspec.convert(record[name], kind)
                if _is_finite(value):
                    found[name] = value
    return found


@cache
def _annotations(cls: Any) -> Mapping[str, Any]:
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in fields(cls)}


def _is_finite(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_finite, value.values()))
    return not isinstance(value, float) or math.isfinite(value)
