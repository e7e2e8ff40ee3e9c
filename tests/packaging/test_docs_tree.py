"""The pages of docs/ are a tree: every link leads somewhere, the index names every page once."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)
FENCE = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)


def text_of(page: Path) -> str:
    """The page without its blocks of code: a `#` there is no heading."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """Anchors of every heading, as GitHub makes them."""
    found: list[str] = []
    for heading in HEADING.findall(text_of(page)):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        anchor = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        found.append(anchor if anchor not in found else f"{anchor}-{found.count(anchor)}")
    return set(found)


def lost(page: Path) -> list[str]:
    """Links of a page that lead nowhere."""
    out = []
    for link in LINK.findall(text_of(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            out.append(link)
    return out


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_to_a_page_and_a_heading(page: Path) -> None:
    assert lost(page) == []


def test_a_link_to_a_heading_that_is_not_there_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("# One `two`: three\n[x](#one-two-three) [y](#four) [z](b.md) [w](https://x.y)\n")
    assert lost(tmp_path / "a.md") == ["#four", "b.md"]


def test_the_index_has_one_line_for_every_page() -> None:
    index = text_of(DOCS / "README.md")
    lines = [line for line in index.splitlines() if line.startswith("- [")]
    targets = [LINK.findall(line)[0] for line in lines]
    pages = {
        str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md") if page.parent.name not in ("docs", "decisions")
    }
    assert sorted(targets) == sorted(pages | {"decisions/README.md", "log.md"})


WALK = DOCS / "explain" / "walk.md"
PASSED = re.compile(r"^\| `([\w/.]+)` \| (`[^|]+`) \|$", re.MULTILINE)
STOP = re.compile(r"^\| (\d+) \| `([\w/.]+)` \| ([^|]*) \| ([^|]+) \|$", re.MULTILINE)


def defined(path: Path) -> set[str]:
    """Names of a module's functions and classes, and ``Class.name`` of what a class defines."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            functions = (inner for inner in node.body if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef))
            names.update(f"{node.name}.{function.name}" for function in functions)
    return names


def test_the_walk_of_a_group_visits_every_file_once_and_names_what_is_there() -> None:
    text = WALK.read_text(encoding="utf-8").partition("## The walk")[2]
    stops = STOP.findall(text)
    assert len(stops) == sum(line.startswith("| ") and line[2].isdigit() for line in text.splitlines())
    assert [int(number) for number, *_ in stops] == list(range(1, len(stops) + 1))
    files = [file for _, file, *_ in stops]
    assert sorted({file for file in files if files.count(file) > 1}) == []
    lost_names = []
    for _, file, start, _ in stops:
        path = ROOT / "rlbuffer" / file
        if not path.exists():
            lost_names.append(file)
        elif path.suffix == ".py":
            names = re.findall(r"`([\w.]+)`", start)
            assert names, f"{file}: say where to start"
            lost_names += [f"{file}: {name}" for name in names if name not in defined(path)]
    passed = PASSED.findall(text)
    assert passed
    lost_names += [
        f"{file}: {name}"
        for file, functions in passed
        for name in re.findall(r"`([\w.]+)`", functions)
        if name not in defined(ROOT / "rlbuffer" / file)
    ]
    assert lost_names == [], "the walk names what is not there (any more)"


HEADERS = sorted({*(ROOT / "rlbuffer").glob("*/__init__.py"), *(ROOT / "rlbuffer").glob("*/*/__init__.py")})


@pytest.mark.parametrize("header", HEADERS, ids=lambda path: str(path.parent.relative_to(ROOT)))
def test_a_room_says_which_of_its_files_to_open_first(header: Path) -> None:
    text = ast.get_docstring(ast.parse(header.read_text(encoding="utf-8"))) or ""
    names = re.findall(r"`([\w/]+)`", text.partition("Open first: ")[2])
    assert names
    assert [
        name for name in names if not (header.parent / name).exists() and not (header.parent / f"{name}.py").exists()
    ] == []
