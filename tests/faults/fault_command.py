"""The command ``python tests/faults``."""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from disk_runs import run_full_disks
from door_runs import run_doors
from failover_runs import run_failovers
from gateway_runs import run_gateways
from homes import Home
from hostile_runs import run_hostile
from kill_runs import run_kills
from loss_runs import EXAMPLES, run_losses
from network_runs import run_network
from outcome import Outcome, Say
from places import EMBEDDED
from takeover_runs import ALLOWED_SECONDS, run_takeovers
from torn_runs import SERVERS, programs, run_torn
from watched import MISSING
from weight_kills import run_weight_kills
from worker_kills import run_worker_kills

RUNS = ("kills", "network", "takeovers", "failovers", "disks", "torn", "hostile", "losses", "workers", "weights")
"""In the order in which they run. `doors` needs TRL, `gateway` the clients of OpenAI and Anthropic: they run where they
are named, in the environment of `make adapters-test`."""
DOORS, GATEWAY = "doors", "gateway"
PLACED = RUNS[:4]
"""Those that run on other servers, too."""
NOT_COVERED = """What this does not cover: power loss (tests/e2e/test_rolled_back_server.py puts an old append-only file
back), a shifted clock (tests/integration), flipped bytes (tests/e2e/test_damaged_payloads.py), more than one machine,
faults of the ranks' own exchanges (gloo), `max_uses` above 1, a worker's login that fills the server's memory, a
scorer's login in hostile hands, a cluster that grows or shrinks."""


def main() -> int:
    """Runs what the command line asks for. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python tests/faults", description="Real processes under faults.")
    parser.add_argument("runs", nargs="*", metavar="RUN", help=f"{', '.join(RUNS)} (default: all of them)")
    parser.add_argument("--seed", type=int, default=int(time.time()) % 10**6, help="of the order of faults")
    parser.add_argument("--kills", type=int, default=30, help="processes killed (default 30, at most 31)")
    parser.add_argument("--kill-steps", type=int, default=100, help="steps of the run that is killed (default 100)")
    parser.add_argument("--faults", type=int, default=200, help="network faults (default 200)")
    parser.add_argument("--pauses", type=int, default=12, help="processes halted among them (default 12)")
    parser.add_argument("--network-steps", type=int, default=150, help="steps of that run (default 150)")
    parser.add_argument("--takeovers", type=int, default=4, help="halts of the leading batcher (default 4)")
    parser.add_argument("--cuts", type=int, default=50, help="cuts of the append-only file per server (default 50)")
    parser.add_argument("--failovers", type=int, default=20, help="planned failovers (default 20)")
    parser.add_argument("--primary-kills", type=int, default=20, help="kills of the primary (default 20)")
    parser.add_argument("--failover-steps", type=int, default=200, help="steps of that run (default 200)")
    parser.add_argument("--sentinels", action="store_true", help=f"{', '.join(PLACED)}: under sentinels")
    parser.add_argument("--cluster", action="store_true", help="the same on a cluster of three shards with replicas")
    parser.add_argument("--slot-moves", type=int, default=2, help="moves of slots in its `failovers` (default 2)")
    parser.add_argument("--disks", type=int, default=3, help="times that the disk is full (default 3)")
    parser.add_argument("--full-seconds", type=float, default=90.0, help="how long it stays so (default 90)")
    parser.add_argument("--moves", type=int, default=60, help="hostile moves on control keys (default 60)")
    parser.add_argument("--pushes", type=int, default=20_000, help="hostile pushes (default 20000)")
    parser.add_argument(
        "--losses", type=int, default=30, help="losses of newest writes, over own trainers (default 30)"
    )
    parser.add_argument("--worker-kills", type=int, default=40, help="kills of a worker in a load (default 40)")
    parser.add_argument(
        "--weight-kills", type=int, default=30, help="kills of each of publisher, relay, worker (default 30)"
    )
    parser.add_argument("--door-kills", type=int, default=20, help="kills around a trainer of TRL's (default 20)")
    parser.add_argument("--rollouts", type=int, default=60, help="open rollouts, at least (default 60)")
    parser.add_argument("--agents", type=int, default=20, help="agents at once (default 20)")
    parser.add_argument("--window-kills", type=int, default=3, help="kills of a gateway in each window (default 3)")
    parser.add_argument("--keep", action="store_true", help="leave the homes with their logs")
    args = parser.parse_args()
    unknown = sorted(set(args.runs) - {*RUNS, DOORS, GATEWAY})
    if unknown:
        parser.error(f"no such run: {', '.join(unknown)}. There are {', '.join(RUNS)}, {DOORS}, {GATEWAY}")
    if args.sentinels and MISSING:
        parser.error(f"--sentinels needs {' and '.join(MISSING)} on PATH")
    if args.sentinels and args.cluster:
        parser.error("--sentinels and --cluster: one of them at a time")
    elsewhere = args.sentinels or args.cluster
    if elsewhere and (others := sorted(set(args.runs) - set(PLACED))):
        parser.error(f"{', '.join(others)}: on the embedded server alone")
    failed = False
    for name in args.runs or (PLACED if elsewhere else RUNS):
        print(f"{name}: again with  {again(name, args)}", flush=True)
        for outcome in run_one(name, args, lambda line: print(line, flush=True)):
            print("\n".join(outcome.lines()), flush=True)
            failed = failed or bool(outcome.findings)
    print(NOT_COVERED)
    print("FAILED" if failed else "ok: no finding")
    return int(failed)


def again(name: str, args: argparse.Namespace) -> str:
    """The command that makes a run again: the same faults in the same order, at about the same moments."""
    sizes = {
        "kills": f"--kills {args.kills} --kill-steps {args.kill_steps}",
        "network": f"--faults {args.faults} --pauses {args.pauses} --network-steps {args.network_steps}",
        "takeovers": f"--takeovers {args.takeovers}",
        "torn": f"--cuts {args.cuts}  (servers: those on PATH, and what {SERVERS} names)",
        "failovers": (
            f"--failovers {args.failovers} --primary-kills {args.primary_kills} --failover-steps {args.failover_steps}"
            f"{f' --slot-moves {args.slot_moves}' * args.cluster}"
        ),
    }
    sizes["disks"] = f"--disks {args.disks} --full-seconds {args.full_seconds:g}"
    sizes["losses"] = f"--losses {args.losses}"
    sizes[DOORS] = f"--door-kills {args.door_kills}"
    sizes[GATEWAY] = f"--rollouts {args.rollouts} --agents {args.agents} --window-kills {args.window_kills}"
    sizes["hostile"] = f"--moves {args.moves} --pushes {args.pushes}"
    sizes["workers"] = f"--worker-kills {args.worker_kills}"
    sizes["weights"] = f"--weight-kills {args.weight_kills}"
    where = f"{' --sentinels' * args.sentinels}{' --cluster' * args.cluster}"
    return f"python tests/faults {name}{where} --seed {args.seed} {sizes[name]}"


def run_one(name: str, args: argparse.Namespace, say: Say) -> Iterator[Outcome]:
    """One run in a home of its own; of the append-only file one on each server program."""
    path = Path(tempfile.mkdtemp(prefix="rlb-"))
    home = Home(path)
    place = "sentinels" if args.sentinels else "cluster" if args.cluster else EMBEDDED
    try:
        if name == "kills":
            yield run_kills(home, seed=args.seed, kills=args.kills, steps=args.kill_steps, say=say, place=place)
            return
        if name == "network":
            yield run_network(
                home,
                seed=args.seed,
                faults=args.faults,
                pauses=args.pauses,
                steps=args.network_steps,
                say=say,
                place=place,
            )
            return
        if name == DOORS:
            yield run_doors(home, seed=args.seed, kills=args.door_kills, say=say)
            return
        if name == GATEWAY:
            yield run_gateways(
                home,
                seed=args.seed,
                rollouts=args.rollouts,
                agents=args.agents,
                per_window=args.window_kills,
                leader_kills=2,
                server_kills=2,
                say=say,
            )
            return
        if name == "losses":
            for number, example in enumerate(EXAMPLES):
                losses = (args.losses + number) // len(EXAMPLES)
                (path / example).mkdir()
                yield run_losses(Home(path / example), example, seed=args.seed, losses=losses, say=say)
            return
        if name == "torn":
            for number, program in enumerate(programs()):
                yield run_torn(path / str(number), program=program, cuts=args.cuts, seed=args.seed, say=say)
            return
        if name == "failovers":
            yield run_failovers(
                home,
                seed=args.seed,
                failovers=args.failovers,
                kills=args.primary_kills,
                steps=args.failover_steps,
                say=say,
                place="pair" if place == EMBEDDED else place,
                slot_moves=args.slot_moves * args.cluster,
            )
            return
        if name == "disks":
            yield run_full_disks(home, rounds=args.disks, full_seconds=args.full_seconds, say=say)
            return
        if name == "hostile":
            yield run_hostile(home, moves=args.moves, pushes=args.pushes, seed=args.seed, say=say)
            return
        if name == "workers":
            yield run_worker_kills(home, seed=args.seed, kills=args.worker_kills, say=say)
            return
        if name == "weights":
            yield run_weight_kills(path, seed=args.seed, kills=args.weight_kills, say=say)
            return
        outcome = run_takeovers(home, rounds=args.takeovers, steps_between=3, say=say, place=place)
        late = [n for n in outcome.facts["takeover seconds"] if n > ALLOWED_SECONDS]
        if late:
            outcome.findings.append(f"allowed are {ALLOWED_SECONDS:g} s from halt to commit, it took {late}")
        yield outcome
    except pytest.fail.Exception as error:
        yield Outcome(name=name, findings=[str(error)])
    finally:
        home.stop()
        if args.keep:
            print(f"  kept: {path}", flush=True)
        else:
            shutil.rmtree(path, ignore_errors=True)
