"""Settings and code that README and docs show: settings load, code compiles, and what it imports is there.

The loops and envs among them run as they stand in tests/e2e/test_own_trainers.py and
tests/unit/test_environment_examples.py.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from pathlib import Path

import pytest

import rlbuffer
from rlbuffer.checks.loading import load

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(p for p in (ROOT / "docs").rglob("*.md") if p.name != "log.md")]
FENCE = re.compile(r"^ *```(toml|python)(?: \S+)?\n(.*?)^ *```", re.MULTILINE | re.DOTALL)


def snippets(kind: str) -> list[tuple[str, str]]:
    """Page and line, and text, of all of a kind."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in FENCE.finditer(text):
            if match[1] == kind:
                line = text.count("\n", 0, match.start()) + 2
                found.append((f"{page.relative_to(ROOT)}:{line}", match[2]))
    return found


@pytest.mark.parametrize(("place", "text"), snippets("toml"), ids=lambda value: str(value)[:40])
def test_settings_on_a_page_load_in_an_empty_folder(
    place: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rlbuffer.toml").write_text(text, encoding="utf-8")
    assert load(environ={}).file == Path("rlbuffer.toml")


@pytest.mark.parametrize(("place", "text"), snippets("python"), ids=lambda value: str(value)[:40])
def test_code_on_a_page_compiles_and_names_what_there_is(place: str, text: str) -> None:
    tree = ast.parse(text, filename=place)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rlbuffer"):
            for alias in node.names:
                module = importlib.import_module(node.module or "")
                assert hasattr(module, alias.name) or importlib.util.find_spec(f"{module.__name__}.{alias.name}")
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "rlbuffer":
            assert hasattr(rlbuffer, node.attr), (place, node.attr)


def test_the_pages_show_settings_and_code() -> None:
    assert len(snippets("toml")) > 5
    assert len(snippets("python")) > 5
