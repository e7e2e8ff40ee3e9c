"""A class has a name of its own, and every error of the library stands in one file."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "rlbuffer").rglob("*.py"))


def classes(path: Path) -> list[ast.ClassDef]:
    return [node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)]


def test_no_two_classes_have_one_name() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in FILES:
        for node in classes(path):
            if not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(ROOT)))
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_every_error_of_the_library_stands_in_errors() -> None:
    ours = {node.name for node in classes(ROOT / "rlbuffer" / "errors.py")}
    elsewhere = [
        f"{path.relative_to(ROOT)}: {node.name}"
        for path in FILES
        if path.name != "errors.py"
        for node in classes(path)
        if any(isinstance(base, ast.Name) and base.id in ours for base in node.bases)
    ]
    assert elsewhere == []
