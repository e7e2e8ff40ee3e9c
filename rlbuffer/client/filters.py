r"""The filter language of ``--where``: ``env:math age>=2 reward<0.1 state:dropped tokens>8k stop:length text:/\d+/``.

Terms are separated by blanks and all must hold; commas inside a ``:`` term are alternatives (``env:math,code``); within
double quotes both belong to the value (``prompt:"a, b"``). They choose groups: terms about a rollout (``stop``,
``text``, ``truncated``, ``rollout.reward`` ...) must all hold for one and the same rollout of it. Pure: a filter looks
at the attributes of whatever view it is given, never at a server.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

from rlbuffer.errors import FilterError
from rlbuffer.records.states import Reason, State
from rlbuffer.state.text import did_you_mean

TEXT_FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "env": "env",
        "state": "state",
        "reason": "reason",
        "worker": "worker",
        "adapter": "adapter",
        "id": "group_id",
        "prompt": "prompt_id",
    }
)
"""Fields of a group that are compared as text -> attribute of the view."""
BEGINNINGS = frozenset({"id", "prompt"})
"""Fields of which the beginning is enough behind ``:``, as wherever an id is given; a table shows no more of a long
one. ``=`` asks for the whole."""
NUMBERS: Mapping[str, str] = MappingProxyType(
    {"age": "age", "reward": "reward", "tokens": "tokens", "step": "step", "waited": "waited_seconds"}
)
"""Fields of a group that are compared as numbers -> attribute of the view."""
ROLLOUT_TEXTS: Mapping[str, str] = MappingProxyType(
    {"stop": "finish_reason", "text": "text", "truncated": "is_truncated"}
)
"""Fields of a rollout that are compared as text -> attribute of its view."""
ROLLOUT_NUMBERS: Mapping[str, str] = MappingProxyType(
    {
        "rollout.reward": "reward",
        "rollout.tokens": "length",
        "rollout.trained": "loss_tokens",
        "rollout.version": "min_version",
        "rollout.advantage": "advantage",
        "rollout.logprob": "logprob_mean",
    }
)
"""Fields of a rollout that are compared as numbers -> attribute of its view."""
PAYLOAD_FIELDS = frozenset({"stop", "text", "rollout.logprob", "rollout.advantage"})
"""Fields for which a rollout's payload is read."""
FILTER_FIELDS = (*TEXT_FIELDS, *NUMBERS, *ROLLOUT_TEXTS, *ROLLOUT_NUMBERS)
SEARCHED_CHARACTERS = 65_536
"""Longest text that is searched whole; of a longer one its first and its last half of that. A regex of the user's own
may take a time that grows with a power of the length."""

_ATTRIBUTES = {**TEXT_FIELDS, **NUMBERS, **ROLLOUT_TEXTS, **ROLLOUT_NUMBERS}
_ALLOWED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"state": tuple(State), "reason": tuple(Reason), "truncated": ("yes", "no")}
)
_WORD = re.compile(
    r"[A-Za-z_.]+(?:!=|==|=|:)/(?:\\.|[^\\])+?/[a-z]*(?=\s|\Z)"
    r'|(?:(?<=[:=,])"(?:\\.|[^"\\])*"|\S)+',
    re.DOTALL,
)
"""A term: one with a regex goes to the first slash behind which a blank, or the end, follows; others have blanks only
within quotes that begin a value."""
_VALUE = re.compile(r'(?:(?<![^,])"(?:\\.|[^"\\])*"|[^,])+', re.DOTALL)
_QUOTED = re.compile(r'"((?:\\.|[^"\\])*)"\Z', re.DOTALL)
_TERM = re.compile(r"([A-Za-z_.]+)(>=|<=|!=|==|=|>|<|:)(.*)\Z", re.DOTALL)
_NUMBER = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)([kKmM]?)\Z")
_SCALE = {"": 1.0, "k": 1e3, "m": 1e6}
_FLAGS = {"i": re.IGNORECASE, "s": re.DOTALL, "m": re.MULTILINE}
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
    """One of :data:`FILTER_FIELDS`."""
    op: str
    """``==`` ``!=`` ``>=`` ``<=`` ``>`` ``<``; words know the first two, :data:`BEGINNINGS` ``:`` as well."""
    values: tuple[Any, ...]
    """Alternatives; numbers have exactly one; those of ``text`` are compiled patterns."""

    @property
    def is_of_rollout(self) -> bool:
        """The condition is about one rollout, not about its group."""
        return self.field in ROLLOUT_TEXTS or self.field in ROLLOUT_NUMBERS

    @property
    def attribute(self) -> str:
        """Attribute of the view that is compared."""
        return _ATTRIBUTES[self.field]

    def holds(self, value: Any) -> bool:
        """True when `value` satisfies the condition; a missing number or text (None) satisfies none."""
        if self.field in NUMBERS or self.field in ROLLOUT_NUMBERS:
            return value is not None and _COMPARE[self.op](value, self.values[0])
        if self.field == "text":
            if value is None:
                return False
            is_among = any(pattern.search(part) for pattern in self.values for part in _searched(value))
        elif self.field in BEGINNINGS and self.op != "==":
            is_among = any(str(value).startswith(v) for v in self.values)
        else:
            is_among = ({True: "yes", False: "no"}[value] if self.field == "truncated" else value) in self.values
        return is_among if self.op != "!=" else not is_among


def _searched(text: str) -> tuple[str, ...]:
    half = SEARCHED_CHARACTERS // 2
    return (text,) if len(text) <= SEARCHED_CHARACTERS else (text[:half], text[-half:])


@dataclass(frozen=True, kw_only=True)
class Filter:
    """Terms that must all hold; without terms it matches everything.

    Example:
        >>> from types import SimpleNamespace
        >>> group = SimpleNamespace(env="math", age=3)
        >>> parse("env:math age>=2").matches(group)
        True
        >>> cut, whole = SimpleNamespace(finish_reason="length"), SimpleNamespace(finish_reason="stop")
        >>> parse("env:math stop:length").matches(group, [cut, whole]), parse("stop:length").matches(group, [whole])
        (True, False)
    """

    terms: tuple[Term, ...] = ()

    @cached_property
    def rollout_terms(self) -> tuple[Term, ...]:
        """Terms about one rollout."""
        return tuple(t for t in self.terms if t.is_of_rollout)

    def matches(self, view: Any, rollouts: Iterable[Any] = ()) -> bool:
        """True when every term holds for the view's attributes (``group_id``, ``env``, ``state``, ...).

        Terms about a rollout must all hold for one of `rollouts` (``reward``, ``finish_reason``, ``text``, ...);
        without rollouts they hold for none.
        """
        return self.matches_group(view) and (not self.rollout_terms or any(map(self.matches_rollout, rollouts)))

    def matches_group(self, view: Any) -> bool:
        """True when the terms about the group hold, whatever those about a rollout say."""
        return all(t.is_of_rollout or t.holds(getattr(view, t.attribute, None)) for t in self.terms)

    def matches_rollout(self, rollout: Any) -> bool:
        """True when all terms about a rollout hold for this one."""
        return all(holds(getattr(rollout, attribute, None)) for attribute, holds in self._rollout_checks)

    @cached_property
    def _rollout_checks(self) -> list[tuple[str, Callable[[Any], bool]]]:
        return [(term.attribute, term.holds) for term in self.rollout_terms]

    def allows(self, field: str, value: Any) -> bool:
        """False when no view whose `field` has this value can match: lets a reader skip what it need not read."""
        return all(t.holds(value) for t in self.terms if t.field == field)


def parse(text: str) -> Filter:
    """Reads a filter.

    Raises:
        FilterError: a term is malformed, or a field, state or reason does not exist; names the nearest one.
    """
    return Filter(terms=tuple(_term(word) for word in _WORD.findall(text)))


def _term(word: str) -> Term:
    match = _TERM.match(word)
    if match is None:
        raise FilterError(
            f"cannot read {word!r} in the filter: expected FIELD:VALUE or FIELD>=NUMBER, e.g. env:math age>=2"
        )
    field, op, value = match.group(1).lower(), match.group(2), match.group(3)
    op = "==" if op == "=" or (op == ":" and field not in BEGINNINGS) else op
    if field not in FILTER_FIELDS:
        nearest, names = did_you_mean(field, FILTER_FIELDS), ", ".join(FILTER_FIELDS)
        raise FilterError(f"{field!r} is not a field to filter by.{nearest} Fields: {names}.")
    if value in ("", '""'):
        raise FilterError(f"{word!r} in the filter has no value")
    if field in NUMBERS or field in ROLLOUT_NUMBERS:
        return Term(field=field, op=op, values=(_number(field, value),))
    if op not in (":", "==", "!="):
        raise FilterError(f"{field} is text: write {field}:{value} (or {field}!={value}), not {word!r}")
    if field == "text":
        return Term(field=field, op=op, values=(_pattern(value),))
    values = tuple(v for v in map(_unquoted, _VALUE.findall(value)) if v)
    if not values:  # `!=` of nothing would hold for every group
        raise FilterError(f"{word!r} in the filter has no value")
    allowed = _ALLOWED.get(field)
    for v in values:
        if allowed is not None and v not in allowed:
            raise FilterError(f"{v!r} is not a {field}.{did_you_mean(v, allowed)} One of: {', '.join(allowed)}.")
    return Term(field=field, op=op, values=values)


def _unquoted(value: str) -> str:
    """The value between quotes, without the backslashes before a quote or a backslash; one without quotes as it is."""
    quoted = _QUOTED.match(value)
    if quoted is None and value.startswith('"'):
        raise FilterError(
            f"cannot read {value!r} in the filter: its quote is not closed, or something stands behind it; a quote of "
            r"the value's own is \""
        )
    return value if quoted is None else re.sub(r'\\(["\\])', r"\1", quoted.group(1))


def _pattern(value: str) -> re.Pattern[str]:
    """The regex between slashes, with its flags; anything else is searched for as it stands, or as in its quotes."""
    if _QUOTED.match(value):
        return re.compile(re.escape(_unquoted(value)))
    if not value.startswith("/"):
        return re.compile(re.escape(value))
    body, slash, flags = value[1:].rpartition("/")
    if not slash or not body or set(flags) - set(_FLAGS):
        raise FilterError(
            f"text:{value} is no regex between slashes: write text:/REGEX/, with i, s or m behind it, and a slash "
            r"before a blank as \/"
        )
    try:
        return re.compile(body, sum(_FLAGS[flag] for flag in set(flags)))
    except (re.error, OverflowError, RecursionError) as error:
        raise FilterError(f"text:{value} is no regular expression: {error}") from None


def _number(field: str, text: str) -> float:
    match = _NUMBER.match(text)
    if match is None:
        raise FilterError(f"{field} is compared with a number (8, 0.5, 8k, 2M), got {text!r}")
    return float(match.group(1)) * _SCALE[match.group(2).lower()]
