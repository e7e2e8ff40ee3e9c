"""The rooms of the house and the arrows between them, read from every import: at the top, lazy, and for types only.

An arrow is one file's import of another. It stays in its room or goes to a lower floor, and files import each other in
no circle.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
BASES = {"rlbuffer": ROOT, "rlbuffer_cli": ROOT / "cli", "simulation": ROOT}
MODULES = {
    ".".join(path.relative_to(base).with_suffix("").parts).removesuffix(".__init__"): path
    for package, base in BASES.items()
    for path in sorted((base / package).rglob("*.py"))
}
"""Dotted name -> file."""
SOURCES = [path for name, path in MODULES.items() if not name.startswith("simulation")]

FLOORS = (
    ("errors", "narration"),
    ("records", "process"),
    ("events", "wire", "packing", "config", "testing"),
    ("batcher", "metrics", "weights", "store"),
    ("client", "archive"),
    ("daemon", "worker", "trainer"),
    ("scorer",),
    ("run",),
    ("rlbuffer_cli", "simulation"),
)
"""Rooms from the ground up. A room imports only rooms of floors below its own."""
LEVEL = {name: level for level, names in enumerate(FLOORS) for name in names}
DOORS = {"rlbuffer", "rlbuffer.trainer.__main__"}
"""Modules that stand outside: the package itself, and what ``python -m`` starts. Nothing in a room needs them, except
the version."""

HEAVY = {"torch", "transformers", "safetensors", "vllm"}
HEAVY_ROOMS = {"weights", "worker", "trainer", "scorer"}
HEAVY_FILES = {"rlbuffer/process/preload.py", "rlbuffer/process/ranks.py"}
"""Imported only by processes that have torch."""
SCREEN = {"rlbuffer_cli", "click", "rich", "textual"}


def arrows() -> dict[str, set[str]]:
    """Every module -> the modules that it imports anywhere: at the top, in a function, for types."""
    found: dict[str, set[str]] = {}
    for name, path in MODULES.items():
        parts = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
        targets = []
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                targets += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                above = parts[: len(parts) - node.level + 1] if node.level else []
                start = ".".join([*above, *([node.module] if node.module else [])])
                targets += [f"{start}.{alias.name}" for alias in node.names]
        found[name] = {module for target in targets if (module := _module_of(target)) and module != name}
    return found


def _module_of(target: str) -> str:
    """The module that a dotted name is, or is of; "" for none of ours."""
    while target and target not in MODULES:
        target = target.rpartition(".")[0]
    return target


ARROWS = arrows()


def room(module: str) -> str:
    """The room of a module: the folder, or the file at the root."""
    parts = module.split(".")
    return parts[1] if parts[0] == "rlbuffer" and len(parts) > 1 else parts[0]


def circles(graph: Mapping[str, set[str]]) -> Iterator[list[str]]:
    """Modules that reach each other. Source: Tarjan 1972, Depth-first search and linear graph algorithms."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []

    def visit(module: str) -> Iterator[list[str]]:
        number[module] = lowest[module] = len(number)
        stack.append(module)
        for other in sorted(graph[module]):
            if other not in number:
                yield from visit(other)
                lowest[module] = min(lowest[module], lowest[other])
            elif other in stack:
                lowest[module] = min(lowest[module], number[other])
        if lowest[module] == number[module]:
            start = stack.index(module)
            circle = stack[start:]
            del stack[start:]
            if len(circle) > 1:
                yield sorted(circle)

    for module in graph:
        if module not in number:
            yield from visit(module)


def test_every_room_has_a_floor() -> None:
    rooms = {room(name) for name in MODULES} - {"rlbuffer"}
    assert rooms == set(LEVEL), "give a new room its floor in FLOORS, or put the module into a room"


def test_imports_stay_in_their_room_or_go_down() -> None:
    up = [
        f"{module} imports {other}"
        for module in MODULES
        if module not in DOORS
        for other in sorted(ARROWS[module] - {"rlbuffer"})
        if room(other) != room(module) and LEVEL[room(other)] >= LEVEL[room(module)]
    ]
    assert up == []


def test_no_files_import_each_other_in_a_circle() -> None:
    assert list(circles(ARROWS)) == []


def test_a_circle_would_be_seen() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}
    assert list(circles(graph)) == [["a", "b", "c"]]


def test_nobody_imports_another_files_private_names() -> None:
    private = [
        f"{module}:{node.lineno}: {node.module}.{alias.name}"
        for module, path in MODULES.items()
        if not module.startswith("simulation")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("rlbuffer")
        for alias in node.names
        if alias.name.startswith("_") and not alias.name.startswith("__")
    ]
    assert private == []


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


def name_of(path: Path) -> str:
    return next(name for name, other in MODULES.items() if other == path)


LIBRARY = [p for p in SOURCES if p.is_relative_to(ROOT / "rlbuffer") and p.name not in ("__init__.py", "__main__.py")]


def test_the_library_never_imports_the_screen() -> None:
    found = {p: SCREEN & _packages(imports(p)) for p in SOURCES if p.is_relative_to(ROOT / "rlbuffer")}
    assert {p: names for p, names in found.items() if names} == {}


def test_torch_and_transformers_stay_in_their_rooms() -> None:
    found = {
        path: HEAVY & _packages(imports(path, top_level_only=True))
        for path in LIBRARY
        if room(name_of(path)) not in HEAVY_ROOMS and str(path.relative_to(ROOT)) not in HEAVY_FILES
    }
    assert {path: names for path, names in found.items() if names} == {}


def test_decisions_use_no_server_no_clock_and_no_global_randomness() -> None:
    outside = {"redis", "time", "datetime", "random"}
    found = {
        path: outside & _packages(imports(path))
        for path in LIBRARY
        if room(name_of(path)) in {"records", "packing", "batcher"}
    }
    assert {path: names for path, names in found.items() if names} == {}


def _packages(names: set[str]) -> set[str]:
    return {name.split(".")[0] for name in names}


GENERATORS = {"Random", "SystemRandom", "default_rng", "Generator", "PCG64", "SeedSequence", "fork_rng"}
"""Names that make a generator of one's own, and types."""
KEEPS_GLOBAL_STATE = {"rlbuffer/trainer/session.py", "rlbuffer/trainer/checkpoints/checkpoint.py"}
"""The trainer seeds the global generators, and a checkpoint keeps their states: a loss may draw from them."""


def test_nothing_draws_from_the_generators_of_the_process() -> None:
    """A thread that draws from them, for a pause say, changes what a seeded trainer, a test or a checkpoint gets."""
    draws = []
    for path in SOURCES:
        if str(path.relative_to(ROOT)) in KEEPS_GLOBAL_STATE:
            continue
        draws += [
            f"{path}:{node.lineno}: {ast.unparse(node)}"
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name | ast.Attribute)
            and ast.unparse(node.value) in ("random", "np.random", "numpy.random", "torch.random")
            and node.attr not in GENERATORS
        ]
        draws += [f"{path}: {name}" for name in imports(path) if name.startswith(("random.", "numpy.random."))]
    assert draws == []


def test_test_modules_have_names_of_their_own() -> None:
    """Test modules are imported by name: the second of two is an error when both are collected."""
    names = [path.name for path in (ROOT / "tests").rglob("*.py") if path.name not in ("conftest.py", "__init__.py")]
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_no_model_and_no_tokenizer_brings_code_of_its_own() -> None:
    """Nor does transformers ask on the terminal whether it may."""
    lacking = []
    for path in (*SOURCES, *sorted((ROOT / "docs" / "examples").glob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if node.func.attr not in ("from_pretrained", "from_config"):
                continue
            given = {word.arg: ast.unparse(word.value) for word in node.keywords}
            wanted = {"trust_remote_code": "False"}
            if node.func.attr == "from_pretrained" and "Model" in ast.unparse(node.func.value):
                wanted["use_safetensors"] = "True"
            if not wanted.items() <= given.items():
                lacking.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert lacking == []


def test_nothing_is_pickled() -> None:
    """``pickle.UnpicklingError`` may be caught; nothing may be loaded from, or written as, pickled objects, but torch's
    index of a checkpoint by the Unpickler that knows what it may name."""
    calls = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and node.attr in {"load", "loads", "dump", "dumps", "Pickler", "Unpickler"}
        and isinstance(node.value, ast.Name)
        and node.value.id in {"pickle", "cloudpickle", "dill", "marshal"}
    ]
    assert [call.partition(":")[0] for call in calls] == ["rlbuffer/trainer/checkpoints/reading.py"]
