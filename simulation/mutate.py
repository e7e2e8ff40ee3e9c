"""``python -m simulation.mutate``: are small defects found? Mechanical ones (:mod:`simulation.mutants`), one at a time.

Each is put into a copy of the tree; there the simulation runs a few hundred seeds and ends at the first violation. What
it lets pass goes to a named set of tests. What both let pass is listed, unless :data:`EQUIVALENT` says why it changes
nothing that matters.

    python -m simulation.mutate --count 80 --seed 1     # drawn; half of them in Lua
    python -m simulation.mutate --whole lease.lua       # all of the files whose path ends so
    make mutations

Verdicts are kept in a file as they come, so a run that was stopped goes on. What was found stays found; what survived
is tried again once any file of the tree has changed. Work is bounded by seeds and events (:mod:`simulation.world`); the
limit of processor time below is for a defect that loops without waiting for anything, which counts as found.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from itertools import zip_longest
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from simulation.mutants import Mutant, lua_mutants, python_mutants

ROOT = Path(__file__).parents[1]
EQUIVALENT = Path(__file__).with_name("equivalent.toml")
"""Mutants that nothing can find, each with the reason."""
RESULTS = ROOT / "build" / "mutants.jsonl"
CPU_SECONDS = 600
TEST_SECONDS = 60
FOUND = ("simulation", "tests")
"""Who may find a mutant."""
COVERED_SEEDS = 40
"""Seeds that say which lines of Python the simulation runs."""
COPIED = ("rlbuffer", "simulation", "tests", "cli", "pyproject.toml")
MUTATED = ("store", "daemon", "policy", "writer.py", "reader.py", "batcher.py", "heartbeats.py")
"""Of rlbuffer; of the Python files only the lines that the simulation runs."""
TESTS = {
    "rlbuffer/policy": ("tests/unit/test_[abgops]*.py", "tests/unit/test_memory_policy.py", "tests/unit/test_f*.py"),
    "rlbuffer/batcher.py": ("tests/unit/test_b*.py", "tests/unit/test_adapters.py", "tests/unit/test_pool.py"),
    "rlbuffer/daemon": (
        "tests/unit/test_memory_policy.py",
        "tests/unit/test_takeover_garbage.py",
        "tests/integration/test_daemon_troubles.py",
        "tests/integration/test_config_revisions.py",
        "tests/integration/test_drain.py",
        "tests/integration/test_env_pause.py",
    ),
    "rlbuffer/writer.py": ("tests/integration/test_writer.py",),
    "rlbuffer/reader.py": ("tests/integration/test_reader_troubles.py", "tests/integration/test_recovery.py"),
    "": ("tests/unit/test_store_format.py", "tests/integration/test_store_*.py", "tests/integration/test_recovery.py"),
}
"""Path of what is changed, or how it begins -> the quick tests that are asked when the simulation has found nothing."""


def candidates(whole: str = "") -> list[Mutant]:
    """All mutants; with `whole`, of the files whose path ends so."""
    folder = ROOT / "rlbuffer"
    files = [path for name in MUTATED for path in (folder.glob(f"{name}/**/*") if "." not in name else [folder / name])]
    files = sorted(file for file in files if str(file).endswith(whole))
    made = []
    for file in files:
        if file.suffix == ".lua":
            made += lua_mutants(str(file.relative_to(ROOT)), file.read_text(encoding="utf-8"))
    run = executed([file for file in files if file.suffix == ".py"])
    for file, lines in run.items():
        made += python_mutants(str(file.relative_to(ROOT)), file.read_text(encoding="utf-8"), lines)
    return made


def executed(files: list[Path]) -> dict[Path, set[int]]:
    """The lines of these files that some seeds run."""
    if not files:
        return {}
    from simulation.__main__ import run_seed
    from simulation.scheduler import Task

    lines: dict[str, set[int]] = {str(file): set() for file in files}

    def local(frame: Any, event: str, arg: object) -> Any:
        if event == "line":
            lines[frame.f_code.co_filename].add(frame.f_lineno)
        return local

    def trace(frame: Any, event: str, arg: object) -> Any:
        return local if frame.f_code.co_filename in lines else None

    begin = Task._run

    def traced(task: Task) -> None:
        sys.settrace(trace)  # a greenlet has a tracer of its own
        begin(task)

    Task._run = traced  # type: ignore[method-assign]
    sys.settrace(trace)
    try:
        for seed in range(COVERED_SEEDS):
            run_seed(seed)
    finally:
        sys.settrace(None)
        Task._run = begin  # type: ignore[method-assign]
    return {Path(name): found for name, found in lines.items()}


def drawn(mutants: list[Mutant], count: int, seed: int) -> list[Mutant]:
    """`count` of them, half in Lua, as many of each operator as there are: numbers to change are many."""
    dice = random.Random(f"mutants {seed}")
    halves = []
    for is_lua in (True, False):
        by_operator: dict[str, list[Mutant]] = {}
        for mutant in mutants:
            if mutant.path.endswith(".lua") == is_lua:
                by_operator.setdefault(mutant.operator, []).append(mutant)
        for its in by_operator.values():
            dice.shuffle(its)
        turns = zip_longest(*(by_operator[name] for name in sorted(by_operator)))
        halves.append([mutant for turn in turns for mutant in turn if mutant is not None])
    lua, rest = halves
    half = max(count // 2, count - len(rest))
    return lua[:half] + rest[: count - min(half, len(lua))]


def tests_of(path: str) -> list[str]:
    """The named tests for a file."""
    patterns = next(names for begin, names in TESTS.items() if path.startswith(begin))
    return sorted({str(file.relative_to(ROOT)) for pattern in patterns for file in ROOT.glob(pattern)})


class Tree:
    """A copy of what runs, with one line changed at a time."""

    def __init__(self, seeds: int, *, has_tests: bool) -> None:
        self._has_tests = has_tests
        self._folder = Path(tempfile.mkdtemp(prefix="mutants-"))
        self._seeds = seeds
        skipped = shutil.ignore_patterns("__pycache__", "*.egg-info")
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, self._folder / name, ignore=skipped)
            else:
                shutil.copy(source, self._folder / name)

    def remove(self) -> None:
        """Takes the copy away."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def judged(self, mutant: Mutant) -> tuple[str, str]:
        """-> who found it (``simulation``, ``tests``, or ``nobody``), and how."""
        file = self._folder / mutant.path
        text = file.read_text(encoding="utf-8")
        self._write(file, mutant.applied(text))
        try:
            return self.asked(mutant.path)
        finally:
            self._write(file, text)

    def _write(self, file: Path, text: str) -> None:
        """Compiled files are told apart by second and size alone: that of another text goes."""
        file.write_text(text, encoding="utf-8")
        for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*"):
            compiled.unlink()

    def asked(self, path: str) -> tuple[str, str]:
        """The same of the tree as it is; without a path no tests are asked."""
        code, out = self._run("-m", "simulation", "--seeds", str(self._seeds), "--jobs", "1")
        if code:
            return "simulation", _first_line(out, code)
        return self.tested(path) if path else ("nobody", "")

    def tested(self, path: str) -> tuple[str, str]:
        """The same, by the tests named for a path alone; ``unasked`` when there are to be none."""
        if not self._has_tests:
            return "unasked", ""
        options = ("-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--timeout", str(TEST_SECONDS))
        code, out = self._run("-m", "pytest", *options, *tests_of(path))
        return ("tests", _first_line(out, code)) if code else ("nobody", "")

    def _run(self, *command: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=self._folder,
            env=os.environ | {"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
            preexec_fn=_limited,
        )
        return done.returncode, done.stdout


def _limited() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))


def _first_line(out: str, code: int) -> str:
    if code < 0:
        return f"ended by signal {-code}"
    lines = [line.strip() for line in out.splitlines() if line.strip()]
    violated = next((i for i, line in enumerate(lines) if "violates an invariant" in line), None)
    if violated is not None:
        return f"{lines[violated].split(' violates')[0]}: {lines[violated + 1]}"[:200]
    failed = next((line for line in lines if line.startswith(("FAILED", "ERROR"))), "")
    return (failed or (lines[-1] if lines else f"exit code {code}"))[:200]


def digest() -> str:
    """Of the files that a verdict depends on."""
    sums = hashlib.sha256()
    for name in COPIED:
        for file in sorted((ROOT / name).rglob("*")) if (ROOT / name).is_dir() else [ROOT / name]:
            if file.suffix in (".py", ".lua", ".toml") and file != EQUIVALENT:
                sums.update(str(file.relative_to(ROOT)).encode() + file.read_bytes())
    return sums.hexdigest()[:16]


def equivalents() -> dict[tuple[str, str, str], str]:
    """(path, line, changed line), without indentation -> why nothing can find it."""
    listed = tomllib.loads(EQUIVALENT.read_text(encoding="utf-8")).get("mutant", [])
    return {(item["path"], item["old"], item["new"]): item["why"] for item in listed}


def main() -> int:
    """Runs what the command line asks for. -> exit code: 1 when something survived"""
    parser = argparse.ArgumentParser(prog="python -m simulation.mutate", description="Are small defects found?")
    parser.add_argument("--count", type=int, default=80, help="how many (default 80)")
    parser.add_argument("--seed", type=int, default=1, help="which (default 1)")
    parser.add_argument("--whole", default="", metavar="END", help="all mutants of the files whose path ends so")
    parser.add_argument("--seeds", type=int, default=300, help="seeds of the simulation for each (default 300)")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time (default 1)")
    parser.add_argument(
        "--results", type=Path, default=ROOT / "build" / "mutants.jsonl", help="where verdicts are kept"
    )
    parser.add_argument("--no-tests", action="store_true", help="only the simulation; what it lets pass is tried again")
    parser.add_argument("--list", action="store_true", help="only show them")
    args = parser.parse_args()
    mutants = candidates(args.whole)
    if not args.whole:
        mutants = drawn(mutants, args.count, args.seed)
    if args.list:
        print(*mutants, sep="\n")
        return 0
    return _judge(mutants, args)


def _judge(mutants: list[Mutant], args: argparse.Namespace) -> int:
    tree_digest, known, why = digest(), _kept(args.results), equivalents()
    verdicts: dict[Mutant, tuple[str, str]] = {}
    for mutant in mutants:
        place = (mutant.path, mutant.old.strip(), mutant.new.strip())
        found = known.get(place)
        if place in why:
            verdicts[mutant] = "equivalent", why[place]
        elif found and (found["by"] in FOUND or (found["by"] == "nobody" and found["tree"] == tree_digest)):
            verdicts[mutant] = found["by"], found["how"]
    left = [mutant for mutant in mutants if mutant not in verdicts]
    print(f"{len(mutants)} mutants, {len(left)} of them to be tried", flush=True)
    trees: SimpleQueue[Tree] = SimpleQueue()
    made = [Tree(args.seeds, has_tests=not args.no_tests) for _ in range(min(args.jobs, len(left)))]
    for tree in made:
        trees.put(tree)
    args.results.parent.mkdir(parents=True, exist_ok=True)

    def judged(mutant: Mutant) -> tuple[Mutant, tuple[str, str]]:
        tree = trees.get()
        try:
            return mutant, tree.judged(mutant)
        finally:
            trees.put(tree)

    try:
        areas = sorted({_area(mutant.path) for mutant in left})
        for by, how in (ask() for ask in [partial(made[0].asked, ""), *(partial(made[0].tested, a) for a in areas)]):
            if by in FOUND:
                print(f"nothing is changed, and {by} finds: {how}")
                return 2
        with ThreadPoolExecutor(args.jobs) as pool, args.results.open("a", encoding="utf-8") as file:
            for mutant, (by, how) in pool.map(judged, left):
                verdicts[mutant] = by, how
                print(f"{by}: {mutant}\n    {how}", flush=True)
                file.write(json.dumps(asdict(mutant) | {"by": by, "how": how, "tree": tree_digest}) + "\n")
                file.flush()
    finally:
        for tree in made:
            tree.remove()
    survivors = [mutant for mutant, (by, _) in verdicts.items() if by in ("nobody", "unasked")]
    counts = {by: sum(its == by for its, _ in verdicts.values()) for by in (*FOUND, "equivalent")}
    print(
        ", ".join(f"{by} {count}" for by, count in counts.items()) + f", survivors {len(survivors)} of {len(mutants)}"
    )
    for mutant in survivors:
        print(f"survived: {mutant}")
    return 1 if survivors else 0


def _area(path: str) -> str:
    """What :data:`TESTS` knows the file by; a file of it, for the others."""
    return next(begin or "rlbuffer/store" for begin in TESTS if path.startswith(begin))


def _kept(results: Path) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Verdicts of before; of several for one mutant the last."""
    if not results.exists():
        return {}
    found = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    return {(item["path"], item["old"].strip(), item["new"].strip()): item for item in found}


if __name__ == "__main__":
    sys.exit(main())
