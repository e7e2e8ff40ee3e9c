"""Events and step headers are records, not dicts: what is looked up by a name, mypy cannot check."""

from __future__ import annotations

import ast
import importlib
import re
import typing
from pathlib import Path

import pytest

from rlbuffer.events.event import Event

ROOT = Path(__file__).parents[2]
CODE = [*(ROOT / "rlbuffer").rglob("*.py"), *(ROOT / "cli").rglob("*.py")]
READERS = [*CODE, *(ROOT / "simulation").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
PAGES = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "docs").rglob("*.py")]
CONVERSION = ROOT / "rlbuffer" / "events" / "event.py"
"""The one place where an event becomes an object with its name."""
LEFT_OUT = ROOT / "rlbuffer" / "process" / "output.py"
"""Has the object that stands for objects that nobody read. It is no event, and its room is below that of events."""
UNIONS = {
    "rlbuffer.events.batcher": "BatcherEvent",
    "rlbuffer.events.worker": "WorkerEvent",
    "rlbuffer.events.scorer": "ScorerEvent",
    "rlbuffer.events.trainer": "TrainerEvent",
    "rlbuffer.events.history": "HistoryEvent",
}
"""Module of a producer -> the union of its events."""


def lines_with(pattern: str, paths: list[Path]) -> list[str]:
    """``path:line`` of each match."""
    return [
        f"{path.relative_to(ROOT)}:{number}"
        for path in paths
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(pattern, line)
    ]


def test_events_are_no_dicts() -> None:
    assert lines_with(r"""["']event["']\s*:""", [path for path in CODE if path not in (CONVERSION, LEFT_OUT)]) == []
    assert len(lines_with(r'"event":', [CONVERSION])) == 1
    assert lines_with(r"""\bevent(\[["']|\.get\()""", READERS) == []


def test_step_headers_are_no_dicts() -> None:
    assert lines_with(r"""\bstep\.header(\[|\.get\()""", [*READERS, *PAGES]) == []
    assert [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in CODE
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr == "get" and ast.unparse(node.value).endswith(".header")
    ] == []


@pytest.mark.parametrize("module", UNIONS)
def test_the_union_of_a_producer_has_all_its_events(module: str) -> None:
    """A narrator that matches the union and ends in ``assert_never`` is only complete if the union is."""
    loaded = importlib.import_module(module)
    members = set(typing.get_args(getattr(loaded, UNIONS[module])))
    kinds = {kind for kind in vars(loaded).values() if isinstance(kind, type) and issubclass(kind, Event)}
    own = {kind for kind in kinds if kind.__module__ == module and "event" in vars(kind)}
    assert own <= members
    assert {kind.__module__ for kind in members} <= {module, "rlbuffer.events.event"}
