"""``python -m simulation.mutate``: are small defects found? Mechanical ones (:mod:`simulation.mutants`), one at a time.

Each is put into a copy of the tree; there the simulation runs seeds that run the changed line
(:mod:`simulation.entered`) and ends at the first violation. A mutant that it lets pass goes to a named set of tests;
one that fails must pass on the tree as it is. A mutant that both let pass is listed, unless :data:`EQUIVALENT` says why
it changes nothing that matters.

    python -m simulation.mutate --count 80 --seed 1     # drawn; half of them in Lua
    python -m simulation.mutate --count 200 --of void.lua,commit.lua    # drawn from the files whose paths end so
    python -m simulation.mutate --whole lease.lua       # all of the files whose paths end so
    make mutations

Verdicts are kept in a file as they come, so a run that was stopped goes on. A mutant that was found stays found; a
survivor is tried again once any file of the tree has changed. Work is bounded by seeds and events
(:mod:`simulation.world`); the limit of processor time below is for a defect that loops without waiting for anything,
which counts as found.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from simulation.entered import Entered, entered, replayable
from simulation.mutants import Mutant, lua_mutants, python_mutants

ROOT = Path(__file__).parents[1]
EQUIVALENT = Path(__file__).with_name("equivalent.toml")
"""Mutants that nothing can find, each with the reason."""
RESULTS = ROOT / "build" / "mutants.jsonl"
SOUND_SEEDS = 100
"""Seeds that must find nothing while nothing is changed."""
CPU_SECONDS = 600
TEST_SECONDS = 60
FOUND = ("simulation", "tests")
"""Suites that may find a mutant."""
COPIED = ("rlbuffer", "simulation", "tests", "cli", "deploy", "docs", "pyproject.toml", "README.md", "rlbuffer.toml")
MUTATED = (
    "store",
    "daemon",
    "batcher",
    "client/writer.py",
    "client/reader.py",
    "client/step_pull.py",
    "process/heartbeat.py",
)
"""Paths in rlbuffer; of the Python files only the lines that the simulation runs."""


def in_room(test: str) -> str:
    """`test`, "<room>/<subject>", as a path from the root."""
    room, subject = test.split("/")
    return f"tests/integration/{room}/test_{subject}.py"


SCRIPTS = {
    "announce": ("store/control_moves", "weights/version_lines", "store/attempts", "whole/recovery"),
    "ask": ("store/control_moves", "daemon/drain", "daemon/config_revisions"),
    "attempt": ("weights/version_lines", "store/attempts", "whole/recovery"),
    "commit": ("store/steps", "store/reuse", "store/lease"),
    "done": ("daemon/finite_sources", "weights/version_lines"),
    "drop": ("daemon/operator_drop", "store/steps", "store/reuse", "whole/hostile_writes"),
    "keep": ("store/control_moves", "store/lease", "daemon/finite_sources"),
    "lease": (
        "store/lease",
        "daemon/config_revisions",
        "daemon/finite_sources",
        "whole/shifted_clock",
    ),
    "open": ("store/push", "whole/hostile_writes"),
    "push": ("store/push", "store/replace", "client/push_limits", "client/writer"),
    "recover": ("store/control_moves", "store/store_errors", "whole/recovery", "store/reuse"),
    "report": ("store/attempts", "weights/version_lines", "whole/recovery"),
    "retire": ("store/control_moves", "store/lease", "store/steps", "store/attempts"),
    "telemetry": ("whole/strange_values", "store/views"),
    "ticket": ("store/lease", "daemon/ticket_order", "daemon/finite_sources"),
    "void": ("store/control_moves", "weights/version_lines", "whole/recovery"),
}
"""Script -> what tests/integration holds of it, by room, those that find most first."""
TESTS = {
    **{f"rlbuffer/store/scripts/{script}.lua": tuple(map(in_room, names)) for script, names in SCRIPTS.items()},
    "rlbuffer/batcher/batcher.py": ("tests/unit/test_b*.py", "tests/unit/test_adapters.py", "tests/unit/test_pool.py"),
    "rlbuffer/batcher": ("tests/unit/test_[abgops]*.py", "tests/unit/test_f*.py"),
    "rlbuffer/daemon": (
        "tests/unit/test_memory_policy.py",
        "tests/unit/test_env_stats.py",
        "tests/unit/test_garbage_collection.py",
        "tests/integration/daemon/test_daemon_troubles.py",
        "tests/integration/daemon/test_doubts.py",
        "tests/integration/daemon/test_config_revisions.py",
        "tests/integration/daemon/test_drain.py",
        "tests/integration/daemon/test_env_pause.py",
        "tests/integration/store/test_reuse.py",
        "tests/integration/whole/test_recovery.py",
    ),
    "rlbuffer/client/writer.py": (
        "tests/integration/client/test_writer.py",
        "tests/integration/whole/test_whole_loop.py",
    ),
    "rlbuffer/client/reader.py": (
        "tests/integration/client/test_reader_troubles.py",
        "tests/integration/whole/test_recovery.py",
    ),
    "rlbuffer/process/heartbeat.py": ("tests/unit/test_pulse.py",),
    "rlbuffer/store/verify/keys.py": ("tests/integration/whole/test_hostile_writes.py",),
    "rlbuffer/store/producer.py": (
        "tests/integration/store/test_push.py",
        "tests/integration/client/test_push_many.py",
        "tests/integration/whole/test_clusters.py",
    ),
    "rlbuffer/store/operator.py": tuple(map(in_room, SCRIPTS["void"])),
    "rlbuffer/store/server/answers.py": (
        "tests/integration/store/test_foreign_answers.py",
        "tests/integration/store/test_passwords.py",
    ),
    "": (
        "tests/unit/test_store_format.py",
        "tests/integration/store/test_*.py",
        "tests/integration/whole/test_recovery.py",
    ),
}
"""Path of what is changed, or how it begins -> the quick tests that are asked when the simulation has found nothing."""


def files(ends: str = "") -> list[str]:
    """Files that are changed, from the root; with `ends`, those whose paths end so."""
    folder = ROOT / "rlbuffer"
    paths = [path for name in MUTATED for path in (folder.glob(f"{name}/**/*") if "." not in name else [folder / name])]
    names = sorted(str(file.relative_to(ROOT)) for file in paths if file.suffix in (".lua", ".py"))
    return [name for name in names if name.endswith(tuple(ends.split(",")))]


def candidates(ends: str, seen: Entered) -> list[Mutant]:
    """All mutants; with `ends`, of the files whose paths end so."""
    made = []
    for file in files(ends):
        text = (ROOT / file).read_text(encoding="utf-8")
        made += lua_mutants(file, text) if file.endswith(".lua") else python_mutants(file, text, seen.lines(file))
    return made


def drawn(mutants: list[Mutant], count: int, seed: int) -> list[Mutant]:
    """`count` of them, half in Lua, as many of each operator as there are: numbers to change are many.

    Each has a place of its own in the order of a seed, so that a changed file changes few of those that are drawn.
    """

    def place(mutant: Mutant) -> bytes:
        text = f"{seed} {mutant.path} {mutant.old.strip()} {mutant.new.strip()}"
        return hashlib.sha256(text.encode()).digest()

    halves = []
    for is_lua in (True, False):
        by_operator: dict[str, list[Mutant]] = {}
        for mutant in sorted(mutants, key=place):
            if mutant.path.endswith(".lua") == is_lua:
                by_operator.setdefault(mutant.operator, []).append(mutant)
        turns = zip_longest(*(by_operator[name] for name in sorted(by_operator)))
        halves.append([mutant for turn in turns for mutant in turn if mutant is not None])
    lua, rest = halves
    half = max(count // 2, count - len(rest))
    return lua[:half] + rest[: count - min(half, len(lua))]


def tests_of(path: str) -> list[str]:
    """The named tests for a file."""
    patterns = next(names for begin, names in TESTS.items() if path.startswith(begin))
    paths = [str(file.relative_to(ROOT)) for pattern in patterns for file in sorted(ROOT.glob(pattern))]
    return list(dict.fromkeys(paths))


class Tree:
    """A copy of what runs, with one line changed at a time."""

    def __init__(self, seen: Entered, seeds: int, *, has_tests: bool) -> None:
        self._seen = seen
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
        """Returns the finder (``simulation``, ``tests``, or ``nobody``), and its finding."""
        file = self._folder / mutant.path
        text = file.read_text(encoding="utf-8")
        self._write(file, mutant.applied(text))
        try:
            if violated := self.simulated(self._seen.seeds(mutant.path, mutant.line)[: self._seeds]):
                return "simulation", violated
            if not self._has_tests:
                return "unasked", ""
            code, line = self._tested(tests_of(mutant.path))
        finally:
            self._write(file, text)
        if not code:
            return "nobody", ""
        test = re.match(r"(?:FAILED|ERROR) (.+?)(?: - |$)", line)  # what it was called with may hold spaces
        if test is not None and self._tested([test[1]])[0]:
            raise RuntimeError(f"nothing is changed, and a test fails: {line}")
        return "tests", line

    def _write(self, file: Path, text: str) -> None:
        """Compiled files differ by second and size alone: the one of another text goes."""
        file.write_text(text, encoding="utf-8")
        for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*"):
            compiled.unlink()

    def simulated(self, seeds: Sequence[int]) -> str:
        """The violation in the first of these seeds that has one; "" for nothing."""
        code, out = self._run("-m", "simulation", "--only", ",".join(map(str, seeds)), "--jobs", "1")
        return _first_line(out, code) if code else ""

    def _tested(self, tests: Sequence[str]) -> tuple[int, str]:
        options = ("-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--timeout", str(TEST_SECONDS))
        code, out = self._run("-m", "pytest", *options, *tests)
        return code, _first_line(out, code) if code else ""

    def _run(self, *command: str) -> tuple[int, str]:
        path = os.pathsep.join(map(str, (self._folder, self._folder / "cli")))
        done = subprocess.run(
            [sys.executable, *command],
            cwd=self._folder,
            # Processes that a test starts elsewhere import the changed copy, too.
            env=os.environ | {"PYTHONPATH": path, "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": ""},
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
    """Digest of the files that a verdict depends on."""
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
    """Runs what the command line asks for. Returns the exit code: 1 when something survived."""
    parser = argparse.ArgumentParser(prog="python -m simulation.mutate", description="Are small defects found?")
    parser.add_argument("--count", type=int, default=80, help="how many (default 80)")
    parser.add_argument("--seed", type=int, default=1, help="which (default 1)")
    parser.add_argument("--of", default="", metavar="END,...", help="draw them from the files whose paths end so")
    parser.add_argument("--whole", default="", metavar="END,...", help="all mutants of the files whose paths end so")
    parser.add_argument("--seeds", type=int, default=150, help="at most so many seeds for each (default 150)")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time (default 1)")
    parser.add_argument(
        "--results", type=Path, default=ROOT / "build" / "mutants.jsonl", help="where verdicts are kept"
    )
    parser.add_argument("--no-tests", action="store_true", help="only the simulation; what it lets pass is tried again")
    parser.add_argument("--list", action="store_true", help="only show them")
    args = parser.parse_args()
    replayable()
    kept = args.results.with_name("entered.json")
    seen = entered(files(), ROOT, processes=args.jobs, kept=kept, digest=digest())
    mutants = candidates(args.whole or args.of, seen)
    if not args.whole:
        mutants = drawn(mutants, args.count, args.seed)
    if args.list:
        print(*mutants, sep="\n")
        return 0
    return _judge(mutants, seen, args)


def _judge(mutants: list[Mutant], seen: Entered, args: argparse.Namespace) -> int:
    tree_digest, known, why = digest(), _kept(args.results), equivalents()
    verdicts: dict[Mutant, tuple[str, str]] = {}
    for mutant in mutants:
        place = (mutant.path, mutant.old.strip(), mutant.new.strip())
        verdict = known.get(place)
        if place in why:
            verdicts[mutant] = "equivalent", why[place]
        elif verdict and (verdict["by"] in FOUND or (verdict["by"] == "nobody" and verdict["tree"] == tree_digest)):
            verdicts[mutant] = verdict["by"], verdict["how"]
    left = [mutant for mutant in mutants if mutant not in verdicts]
    print(f"{len(mutants)} mutants, {len(left)} of them to be tried", flush=True)
    trees: SimpleQueue[Tree] = SimpleQueue()
    made = [Tree(seen, args.seeds, has_tests=not args.no_tests) for _ in range(min(args.jobs, len(left)))]
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
        if made and (violated := made[0].simulated(range(SOUND_SEEDS))):
            print(f"nothing is changed, and the simulation finds: {violated}")
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


def _kept(results: Path) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Verdicts of before; of several for one mutant the last."""
    if not results.exists():
        return {}
    records = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    return {(item["path"], item["old"].strip(), item["new"].strip()): item for item in records}


if __name__ == "__main__":
    sys.exit(main())
