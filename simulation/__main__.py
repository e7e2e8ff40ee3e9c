"""``python -m simulation``: many seeds, or one again."""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from simulation import NOT_MODELLED
from simulation.branches import Branch, branches
from simulation.draws import draw
from simulation.mutations import MUTATIONS, mutation
from simulation.world import LAST_EVENTS, Result, World

SUMMARY_EVERY = 10_000
"""Seeds after which a long run says where it is."""
SEEDS_PER_PROCESS = 1000
ENTER_ALL = 2000
"""Seeds from 0 on after which a branch of the Lua files that none has entered is a failure."""
RARE = 5
"""A branch that fewer seeds than these enter is named: what is met by luck alone is lost by the next change."""
COLLECT_EVERY = 200
"""Seeds after which a process collects garbage: about 250 MB of it."""


def run_seed(seed: int, *, broken: str = "", rollback: bool = False, keep_log: int = LAST_EVENTS) -> Result:
    """Simulates one seed."""
    plan = draw(seed, mutation=mutation(broken) if broken else None, rollback=rollback)
    return World(plan, keep_log=keep_log).simulate()


def replay_command(seed: int, broken: str = "", rollback: bool = False) -> str:
    """The command that shows a seed again."""
    options = f"{f' --mutation {broken}' if broken else ''}{' --rollback' * rollback}"
    return f"python -m simulation --seed {seed}{options} -v"


def show(result: Result, command: str) -> None:
    """A violation, for people."""
    print(f"\nseed {result.seed} violates an invariant at event {result.event}, {result.seconds:.3f} s:")
    print(f"  {result.violation}\n  {result.plan}\nThe last events:")
    for line in result.log:
        print(f"  {line}")
    print(f"Again, event by event:  {command}", flush=True)


def _ready() -> None:
    """A process of the pool collects garbage between seeds; within one there is little, and looking is a twentieth."""
    gc.collect()
    gc.freeze()
    gc.disable()


def _job(values: tuple[int, str, bool]) -> Result:
    seed, broken, rollback = values
    result = run_seed(seed, broken=broken, rollback=rollback)
    if seed % COLLECT_EVERY == 0:
        gc.collect()
    return result if result.violation else replace(result, log=())


def main() -> int:
    """Runs what the command line asks for. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m simulation", description="The protocol under faults.")
    parser.add_argument("--seeds", type=int, default=500, help="how many seeds (default 500)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--seed", type=int, help="one seed only")
    parser.add_argument("--only", default="", help="these seeds, with commas between them")
    parser.add_argument(
        "--jobs", "--processes", type=int, default=os.cpu_count(), help="processes (default: one per core)"
    )
    parser.add_argument("--mutation", default="", choices=["", *(m.name for m in MUTATIONS)], help="break a Lua file")
    parser.add_argument("--rollback", action="store_true", help="the server loses acknowledged writes")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at the first violation")
    parser.add_argument("-v", "--verbose", action="store_true", help="with --seed: every event")
    args = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":
        # The order of sets of strings must be the same in every replay.
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "simulation", *sys.argv[1:]])
    if args.seed is not None:
        keep = 10**6 if args.verbose else LAST_EVENTS
        result = run_seed(args.seed, broken=args.mutation, rollback=args.rollback, keep_log=keep)
        if args.verbose and not result.violation:
            print("\n".join(result.log))
        if result.violation:
            show(result, replay_command(args.seed, args.mutation, args.rollback))
            return 1
        print(f"seed {args.seed}: {result.plan}\n{result.event} events, {result.steps} steps, no violation")
        return 0
    return _many(args)


def _many(args: argparse.Namespace) -> int:
    seeds = [int(seed) for seed in args.only.split(",") if seed] or range(args.first, args.first + args.seeds)
    jobs = [(seed, args.mutation, args.rollback) for seed in seeds]
    tally = Tally()
    for result in _results(jobs, args.jobs):
        tally.add(result)
        if result.violation:
            show(result, replay_command(result.seed, args.mutation, args.rollback))
            if not args.keep_going:
                break
        if tally.seeds % SUMMARY_EVERY == 0 and tally.seeds < args.seeds:
            print(tally, flush=True)
    print(tally)
    print(tally.branches())
    print("left out:", *NOT_MODELLED, sep="\n  ")
    # The same seeds enter the same branches every time: what these do not enter, no run of them looks at.
    is_whole = not (args.first or args.only or args.mutation or args.rollback) and args.seeds >= ENTER_ALL
    return 1 if tally.failed or (is_whole and tally.missed()) else 0


def _results(jobs: Sequence[tuple[int, str, bool]], processes: int) -> Iterator[Result]:
    """The results of the seeds, as they end; one process is this one."""
    if processes == 1:
        _ready()
        yield from map(_job, jobs)
        return
    with multiprocessing.Pool(processes, _ready, maxtasksperchild=SEEDS_PER_PROCESS) as pool:
        yield from pool.imap_unordered(_job, jobs, chunksize=4)
        pool.close()
        pool.join()


class Tally:
    """The sums over many seeds."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.seeds = self.events = self.calls = self.steps = 0
        self.failed: list[int] = []
        self.entered: Counter[int] = Counter()
        """Branch -> seeds that entered it."""

    def add(self, result: Result) -> None:
        """Counts a seed."""
        self.seeds += 1
        self.events += result.event
        self.calls += result.calls
        self.steps += result.steps
        self.entered.update(result.branches)
        if result.violation:
            self.failed.append(result.seed)

    def missed(self) -> list[Branch]:
        """Branches of the Lua files that no seed has entered."""
        return [branch for number, branch in enumerate(branches()) if number not in self.entered]

    def branches(self) -> str:
        """The number of branches of the Lua files that were entered, and those that no seed or few seeds entered."""
        missed, all_of_them = self.missed(), branches()
        lines = [f"{len(all_of_them) - len(missed)}/{len(all_of_them)} branches of the Lua files entered"]
        lines += [f"not entered: {branch}" for branch in missed]
        fewest = sorted((seeds, number) for number, seeds in self.entered.items() if seeds < RARE)
        rare = fewest if self.seeds >= ENTER_ALL else []
        return "\n  ".join(lines + [f"by {seeds} of the seeds: {all_of_them[number]}" for seeds, number in rare])

    def __str__(self) -> str:
        seconds = time.monotonic() - self.began
        # The counts are of processes that have ended only: the last thousand seeds may be missing.
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        cpu = sum(its.ru_utime + its.ru_stime for its in used)
        failed = f" {sorted(self.failed)[:20]}" if self.failed else ""
        return (
            f"{self.seeds} seeds, {self.events} events, {self.calls} round trips, {self.steps} steps in "
            f"{seconds:.1f} s ({self.seeds / seconds:.1f} seeds/s, {cpu:.0f} s of CPU): "
            f"{len(self.failed)} violations{failed}"
        )


if __name__ == "__main__":
    sys.exit(main())
