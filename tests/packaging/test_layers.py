"""The rooms of the house and the arrows between them, read from the import statements themselves."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted([*(ROOT / "rlbuffer").rglob("*.py"), *(ROOT / "cli").rglob("*.py")])

FLOORS = [
    ("errors", "values", "columns", "spans", "infos", "dotted"),
    ("records", "batches", "padded"),
    (
        "config",
        "config_changes",
        "settings",
        "wire",
        "wire_info",
        "info_pages",
        "messages",
        "jsonl",
        "lines",
        "advantages",
        "arena",
        "fills",
        "rows",
        "sampling",
        "step_columns",
        "truncation",
        "planning",
        "assembly",
        "packing",
    ),
    ("policy",),
    ("batcher",),
    (
        "filters",
        "toml_lines",
        "schema",
        "placement",
        "cross_checks",
        "model_checks",
        "host_checks",
        "loading",
        "testing",
    ),
    ("store",),
    ("views", "writer", "refusals", "progress", "skew", "reader", "operations"),
    ("client",),
    ("daemon",),
    ("weights",),
    ("processes", "forkserver", "preload", "heartbeats"),
    ("worker", "trainer"),
    ("scorer",),
    ("supervise",),
]
"""Modules of a floor may import those of the same floor and below."""
LEVEL = {name: level for level, names in enumerate(FLOORS) for name in names}

HEAVY = {"torch", "transformers", "safetensors", "vllm"}
HEAVY_ROOMS = {"weights", "worker", "trainer", "scorer"}
SCREEN = {"rlbuffer_cli", "click", "rich", "textual"}


def imports(path: Path, *, top_level_only: bool = False) -> set[str]:
    """Absolute names of what a file imports; type-checking blocks and, if asked, functions left out."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                continue
            if top_level_only and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if isinstance(child, ast.Import):
                found.update(alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom) and child.level == 0 and child.module:
                found.add(child.module)
                found.update(f"{child.module}.{alias.name}" for alias in child.names)
            visit(child)

    visit(ast.parse(path.read_text()))
    return found


def room(path: Path) -> str:
    parts = path.relative_to(ROOT / "rlbuffer").with_suffix("").parts
    return parts[0]


LIBRARY = [p for p in SOURCES if p.is_relative_to(ROOT / "rlbuffer") and p.name not in ("__init__.py", "__main__.py")]


@pytest.mark.parametrize("path", LIBRARY, ids=lambda p: str(p.relative_to(ROOT)))
def test_arrows_point_from_records_to_the_command_line(path: Path) -> None:
    mine = room(path)
    assert mine in LEVEL, f"{mine} has no floor yet: give it one in FLOORS"
    above = sorted(
        name
        for name in imports(path, top_level_only=True)
        if name.startswith("rlbuffer.") and LEVEL.get(name.split(".")[1], 0) > LEVEL[mine]
    )
    assert above == []


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_the_library_never_imports_the_screen(path: Path) -> None:
    if path.is_relative_to(ROOT / "rlbuffer"):
        assert {name.split(".")[0] for name in imports(path)} & SCREEN == set()


@pytest.mark.parametrize("path", LIBRARY, ids=lambda p: str(p.relative_to(ROOT)))
def test_torch_and_transformers_stay_in_their_rooms(path: Path) -> None:
    if room(path) not in HEAVY_ROOMS | {"preload"}:
        assert {name.split(".")[0] for name in imports(path, top_level_only=True)} & HEAVY == set()


@pytest.mark.parametrize("path", LIBRARY, ids=lambda p: str(p.relative_to(ROOT)))
def test_decisions_use_no_server_no_clock_and_no_global_randomness(path: Path) -> None:
    if room(path) in {"policy", "packing", "planning", "batcher", "advantages"}:
        assert {name.split(".")[0] for name in imports(path)} & {"redis", "time", "datetime", "random"} == set()


GENERATORS = {"Random", "SystemRandom", "default_rng", "Generator", "PCG64", "SeedSequence", "fork_rng"}
"""What makes a generator of one's own, and types."""
KEEPS_GLOBAL_STATE = {"rlbuffer/trainer/session.py", "rlbuffer/trainer/checkpoints/checkpoint.py"}
"""The trainer seeds the global generators, and a checkpoint keeps their states: a loss may draw from them."""


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_draws_from_the_generators_of_the_process(path: Path) -> None:
    """A thread that draws from them, for a pause say, changes what a seeded trainer, a test or a checkpoint gets."""
    if str(path.relative_to(ROOT)) in KEEPS_GLOBAL_STATE:
        return
    draws = [
        f"{node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and ast.unparse(node.value) in ("random", "np.random", "numpy.random", "torch.random")
        and node.attr not in GENERATORS
    ]
    assert draws == []
    assert not any(name.startswith(("random.", "numpy.random.")) for name in imports(path))


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_source_file_passes_500_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 500


def test_test_modules_have_names_of_their_own() -> None:
    """pytest imports them by name: the second of two is an error when both are collected."""
    names = [path.name for path in (ROOT / "tests").rglob("*.py") if path.name not in ("conftest.py", "__init__.py")]
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_no_test_benchmark_or_simulation_passes_500_lines() -> None:
    files = [path for room in ("tests", "benchmarks", "simulation") for path in (ROOT / room).rglob("*.py")]
    assert [str(p.relative_to(ROOT)) for p in files if len(p.read_text().splitlines()) > 500] == []


def test_nothing_is_pickled() -> None:
    """``pickle.UnpicklingError`` may be caught; nothing may be loaded from, or written as, pickled objects."""
    calls = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and node.attr in {"load", "loads", "dump", "dumps", "Pickler", "Unpickler"}
        and isinstance(node.value, ast.Name)
        and node.value.id in {"pickle", "cloudpickle", "dill", "marshal"}
    ]
    assert calls == []
