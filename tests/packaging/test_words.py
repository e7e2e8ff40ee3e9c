"""A value is called by what it is: `told`, `found`, `wanted` and `held` say only that something was done to it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("rlbuffer", "cli", "simulation")
EMPTY = frozenset({"told", "found", "wanted", "held"})
PUBLIC = frozenset({"rlbuffer/batcher/batcher.py: wanted of allowances()"})
"""Keywords that users write."""


def empty_names(path: str, source: str) -> Iterator[str]:
    """``FILE:LINE: NAME`` of each variable, and ``FILE:LINE: NAME of FUNCTION()`` of each parameter, called so.

    Fields of records have their class beside them, and stay.
    """
    tree = ast.parse(source)
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    fields = {statement.target for node in classes for statement in node.body if isinstance(statement, ast.AnnAssign)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in EMPTY:
            if node not in fields:
                yield f"{path}:{node.lineno}: {node.id}"
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            name = getattr(node, "name", "lambda")
            every = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg)
            for parameter in every:
                if parameter is None or parameter.arg not in EMPTY:
                    continue
                if f"{path}: {parameter.arg} of {name}()" not in PUBLIC:
                    yield f"{path}:{parameter.lineno}: {parameter.arg} of {name}()"


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_variable_or_parameter_is_called_by_a_participle_that_fits_anything(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    names = [
        name for path in files for name in empty_names(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))
    ]
    assert not names, "say what the value is (entry, reply, matches, missing):\n" + "\n".join(names)


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("found = 1", ["a.py:1: found"]),
        ("x, *told = y", ["a.py:1: told"]),
        ("for held in y: pass", ["a.py:1: held"]),
        ("y = [wanted for wanted in x]", ["a.py:1: wanted"]),
        ("if (found := f()): pass", ["a.py:1: found"]),
        ("def f(x, *,\n      wanted=()): pass", ["a.py:2: wanted of f()"]),
        ("f = lambda told: told", ["a.py:1: told of lambda()"]),
        ("class C:\n    held: bool\n    def f(self):\n        found: int = 1", ["a.py:4: found"]),
        ("f(held=x.held, found=y['found'])", []),
    ],
)
def test_the_reader_of_names_sees_every_place_where_one_is_given(source: str, names: list[str]) -> None:
    assert list(empty_names("a.py", source)) == names
