"""What is said or done once: the store's calls are documented in their protocol, files are replaced in one place."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STORE = ROOT / "rlbuffer" / "store"
SOURCES = [path for room in ("rlbuffer", "cli") for path in sorted((ROOT / room).rglob("*.py"))]

RENAMES = {
    "rlbuffer/process/files.py": "here",
    "rlbuffer/weights/download.py": "a download goes on in the same `.part` file; its folder is flushed later",
    "rlbuffer/weights/layout.py": "what goes is renamed first, so that nobody finds half of it",
}
"""File -> why it renames files by itself."""


def methods(path: Path) -> dict[str, str | None]:
    """Method of a class in the file -> its docstring."""
    return {
        node.name: ast.get_docstring(node)
        for kind in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(kind, ast.ClassDef)
        for node in kind.body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    }


CALLS = methods(STORE / "protocol.py") | methods(STORE / "seeing.py")


def test_every_call_of_the_store_is_documented_in_its_protocol() -> None:
    assert [name for name, text in CALLS.items() if text is None] == []


@pytest.mark.parametrize(
    "path",
    [*sorted((STORE / "moves").glob("*.py")), STORE / "redis_store.py", STORE / "session.py"],
    ids=lambda p: p.name,
)
def test_a_call_of_the_store_is_documented_once(path: Path) -> None:
    assert [name for name, text in methods(path).items() if text is not None and name in CALLS] == []


def test_files_are_renamed_in_one_place() -> None:
    found = {
        str(path.relative_to(ROOT))
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and (node.func.attr == "rename" or (node.func.attr == "replace" and len(node.args) == 1 and not node.keywords))
        and ast.unparse(node.func.value) not in ("pipe", "dataclasses")
    }
    assert found == RENAMES.keys(), "use rlbuffer.process.files"
