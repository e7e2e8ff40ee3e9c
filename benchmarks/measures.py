"""``python -m benchmarks.measures [--functions] [--tree FOLDER]``: how much of this project a reader must hold at once.

Three moves of a run on ``memory://`` are made under a profiler, and the distinct functions of ours that each enters are
counted, with their files: a push of one group, the leader's turn that commits two groups, a pull of their step.
A comprehension is no function here. Then the sources are counted: tokens (names, operators, numbers, strings) by
`tokenize`, words that mean several things by `ast`. ``--functions`` prints the functions in the order in which they are
entered. ``--tree`` measures another checkout, under the environment that this one runs in.

Nothing here is timed.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
import threading
import tokenize
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TypeVar

T = TypeVar("T")
HOME = Path(__file__).parents[1]
PRODUCT = ("rlbuffer", "cli/rlbuffer_cli")
NEW_ROOMS = ("gateway", "doors")
"""Rooms of `rlbuffer/` that are younger than the aim for the rest."""
TOKENS = frozenset({tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING})
FUNCTIONS, VARIABLES = ("look", "say", "settle"), ("its", "said", "own", "known")
"""Words that say too little."""
DEADLINE_SECONDS = 60
"""For all steps."""


class Passed:
    """The functions of ours that a move enters: in its thread, and in threads that it starts."""

    def __init__(self) -> None:
        self._moves: list[dict[CodeType, None]] = []

    def during(self, move: Callable[[], T]) -> T:
        entered: dict[CodeType, None] = {}

        def enter(frame: FrameType, event: str, _: Any) -> None:
            if event == "call" and _is_ours(frame.f_code):
                entered[frame.f_code] = None

        sys.setprofile(enter)
        threading.setprofile(enter)
        try:
            return move()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
            self._moves.append(entered)

    @property
    def last(self) -> list[str]:
        """The functions of the newest move, in the order in which they were entered first: file, then name."""
        return [f"{Path(code.co_filename).relative_to(Path.cwd())} {code.co_qualname}" for code in self._moves[-1]]


def _is_ours(code: CodeType) -> bool:
    ours = code.co_filename.startswith(str(Path.cwd() / "rlbuffer"))
    return ours and (not code.co_name.startswith("<") or code.co_name == "<lambda>")


def moves() -> dict[str, list[str]]:
    """Name of a move -> the functions that it passes, as `Passed.last` has them."""
    import rlbuffer
    from rlbuffer.client.buffer import Buffer
    from rlbuffer.daemon import Daemon
    from rlbuffer.daemon.leadership import Leadership
    from rlbuffer.process.logs import heard
    from rlbuffer.testing import make_group

    passed, found = Passed(), dict[str, list[str]]()
    config = rlbuffer.BatcherConfig(row_tokens=4096, step_groups=2, lookahead=8)
    stop, turn = threading.Event(), Leadership.turn
    buffer: Buffer = rlbuffer.connect(f"memory://{uuid.uuid4().hex}", run="measured")

    groups = [make_group(env="math", rewards=[0.0, 1.0], group_id=f"g{number}") for number in range(4)]

    def push(*numbers: int) -> None:
        for number in numbers:
            writer.push(groups[number])

    def hear(line: dict[str, Any]) -> None:
        if line["event"] == "step":
            steps.append(line["step"])

    def measured(leadership: Leadership) -> None:
        """A turn; the last of those that commit is kept."""
        before = len(steps)
        passed.during(lambda: turn(leadership))
        if len(steps) > before:
            found["the leader's second turn that commits two groups"] = passed.last
        if len(steps) == 2:
            stop.set()
        elif len(steps) == 1 and len(steps) > before:
            push(2, 3)

    steps: list[int] = []
    deadline = threading.Timer(DEADLINE_SECONDS, stop.set)
    with buffer:
        writer = buffer.writer("measures")
        reader = buffer.reader(rank=0, world_size=1)
        Daemon(buffer, config)._store.open_run()
        reader.start(resume_step=0)
        reader.announce(rlbuffer.PolicyVersion(version=0))
        push(0)
        passed.during(lambda: push(1))
        found["the second push of a writer, one group"] = passed.last
        Leadership.turn = measured  # type: ignore[assignment, method-assign]
        try:
            deadline.start()
            with heard("rlbuffer.daemon", hear):
                Daemon(buffer, config).run(stop)
        finally:
            deadline.cancel()
            Leadership.turn = turn  # type: ignore[method-assign]
        if len(steps) < 2:
            raise RuntimeError(f"no step within {DEADLINE_SECONDS} s")
        passed.during(lambda: reader.pull(1))
        found["the first pull of a reader, one step"] = passed.last
        reader.close()
    return found


def sources(rooms: Sequence[str] = PRODUCT) -> Iterator[Path]:
    for room in rooms:
        yield from sorted(Path(room).rglob("*.py"))


def sizes(paths: Sequence[Path]) -> tuple[int, int]:
    """-> tokens, and lines that hold one: no comment, no docstring, no blank."""
    tokens, lines = 0, 0
    for path in paths:
        with path.open("rb") as file:
            kept = [token for token in tokenize.tokenize(file.readline) if token.type in TOKENS]
        docstrings = {
            node.lineno
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        }
        tokens += len(kept)
        lines += len(
            {
                line
                for token in kept
                if token.start[0] not in docstrings
                for line in range(token.start[0], token.end[0] + 1)
            }
        )
    return tokens, lines


def words(paths: Sequence[Path]) -> tuple[dict[str, list[str]], Counter[str], Counter[str]]:
    """-> class names of several rooms and where they are; functions and variables (names that are assigned, arguments)
    that are called by one of the words."""
    classes, functions, variables = defaultdict[str, list[str]](list), Counter[str](), Counter[str]()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.ClassDef(name=name) if not name.startswith("_"):
                    classes[name].append(str(path))
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) if name.lstrip("_") in FUNCTIONS:
                    functions[name.lstrip("_")] += 1
                case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) if name in VARIABLES:
                    variables[name] += 1
    several = {name: places for name, places in classes.items() if len({_room(place) for place in places}) > 1}
    return several, functions, variables


def _room(path: str) -> str:
    return "/".join(Path(path).parts[:2])


def show(name: str, value: str) -> None:
    print(f"{name:<48}  {value}")


def main(argv: Sequence[str]) -> int:
    options = argparse.ArgumentParser(prog="python -m benchmarks.measures", description=__doc__)
    options.add_argument("--functions", action="store_true", help="print the functions of each move")
    options.add_argument("--tree", type=Path, help="another checkout; this one by default")
    chosen = options.parse_args(argv)
    tree = (chosen.tree or HOME).absolute()
    if tree != Path.cwd() or os.environ.get("PYTHONPATH", "").split(os.pathsep)[0] != str(tree):
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tree), str(tree / "cli")])}
        rest = ["--functions"] if chosen.functions else []
        return subprocess.run(
            [sys.executable, __file__, *rest, "--tree", str(tree)], cwd=tree, env=environment
        ).returncode

    for move, functions in moves().items():
        files = {function.partition(" ")[0] for function in functions}
        show(move, f"{len(functions)} functions in {len(files)} files")
        if chosen.functions:
            print(*(f"    {function}" for function in functions), sep="\n")
    paths = list(sources())
    new = [path for path in paths if path.parts[1] in NEW_ROOMS]
    tokens, lines = sizes(paths)
    show("tokens of the product", f"{tokens:,} in {len(paths)} files, {tokens / lines:.2f} a code line")
    new_tokens = sizes(new)[0]
    show(f"of them in {', '.join(NEW_ROOMS)}", f"{new_tokens:,}; {tokens - new_tokens:,} without them")
    several, functions_called, variables = words(paths)
    show("class names of several rooms", f"{len(several)}: {', '.join(sorted(several))}")
    show("functions by names that say little", ", ".join(f"{word} {functions_called[word]}" for word in FUNCTIONS))
    show("variables by names that say little", ", ".join(f"{word} {variables[word]}" for word in VARIABLES))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
