"""The pages that come from the code are those that stand in docs/reference."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from rlbuffer.config.explain import free_table_of, known_settings, pattern_of

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_reference", REFERENCE / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MADE = generator()


@pytest.mark.parametrize("page", sorted(MADE.PAGES))
def test_a_page_is_what_the_code_makes_of_it(page: str) -> None:
    made = MADE.PAGES[page]()
    assert (REFERENCE / page).read_text(encoding="utf-8") == made, "run: python docs/reference/generate.py"


PAGES = [
    path
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
    if path.name != "log.md"
]
NAMED = re.compile(r"`\[?((?:batcher|trainer|model|weights|server|worker|score|eval)(?:\.[\w*]+)+)\]?(?: = [^`]*)?`")


def is_setting(parts: list[str]) -> bool:
    """True when a dotted name is a setting, or a table of settings; names of the user's own stand for any."""
    name = ".".join("NAME" if part == "*" else part for part in parts)
    inside = any(other.startswith(f"{name}.") for other in known_settings())
    return bool(
        inside or pattern_of(name) or free_table_of(name) or pattern_of(name.rpartition(".")[0]) in known_settings()
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_setting_that_a_page_names_exists(page: Path) -> None:
    names = NAMED.findall(page.read_text(encoding="utf-8"))
    assert [name for name in names if not is_setting(name.split("."))] == []


def test_names_of_settings_are_found_on_the_pages() -> None:
    assert sum(len(NAMED.findall(page.read_text(encoding="utf-8"))) for page in PAGES) > 25
    assert not is_setting(["trainer", "learning_rate"])
    assert is_setting(["batcher", "envs", "math", "advantage"])
