"""Files, functions and constructors stay small enough to be read at once."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [path for room in ("rlbuffer", "cli", "simulation") for path in sorted((ROOT / room).rglob("*.py"))]
TESTS = [path for room in ("tests", "benchmarks") for path in sorted((ROOT / room).rglob("*.py"))]

SOURCE_LINES = 400
TEST_LINES = 500

FUNCTION_LINES = 60
"""Without the docstring: a table of arguments makes no function hard to follow."""
LONGER_FUNCTIONS = {
    "rlbuffer/trainer/loop.py train": "the training loop is read from top to bottom, like the loop that it replaces",
}

PARAMETERS = 7
"""Parameters of a constructor that is written by hand; a record may have as many fields as it describes."""
MORE_PARAMETERS = {
    "rlbuffer/worker/envs/jsonl.py JsonLines": "an env takes `env_options` as keywords, each with its own default",
    "rlbuffer/worker/envs/reasoning.py ReasoningGym": "likewise",
    "rlbuffer/worker/envs/verifiers.py Verifiers": "likewise",
}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """From `def` to the last line, the docstring left out."""
    size = (function.end_lineno or 0) - function.lineno + 1
    if ast.get_docstring(function) is not None:
        docstring = function.body[0]
        size -= (docstring.end_lineno or 0) - docstring.lineno + 1
    return size


def parameters_of(function: ast.FunctionDef) -> int:
    """Without `self`."""
    given = function.args
    return len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs) - 1


def long() -> set[str]:
    """Functions above the limit."""
    return {f"{name_of(path)} {f.name}" for path in SOURCES for f in functions(path) if lines_of(f) > FUNCTION_LINES}


def crowded() -> set[str]:
    """Classes whose constructor is above the limit."""
    return {
        f"{name_of(path)} {node.name}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
        for method in node.body
        if isinstance(method, ast.FunctionDef) and method.name == "__init__" and parameters_of(method) > PARAMETERS
    }


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_no_source_file_is_longer_than_400_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= SOURCE_LINES


def test_no_test_or_benchmark_is_longer_than_500_lines() -> None:
    assert [name_of(path) for path in TESTS if len(path.read_text().splitlines()) > TEST_LINES] == []


def test_no_function_is_longer_than_60_lines() -> None:
    assert sorted(long() - LONGER_FUNCTIONS.keys()) == [], "cut it by subject, with a name for what each piece decides"


def test_no_constructor_takes_more_than_seven_parameters() -> None:
    assert sorted(crowded() - MORE_PARAMETERS.keys()) == [], "hand over a record, or what belongs together"


def test_every_exception_is_still_needed() -> None:
    assert sorted(LONGER_FUNCTIONS.keys() - long()) == []
    assert sorted(MORE_PARAMETERS.keys() - crowded()) == []
