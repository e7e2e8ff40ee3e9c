"""The tables of the docs list the members of the enums, and every member says what it means."""

from __future__ import annotations

import ast
import itertools
import re
from enum import StrEnum
from pathlib import Path

import pytest

from rlbuffer.records import states
from rlbuffer.records.states import ClosedBy, Reason, State

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
ENUMS = [kind for kind in vars(states).values() if isinstance(kind, type) and issubclass(kind, StrEnum)][1:]
"""All but StrEnum itself."""


def table(page: str, head: str) -> list[str]:
    """The words of the first column of the table whose first line begins with `head`."""
    lines = (DOCS / page).read_text(encoding="utf-8").splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(f"| {head} |"))
    words: list[str] = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        cell = line.split("|")[1]
        words += re.findall(r"`(\w+)`", cell) or [cell.strip()]
    return words


@pytest.mark.parametrize(
    ("page", "head", "kind"),
    [
        ("explain/how_it_fits.md", "reason", Reason),
        ("explain/how_it_fits.md", "state", State),
        ("explain/batcher.md", "`closed_by`", ClosedBy),
    ],
)
def test_a_table_lists_every_member_in_order(page: str, head: str, kind: type[StrEnum]) -> None:
    assert table(page, head) == [member.value for member in kind]


def test_the_glossary_lists_every_reason() -> None:
    text = " ".join((DOCS / "reference" / "glossary.md").read_text(encoding="utf-8").split())
    entry = text[text.index("- **reason**") :].split(" [How it fits]")[0]
    assert re.findall(r"`(\w+)`", entry) == [reason.value for reason in Reason]


def test_every_member_has_a_sentence_of_its_own() -> None:
    tree = ast.parse((ROOT / "rlbuffer" / "records" / "states.py").read_text(encoding="utf-8"))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    assert classes.keys() == {kind.__name__ for kind in ENUMS}
    for kind in ENUMS:
        body = classes[kind.__name__].body
        said = {
            part.targets[0].id: after.value.value  # type: ignore[union-attr, attr-defined]
            for part, after in itertools.pairwise(body)
            if isinstance(part, ast.Assign) and isinstance(after, ast.Expr)
        }
        assert said.keys() == set(kind.__members__)
        assert all(re.match(r"[A-Z].*\.\Z", sentence) for sentence in said.values())


def test_what_is_stored_and_printed_is_the_plain_word() -> None:
    assert [str(state) for state in State] == ["forming", "ready", "packed", "trained", "dropped"]
    assert all(f"{member}" == member == member.value for kind in ENUMS for member in kind)
