r"""The filter language of ``--where``: ``env:math age>=2 reward<0.1 state:dropped tokens>8k stop:length text:/\d+/``.

Terms are separated by blanks and all must hold; commas inside a ``:`` term are alternatives (``env:math,code``); within
double quotes both belong to the value (``prompt:"a, b"``). They choose groups: terms about a rollout (``stop``,
``text``, ``truncated``, ``rollout.reward`` ...) must all hold for one and the same rollout of it. Pure: a filter looks
at the attributes of whatever view it is given, never at a server.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

from rlbuffer.errors import FilterError
from rlbuffer.records.states import Reason, State
from rlbuffer.state.text import did_you_mean


class Field(NamedTuple):
    """Something that is compared."""

    attribute: str
    """Of the view."""
    about: str
    """What it is, for the reference: docs/reference/filter.md is made of it."""
    is_number: bool = False
    is_of_rollout: bool = False
    """Of one rollout, not of its group."""


FIELDS: Mapping[str, Field] = MappingProxyType(
    {
        "env": Field("env", "its env"),
        "state": Field("state", "where it stands"),
        "reason": Field("reason", "why it was dropped"),
        "worker": Field("worker", "who pushed it first"),
        "adapter": Field("adapter", "the LoRA adapter that it trains"),
        "id": Field(
            "group_id",
            "its id: `id:math.7` is what begins with math.7, so math.70, too; `id=math.7` is this one; `id!=math.7` "
            "is what does not begin with it",
        ),
        "prompt": Field("prompt_id", "its prompt's id, compared as `id`"),
        "age": Field("age", "policy versions, at the step that took it, or now", True),
        "reward": Field("reward", "the mean of its scored rollouts", True),
        "tokens": Field("tokens", "of all its rollouts", True),
        "step": Field("step", "the step that took it", True),
        "waited": Field("waited_seconds", "seconds from its first push to its step, or until now", True),
        "stop": Field("finish_reason", "why sampling ended: `stop:length`", is_of_rollout=True),
        "text": Field(
            "text",
            "what it says: `text:word` as it stands, `text:/regex/` with `i`, `s` or `m` behind it; a blank needs no "
            "quotes there, and a slash before a blank is `\\/`",
            is_of_rollout=True,
        ),
        "truncated": Field("is_truncated", "it ended at a length limit", is_of_rollout=True),
        "rollout.reward": Field("reward", "its reward", True, True),
        "rollout.tokens": Field("length", "its tokens", True, True),
        "rollout.trained": Field("loss_tokens", "its trained tokens", True, True),
        "rollout.version": Field("min_version", "the oldest policy version that sampled it", True, True),
        "rollout.advantage": Field("advantage", "the one that it trains with, once a step has it", True, True),
        "rollout.logprob": Field("logprob_mean", "the mean logprob of its trained tokens", True, True),
    }
)
"""Field of the language -> what is compared."""
BEGINNINGS = frozenset({"id", "prompt"})
"""Fields of which the beginning is enough behind ``:``, as wherever an id is given; a table shows no more of a long
one. ``=`` asks for the whole."""
TEXT_FIELDS = tuple(name for name, field in FIELDS.items() if not field.is_number and not field.is_of_rollout)
"""Fields of a group that are compared as text."""
NUMBERS = tuple(name for name, field in FIELDS.items() if field.is_number and not field.is_of_rollout)
"""Fields of a group that are compared as numbers."""
ROLLOUT_NUMBERS = tuple(name for name, field in FIELDS.items() if field.is_number and field.is_of_rollout)
"""Fields of a rollout that are compared as numbers."""
PAYLOAD_FIELDS = frozenset({"stop", "text", "rollout.logprob", "rollout.advantage"})
"""Fields for which a rollout's payload is read."""
SEARCHED_CHARACTERS = 65_536
"""Longest text that is searched whole; of a longer one its first and its last half of that. A regex of the user's own
may take a time that grows with a power of the length."""

ALLOWED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"state": tuple(State), "reason": tuple(Reason), "truncated": ("yes", "no")}
)
"""Field -> the only values that it has."""
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
    """One of :data:`FIELDS`."""
    op: str
    """``==`` ``!=`` ``>=`` ``<=`` ``>`` ``<``; words know the first two, :data:`BEGINNINGS` ``:`` as well."""
    values: tuple[Any, ...]
    """Alternatives; numbers have exactly one; those of ``text`` are compiled patterns."""

    @property
    def is_of_rollout(self) -> bool:
        """The condition is about one rollout, not about its group."""
        return FIELDS[self.field].is_of_rollout

    @property
    def attribute(self) -> str:
        """Attribute of the view that is compared."""
        return FIELDS[self.field].attribute

    def holds(self, value: Any) -> bool:
        """True when `value` satisfies the condition; a missing number or text (None) satisfies none."""
        if FIELDS[self.field].is_number:
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


class FilteredTable(NamedTuple):
    """A table of other things than groups, which has some of the fields."""

    name: str
    """Of its things, in the plural."""
    fields: Collection[str]
    has_words: bool = False
    """A word alone is a part of the thing's name, as ``text:word``."""


def parse(text: str, table: FilteredTable | None = None) -> Filter:
    """Reads a filter of groups, or of the things of `table`.

    Raises:
        FilterError: a term is malformed, or a field, state or reason does not exist; names the nearest one. Or the
            table does not have the field.
    """
    return Filter(terms=tuple(_term(word, table) for word in _WORD.findall(text)))


def _term(word: str, table: FilteredTable | None) -> Term:
    match = _TERM.match(word)
    if match is None:
        if table is not None and table.has_words:
            return Term(field="text", op="==", values=(re.compile(re.escape(word)),))
        example = "env:math age>=2" if table is None else f"{next(iter(table.fields))}:40"
        raise FilterError(f"cannot read {word!r} in the filter: expected FIELD:VALUE or FIELD>=NUMBER, e.g. {example}")
    field, op, value = match.group(1).lower(), match.group(2), match.group(3)
    op = "==" if op == "=" or (op == ":" and field not in BEGINNINGS) else op
    if field not in FIELDS:
        fields = FIELDS if table is None else table.fields
        nearest, names = did_you_mean(field, fields), ", ".join(fields)
        if not nearest and table is not None and table.has_words:  # a name may have a colon
            return Term(field="text", op="==", values=(re.compile(re.escape(word)),))
        raise FilterError(f"{field!r} is not a field to filter by.{nearest} Fields: {names}.")
    if table is not None and field not in table.fields and not (table.has_words and field == "text"):
        others = [*table.fields, *(["a part of the name"] if table.has_words else [])]
        by = f"{', '.join(others[:-1])} or {others[-1]}"
        raise FilterError(f"{table.name} are not filtered by {field}, but by {by}")
    if value in ("", '""'):
        raise FilterError(f"{word!r} in the filter has no value")
    if FIELDS[field].is_number:
        return Term(field=field, op=op, values=(_number(field, value),))
    if op not in (":", "==", "!="):
        raise FilterError(f"{field} is text: write {field}:{value} (or {field}!={value}), not {word!r}")
    if field == "text":
        return Term(field=field, op=op, values=(_pattern(value),))
    values = tuple(v for v in map(_unquoted, _VALUE.findall(value)) if v)
    if not values:  # `!=` of nothing would hold for every group
        raise FilterError(f"{word!r} in the filter has no value")
    allowed = ALLOWED.get(field)
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
