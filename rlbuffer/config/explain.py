"""Every setting in words, read off the records: what it may be, its default, and what it means."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import textwrap
import types
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rlbuffer.config.settings import RunSettings
from rlbuffer.state.text import nearest


class Setting(NamedTuple):
    """One value of ``rlbuffer.toml``; its dotted name has NAME where the user chooses one."""

    name: str
    default: str
    values: str
    meaning: str
    is_free: bool
    """A table whose keys and values are the user's own."""


class ExplainedTable(NamedTuple):
    """One table of ``rlbuffer.toml``, with the settings that stand right in it."""

    name: str
    meaning: str
    settings: list[Setting]


@cache
def tables() -> tuple[ExplainedTable, ...]:
    """Every table, in the order of the code."""
    return tuple(_tables(RunSettings, "", None))


@cache
def known_settings() -> Mapping[str, Setting]:
    """Every setting by its dotted name."""
    return {setting.name: setting for table in tables() for setting in table.settings}


def pattern_of(name: str) -> str:
    """The setting, or table, that `name` is one of, with NAME for what the user chose; "" for none."""
    parts = name.split(".")
    for other in (*known_settings(), *(table.name for table in tables())):
        pattern = other.split(".")
        if len(pattern) == len(parts) and all(b in ("NAME", a) for a, b in zip(parts, pattern, strict=True)):
            return other
    return ""


def free_table_of(name: str) -> str:
    """The table of the user's own keys that `name` is inside of; "" for none."""
    while name := name.rpartition(".")[0]:
        if (setting := known_settings().get(pattern_of(name))) is not None:
            return name if setting.is_free else ""
    return ""


RENAMED = {
    "groups_per_batch": "groups_in_flight",
    "stable_updates": "decay_from_update",
    "proofs": "check_ranks",
}
"""Last part of a setting's old name -> of its name now: a file of an older checkout is told what to write."""


def parted(name: str) -> str:
    """The setting that `name` is where an underscore may stand for a dot; "" for none.

    Example:
        >>> parted("batcher_max_age"), parted("worker_math_group_size")
        ('batcher.max_age', 'worker.math.group_size')
    """
    # The longest first: a name that the user chose may have underscores.
    for setting in sorted(known_settings(), key=len, reverse=True):
        parts = ("([^.]+)" if part == "NAME" else re.escape(part) for part in setting.split("."))
        if found := re.fullmatch("[._]".join(parts), name):
            chosen = iter(found.groups())
            return ".".join(next(chosen) if part == "NAME" else part for part in setting.split("."))
    return ""


def meant_by(name: str) -> str:
    """The sentence that follows a name that is no setting: why there is none, or which one may have been meant."""
    table, _, word = name.rpartition(".")
    renamed = f"{table}.{RENAMED[word]}" if word in RENAMED else ""
    if renamed and pattern_of(renamed):
        return f" It is called {renamed} now."
    if setting := parted(name):
        return f" Did you mean {setting}?"
    # The same word elsewhere, else the nearest beside it, else the nearest anywhere.
    pattern = pattern_of(table) if table else ""
    names = [*known_settings(), *(t.name.removesuffix(".NAME") for t in tables() if t.name)]
    is_table = bool(pattern) or not table
    beside = {n.rpartition(".")[2]: n for n in reversed(names) if is_table and n.rpartition(".")[0] == pattern}
    anywhere = {n.rpartition(".")[2]: n for n in reversed(names)}
    near = (word if word in anywhere else "") or nearest(word, beside) or nearest(word, anywhere, cutoff=0.75)
    meant = f"{table}.{near}".lstrip(".") if near in beside else anywhere.get(near, "")
    return f" Did you mean {meant}?" if meant else " `rlbuffer config show` lists all settings."


def _tables(cls: Any, path: str, given: Any) -> Iterator[ExplainedTable]:
    """A table and those inside it; `given` is an instance that holds the defaults."""
    settings, inner = [], []
    fields: Mapping[str, FieldInfo] = cls.__pydantic_fields__
    docs = {} if issubclass(cls, BaseModel) else _docs(cls)
    for name, field in fields.items():
        below, is_named = _section(field.annotation)
        default = field.get_default(call_default_factory=True) if given is None else getattr(given, name)
        dotted = f"{path}.{name}".lstrip(".")
        if below is not None:
            inner.append((below, dotted + ".NAME" * is_named, None if is_named else default))
            continue
        annotation = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
        is_required = given is None and field.is_required()
        value = "required" if is_required else _value(default)
        is_free = field.annotation is Any or (_is(annotation, Mapping) and get_args(field.annotation)[1] is Any)
        settings.append(
            Setting(dotted, value, _values(annotation), prose(field.description or docs.get(name, "")), is_free)
        )
    meaning = re.sub(r"^`\[[\w.]+\]`: ", "", prose((cls.__doc__ or "").split("\n\n")[0]))
    yield ExplainedTable(path, meaning[:1].upper() + meaning[1:], settings)
    for below, dotted, held_by in inner:
        yield from _tables(below, dotted, held_by)


def _docs(cls: type) -> Mapping[str, str]:
    """Field of a dataclass -> the docstring below it."""
    body: list[Any] = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body  # type: ignore[attr-defined]
    pairs = [pair for pair in itertools.pairwise(body) if list(map(type, pair)) == [ast.AnnAssign, ast.Expr]]
    return {field.target.id: doc.value.value for field, doc in pairs}


def _section(annotation: Any) -> tuple[Any, bool]:
    """The table that an annotation is, or holds under the user's names, and which of the two; None: a value."""
    if hasattr(annotation, "__pydantic_fields__"):
        return annotation, False
    if get_origin(annotation) is not None and _is(annotation, Mapping):
        inner = _section(get_args(annotation)[1])[0]
        return inner, inner is not None
    return None, False


def _is(annotation: Any, kind: type) -> bool:
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    origin = get_origin(annotation) or annotation
    return isinstance(origin, type) and issubclass(origin, kind)


def _values(annotation: Any) -> str:
    """An annotation in words: ``integer, from 1``."""
    bounds: list[str] = []
    if get_origin(annotation) is Annotated:
        annotation, *metadata = get_args(annotation)
        limits = {key: getattr(m, key) for m in metadata for key in ("ge", "gt", "le", "lt") if hasattr(m, key)}
        words = {"ge": "from", "gt": "above", "le": "to", "lt": "below"}
        bounds = [f"{words[key]} {limit:g}" for key, limit in limits.items() if abs(limit) < 2**52]
    if get_origin(annotation) in (Union, types.UnionType):
        arms = dict.fromkeys(_values(arm) for arm in get_args(annotation) if arm is not type(None))
        return ", ".join([" or ".join(arms), *bounds])
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(annotation))
    kinds = ((bool, "true or false"), (int, "integer"), (float, "number"), (str, "text"), (Path, "path"))
    word = next((word for kind, word in kinds if _is(annotation, kind)), "")
    return ", ".join([word or ("list" if _is(annotation, tuple) else "table"), *bounds])


def _value(value: Any) -> str:
    """A default as TOML has it."""
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, Mapping | BaseModel):
        return "`{}`"
    if isinstance(value, tuple):
        return "`[" + ", ".join(_value(item).strip("`") for item in value) + "]`"
    return f'`"{value}"`' if isinstance(value, str | Path) else f"`{value}`"


def prose(text: str) -> str:
    """A docstring's text in one line, with Markdown's marks."""
    text = re.sub(r":\w+:`~?(?:[\w.]+\.)?(\w+)`", r"`\1`", text).replace("``", "`")
    return " ".join(text.split())
