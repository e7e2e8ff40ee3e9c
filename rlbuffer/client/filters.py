"""The filter language of ``--where``: ``env:math age>=2 reward<0.1 state:dropped reason:stale tokens>8k id:7f3a``.

Terms are separated by blanks and all must hold; commas inside a ``:`` term are alternatives (``env:math,code``).
Pure: a filter looks at the attributes of whatever view it is given, never at a server.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from rlbuffer.errors import FilterError
from rlbuffer.narration.nearest import did_you_mean
from rlbuffer.records.states import Reason, State

TEXT_FIELDS: Mapping[str, str] = MappingProxyType(
    {"env": "env", "state": "state", "reason": "reason", "worker": "worker", "adapter": "adapter", "id": "group_id"}
)
"""Fields compared as text -> attribute of the view."""

NUMBERS: Mapping[str, str] = MappingProxyType({"age": "age", "reward": "reward", "tokens": "tokens"})
"""Fields compared as numbers -> attribute of the view."""

_ALLOWED: Mapping[str, tuple[str, ...]] = MappingProxyType({"state": tuple(State), "reason": tuple(Reason)})
_TERM = re.compile(r"([A-Za-z_]+)(>=|<=|!=|==|=|>|<|:)(.*)\Z")
_NUMBER = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)([kKmM]?)\Z")
_SCALE = {"": 1.0, "k": 1e3, "m": 1e6}
_COMPARE: Mapping[str, Callable[[Any, Any], bool]] = MappingProxyType(
    {
        "==": operator.eq,
        "!=": operator.ne,
        ">=": operator.ge,
        "<=": operator.le,
        ">": operator.gt,
        "<": operator.lt,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One condition."""

    field: str
    """A key of :data:`TEXT_FIELDS` or :data:`NUMBERS`."""
    op: str
    """``==`` ``!=`` ``>=`` ``<=`` ``>`` ``<``; words know the first two."""
    values: tuple[Any, ...]
    """Alternatives; numbers have exactly one."""

    def holds(self, value: Any) -> bool:
        """True when `value` satisfies the condition; a missing number (None) satisfies none."""
        if self.field in NUMBERS:
            return value is not None and _COMPARE[self.op](value, self.values[0])
        if self.field == "id":
            is_among = any(str(value).startswith(v) for v in self.values)
        else:
            is_among = value in self.values
        return is_among if self.op == "==" else not is_among


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Terms that must all hold; without terms it matches everything.

    Example:
        >>> from types import SimpleNamespace
        >>> parse("env:math age>=2").matches(SimpleNamespace(env="math", age=3))
        True
    """

    terms: tuple[Term, ...] = ()

    def matches(self, view: Any) -> bool:
        """True when every term holds for the view's attributes (``group_id``, ``env``, ``state``, ...)."""
        return all(t.holds(getattr(view, TEXT_FIELDS.get(t.field) or NUMBERS[t.field], None)) for t in self.terms)

    def allows(self, field: str, value: Any) -> bool:
        """False when no view whose `field` has this value can match: lets a reader skip what it need not read."""
        return all(t.holds(value) for t in self.terms if t.field == field)


def parse(text: str) -> Filter:
    """Reads a filter.

    Raises:
        FilterError: a term is malformed, or a field, state or reason does not exist; names the nearest one.
    """
    return Filter(terms=tuple(_term(word) for word in text.split()))


def _term(word: str) -> Term:
    match = _TERM.match(word)
    if match is None:
        raise FilterError(
            f"cannot read {word!r} in the filter: expected FIELD:VALUE or FIELD>=NUMBER, e.g. env:math age>=2"
        )
    field, op, value = match.group(1).lower(), match.group(2), match.group(3)
    op = "==" if op in (":", "=") else op
    if field not in TEXT_FIELDS and field not in NUMBERS:
        names = (*TEXT_FIELDS, *NUMBERS)
        raise FilterError(
            f"{field!r} is not a field to filter by.{did_you_mean(field, names)} Fields: {', '.join(names)}."
        )
    if not value:
        raise FilterError(f"{word!r} in the filter has no value")
    if field in NUMBERS:
        return Term(field=field, op=op, values=(_number(field, value),))
    if op not in ("==", "!="):
        raise FilterError(f"{field} is text: write {field}:{value} (or {field}!={value}), not {word!r}")
    values = tuple(v for v in value.split(",") if v)
    allowed = _ALLOWED.get(field)
    for v in values:
        if allowed is not None and v not in allowed:
            raise FilterError(f"{v!r} is not a {field}.{did_you_mean(v, allowed)} One of: {', '.join(allowed)}.")
    return Term(field=field, op=op, values=values)


def _number(field: str, text: str) -> float:
    match = _NUMBER.match(text)
    if match is None:
        raise FilterError(f"{field} is compared with a number (8, 0.5, 8k, 2M), got {text!r}")
    return float(match.group(1)) * _SCALE[match.group(2).lower()]
