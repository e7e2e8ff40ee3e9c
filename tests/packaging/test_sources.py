"""What no source file may do. The arrows between rooms are contracts of import-linter, in pyproject.toml."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = [path for base in (ROOT / "rlbuffer", ROOT / "cli") for path in sorted(base.rglob("*.py"))]


@cache
def nodes(path: Path) -> list[ast.Attribute | ast.Call | ast.ImportFrom]:
    found = ast.walk(ast.parse(path.read_text()))
    return [node for node in found if isinstance(node, ast.Attribute | ast.Call | ast.ImportFrom)]


def test_nobody_imports_another_files_private_names() -> None:
    private = [
        f"{path}:{node.lineno}: {node.module}.{alias.name}"
        for path in SOURCES
        for node in nodes(path)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("rlbuffer")
        for alias in node.names
        if alias.name.startswith("_") and not alias.name.startswith("__")
    ]
    assert private == []


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
            for node in nodes(path)
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name | ast.Attribute)
            and ast.unparse(node.value) in ("random", "np.random", "numpy.random", "torch.random")
            and node.attr not in GENERATORS
        ]
        draws += [
            f"{path}:{node.lineno}: from {node.module}"
            for node in nodes(path)
            if isinstance(node, ast.ImportFrom) and node.module in ("random", "numpy.random")
        ]
    assert draws == []


def test_test_modules_have_names_of_their_own() -> None:
    """Test modules are imported by name: the second of two is an error when both are collected."""
    names = [path.name for path in (ROOT / "tests").rglob("*.py") if path.name not in ("conftest.py", "__init__.py")]
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_no_model_and_no_tokenizer_brings_code_of_its_own() -> None:
    """Nor does transformers ask on the terminal whether it may."""
    lacking = []
    for path in (*SOURCES, *sorted((ROOT / "docs" / "examples").glob("*.py"))):
        for node in nodes(path):
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
        for node in nodes(path)
        if isinstance(node, ast.Attribute)
        and node.attr in {"load", "loads", "dump", "dumps", "Pickler", "Unpickler"}
        and isinstance(node.value, ast.Name)
        and node.value.id in {"pickle", "cloudpickle", "dill", "marshal"}
    ]
    assert calls == []
