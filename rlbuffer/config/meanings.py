"""The meaning of every setting, read off the code: what it may be, its default, and the words beside it.

The page of settings and `rlbuffer config explain` are made of it, so that neither can drift from the code.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel


class SettingMeaning(NamedTuple):
    """One value of ``rlbuffer.toml``."""

    name: str
    default: str
    values: str
    meaning: str


class TableMeaning(NamedTuple):
    """One table of ``rlbuffer.toml``, with the settings that stand right in it."""

    path: str
    meaning: str
    settings: list[SettingMeaning]


def tables(cls: type, path: str = "", given: Any = None) -> Iterator[TableMeaning]:
    """A table and those inside it, in the order of the code; `given` is an instance that holds the defaults."""
    own, inner = [], []
    for name, annotation, default, meaning in _fields(cls):
        below, is_named = _section(annotation)
        default = default if given is None else getattr(given, name)
        if below is None:
            own.append(SettingMeaning(name, _value(default), _values(annotation), meaning))
        else:
            inner.append((below, f"{path}.{name}".lstrip(".") + ".NAME" * is_named, None if is_named else default))
    yield TableMeaning(path, _summary(cls), own)
    for below, place, held_by in inner:
        yield from tables(below, place, held_by)


def _fields(cls: type) -> Iterator[tuple[str, Any, Any, str]]:
    """(name, annotation, default, meaning) of a section's fields."""
    if issubclass(cls, BaseModel):
        for name, field in cls.model_fields.items():
            default = field.get_default(call_default_factory=True)
            annotation = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
            yield name, annotation, (... if field.is_required() else default), field.description or ""
        return
    hints, meanings = get_type_hints(cls, include_extras=True), field_docs(cls)
    for item in dataclasses.fields(cls):  # type: ignore[arg-type]
        default = item.default_factory() if item.default_factory is not dataclasses.MISSING else item.default
        yield item.name, hints[item.name], default, meanings.get(item.name, "")


def field_docs(cls: type) -> dict[str, str]:
    """Field, or member -> the docstring below it."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    out = {}
    for before, after in zip(body.body, body.body[1:], strict=False):
        targets = [before.target] if isinstance(before, ast.AnnAssign) else getattr(before, "targets", [])
        if targets and isinstance(name := targets[0], ast.Name):
            text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
            out[name.id] = prose(inspect.cleandoc(str(text)))
    return out


def _section(annotation: Any) -> tuple[type | None, bool]:
    """The section that an annotation is, or holds under the user's names, and which of the two; None: a value."""
    if isinstance(annotation, type) and (issubclass(annotation, BaseModel) or dataclasses.is_dataclass(annotation)):
        return annotation, False
    if get_origin(annotation) is not None and _is(annotation, Mapping):
        inner = _section(get_args(annotation)[1])[0]
        return inner, inner is not None
    return None, False


def _is(annotation: Any, kind: type) -> bool:
    origin = get_origin(annotation) or annotation
    return isinstance(origin, type) and issubclass(origin, kind)


def _values(annotation: Any) -> str:
    """An annotation in words: ``integer, from 1``."""
    bounds = []
    if get_origin(annotation) is Annotated:
        annotation, *metadata = get_args(annotation)
        limits = {key: getattr(m, key) for m in metadata for key in ("ge", "gt", "le", "lt") if hasattr(m, key)}
        words = {"ge": "from", "gt": "above", "le": "to", "lt": "below"}
        bounds = [f"{words[key]} {_number(limit)}" for key, limit in limits.items() if abs(limit) < 2**62]
        if _is(annotation, tuple) and not bounds:
            return "list"
    if get_origin(annotation) in (Union, types.UnionType):
        arms = dict.fromkeys(_values(arm) for arm in get_args(annotation) if arm is not type(None))
        return ", ".join([" or ".join(arms), *bounds])
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(annotation))
    kinds = ((bool, "true or false"), (int, "integer"), (float, "number"), (str, "text"), (Path, "path"))
    word = next((word for kind, word in kinds if _is(annotation, kind)), "")
    return ", ".join([word or ("list" if _is(annotation, tuple) else "table"), *bounds])


def _number(value: float) -> str:
    return f"{value:g}"


def _value(value: Any) -> str:
    """A default as TOML has it."""
    if value is ... or value is dataclasses.MISSING:
        return "required"
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, Mapping):
        return "`{}`"
    if isinstance(value, tuple):
        return "`[" + ", ".join(_value(item).strip("`") for item in value) + "]`"
    return f'`"{value}"`' if isinstance(value, str | Path) else f"`{value}`"


def prose(text: str) -> str:
    """A docstring's text in one line, with Markdown's marks."""
    text = re.sub(r":\w+:`~?(?:[\w.]+\.)?(\w+)`", r"`\1`", text).replace("``", "`")
    return " ".join(text.split())


def _summary(cls: type) -> str:
    """The docstring of a section, without the name of the table before it."""
    first = prose((inspect.getdoc(cls) or "").split("\n\n")[0])
    text = re.sub(r"^`\[[\w.]+\]`: ", "", first)
    return text[:1].upper() + text[1:]
