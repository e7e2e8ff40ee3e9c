"""``--set NAME=VALUE,VALUE``: settings of a recorded run in the place of its own, each combination a variant."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from itertools import product
from typing import Any

import click


def combinations(changes: Sequence[str]) -> list[dict[str, Any]]:
    """Every combination of the values that were given."""
    names: dict[str, list[Any]] = {}
    for change in changes:
        name, sign, text = change.partition("=")
        if not sign or not text:
            raise click.UsageError(f"--set {change}: write NAME=VALUE, or NAME=VALUE,VALUE")
        if name in names:
            raise click.UsageError(f"--set {name} stands there twice: write its values with commas between them")
        names[name] = _values(text)
    return [dict(zip(names, values, strict=True)) for values in product(*names.values())]


def _values(text: str) -> list[Any]:
    """One value of TOML, or several with commas between them; a word is text."""
    try:
        return [tomllib.loads(f"value = {text}")["value"]]
    except tomllib.TOMLDecodeError:
        pass
    words = text.split(",")
    return [text] if len(words) == 1 else [value for word in words for value in _values(word.strip())]
