"""All settings as a tree of names, read off the settings' own types, so that it cannot drift from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

from pydantic import BaseModel

from rlbuffer.config.settings import RunSettings


@dataclass(frozen=True, slots=True)
class Leaf:
    """One value."""

    is_structured: bool = False
    """An array: its variable is written as TOML."""


@dataclass(frozen=True, slots=True)
class Free:
    """A table whose keys and values are the user's own (``model.config``)."""


@dataclass(frozen=True, slots=True)
class Named:
    """A table whose keys are the user's names (envs, workers)."""

    child: Leaf | Section


@dataclass(frozen=True, slots=True)
class Section:
    """A table with known keys."""

    fields: Mapping[str, Leaf | Free | Named | Section]

    def names(self) -> list[tuple[str, ...]]:
        """Path of every setting; ``*`` stands for a name that the user chooses."""
        out: list[tuple[str, ...]] = []
        for name, node in self.fields.items():
            inner = node.child if isinstance(node, Named) else node
            prefix = (name, "*") if isinstance(node, Named) else (name,)
            if isinstance(inner, Section):
                out += [prefix + rest for rest in inner.names()]
            else:
                out.append(prefix)
        return out


Node = Leaf | Free | Named | Section


def children(node: Node, name: str) -> Node | None:
    """The node that `name` is inside `node`; None when there is no such setting."""
    if isinstance(node, Section):
        return node.fields.get(name)
    if isinstance(node, Named):
        return node.child
    return node if isinstance(node, Free) else None


@cache
def run_schema() -> Section:
    """The tree of :class:`~rlbuffer.config.settings.RunSettings`."""
    return _section(RunSettings)


def _section(cls: Any) -> Section:
    if issubclass(cls, BaseModel):
        return Section({name: _node(info.annotation) for name, info in cls.model_fields.items()})
    hints = get_type_hints(cls)
    return Section({f.name: _node(hints[f.name]) for f in dataclasses.fields(cls)})


def _node(annotation: Any) -> Node:
    if isinstance(annotation, type) and (issubclass(annotation, BaseModel) or dataclasses.is_dataclass(annotation)):
        return _section(annotation)
    origin = get_origin(annotation)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        value = get_args(annotation)[1]
        if value is Any:
            return Free()
        child = _node(value)
        return Named(child if isinstance(child, Section) else Leaf())
    return Leaf(is_structured=origin in (tuple, list))
