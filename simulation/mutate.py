"""``python -m simulation.mutate [SCRIPT ...]``: are small defects of the Lua files found? Each is made by rule.

One word of a script changes at a time: a comparison at its border or turned round, a number that is one more, the other
truth value, ``and`` for ``or``, a plus for a minus. The simulation runs its first seeds with it and ends at the first
violation. What all of them let pass is listed, and the exit code is 1: it changes nothing that matters, or a check is
missing here. Defects that were chosen by hand are in :mod:`simulation.mutations`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
from collections.abc import Iterator
from dataclasses import replace

from simulation.branches import sources, tokens
from simulation.draws import draw
from simulation.mutations import Mutation
from simulation.world import World

OTHERS = {"==": "~=", "~=": "==", "<": "<=", "<=": "<", ">": ">=", ">=": ">", "and": "or", "or": "and"}
OTHERS |= {"true": "false", "false": "true", "+": "-", "-": "+", "min": "max", "max": "min"}
LIMIT_SECONDS = 300.0
"""A defect with which the seeds take longer loops for ever, and counts as found."""


def mutants(script: str) -> Iterator[Mutation]:
    """All of a script; the name of each has the line and the change."""
    text = sources()[script]
    for token in tokens(text):
        other = str(int(token.text) + 1) if token.text.isdigit() else OTHERS.get(token.text)
        if other is not None and token.kind != "string":
            line = text.count("\n", 0, token.start) + 1
            name = f"{script}.lua:{line}: {text.splitlines()[line - 1].strip()}\n    {token.text} -> {other}"
            yield Mutation(name=name, script=script, old=text, new=text[: token.start] + other + text[token.end :])


def is_found(mutation: Mutation, seeds: int) -> bool:
    """Whether one of the first seeds violates an invariant with it. The seeds run in a process of their own."""

    def look() -> None:
        found = any(World(replace(draw(s), mutation=mutation)).simulate().violation for s in range(seeds))
        os._exit(int(found))

    process = multiprocessing.get_context("fork").Process(target=look)
    process.start()
    process.join(LIMIT_SECONDS)
    process.kill()
    process.join()
    return process.exitcode != 0


def main() -> int:
    """Runs what the command line asks for. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m simulation.mutate", description="Are small defects found?")
    parser.add_argument("scripts", nargs="*", metavar="SCRIPT", help="Lua files to change, as `commit` (default: all)")
    parser.add_argument("--count", type=int, default=80, help="how many of their defects (default 80)")
    parser.add_argument("--seed", type=int, default=1, help="draws which (default 1)")
    parser.add_argument("--seeds", type=int, default=100, help="seeds that look for each (default 100)")
    args = parser.parse_args()
    made = [mutation for script in args.scripts or sources() for mutation in mutants(script)]
    chosen = random.Random(args.seed).sample(made, min(args.count, len(made)))
    passed = [mutation for mutation in chosen if not is_found(mutation, args.seeds)]
    for mutation in passed:
        print(f"not found: {mutation.name}")
    print(f"{len(chosen) - len(passed)} of {len(chosen)} are found")
    return 1 if passed else 0


if __name__ == "__main__":
    sys.exit(main())
