"""The pages that come from the code are those that stand in docs/reference."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from rlbuffer import errors, records
from rlbuffer.config.setting_tree import run_schema

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"


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


def test_every_setting_has_a_row_with_a_meaning() -> None:
    rows = {
        tuple(f"{table.path}.{setting.name}".lstrip(".").replace("NAME", "*").split(".")): setting.meaning
        for table in MADE.tables(MADE.RunSettings)
        for setting in table.settings
    }
    named = {path[:-1] if path[-1] == "*" else path for path in run_schema().names()}
    assert set(rows) == named
    assert [path for path, meaning in rows.items() if len(meaning) < 5] == []


def test_every_exception_and_every_record_is_on_its_page() -> None:
    text = (REFERENCE / "errors.md").read_text(encoding="utf-8")
    classes = [name for name, value in vars(errors).items() if isinstance(value, type)]
    assert [name for name in classes if f"| `{name}` |" not in text] == []
    text = (REFERENCE / "records.md").read_text(encoding="utf-8")
    assert [name for name in MADE.RECORDS if f"\n## {name}\n" not in text or name not in records.__all__] == []
