"""A worker with vLLM in its process, a new version every few groups, and an engine that is killed at random moments.

``make vllm-faults`` calls it: forty kills, about twenty minutes. Exit code 0 when there was no finding, else 1.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
from vllm_server import ENGINE
from worker_run import WorkerRun

from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.worker.samplers.conformance import CONTEXT, policies

GROUPS_A_STEP = 2
"""Groups between two versions, as if each step trained so many."""
VERSIONS = 20_000
"""That can be announced; four different models take turns."""
WELL_SECONDS = 3.0
"""A kill strikes so long, at most, after the worker has gone on from the one before."""
LOAD_SHARE, LOAD_SECONDS = 0.5, 0.4
"""Share of the kills that strike so long, at most, after a version was announced: most of them a load."""
EARLY_SHARE, EARLY_SECONDS = 0.25, 15.0
"""Share of the kills that are followed by a further one, so long after it, at most: it strikes the next start."""
NOTICED_SECONDS = 30.0
"""Longest until a death is said. The sampler looks twice a second; this is for a machine that is busy with others."""
BOUND_SECONDS = 600.0
"""Longest until a group comes from the next engine: a start, which takes 10 s of CPU and more on a busy machine."""
IDLE_SECONDS = 120.0
"""Longest until a first group of the whole run, and until a version of it is loaded."""

Say = Callable[[str], None]


@dataclass(slots=True)
class Kill:
    """One kill, and its outcome."""

    struck: str = ""
    """State of the worker when it was struck, by its own words: a load, sampling, or a start of the engine."""
    noticed: float = 0.0
    """Seconds until it was said."""
    goes_on: float = 0.0
    """Seconds until a group of the next engine was pushed."""
    again: float = 0.0
    """Seconds after which the next start was struck, too; what follows counts from there. 0: it was not."""

    def __str__(self) -> str:
        more = f", and the next start {self.again:.1f} s later" if self.again else ""
        return f"{self.struck}{more}: said after {self.noticed:.1f} s, a group after {self.goes_on:.1f} s"


@dataclass(slots=True)
class Kills:
    """Findings and figures of a run."""

    findings: list[str] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """For people."""
        struck = Counter(kill.struck for kill in self.kills)
        again = sum(kill.again > 0 for kill in self.kills)
        lines = [", ".join(f"{count} x {what}" for what, count in sorted(struck.items())) + f"; {again} starts more"]
        for name in ("noticed", "goes_on"):
            seconds = sorted(getattr(kill, name) for kill in self.kills)
            lines.append(f"  {name}: median {seconds[len(seconds) // 2]:.1f} s, longest {seconds[-1]:.1f} s")
        lines += [f"  {name}: {value}" for name, value in self.facts.items()]
        return lines + ([f"  FINDING: {finding}" for finding in self.findings] or ["  no finding"])


class Training(WorkerRun):
    """A worker whose trainer makes a version of every few groups."""

    announced = 0

    def _note(self, event: dict[str, Any]) -> None:
        super()._note(event | {"at": time.monotonic()})
        if event["event"] == "group" and len(self.told("group")) % GROUPS_A_STEP == 0:
            self.announced += 1
            self.announce(self.announced)


class Engine:
    """The engine's own process, which is forked from this one: whatever it has of children that it had not before."""

    def __init__(self) -> None:
        self._known = {child.pid for child in psutil.Process().children()}

    def processes(self) -> list[psutil.Process]:
        """Also while it starts, before it has a name of its own."""
        return [child for child in psutil.Process().children() if child.pid not in self._known and _is_alive(child)]

    def kill(self) -> None:
        """SIGKILL."""
        for process in self.processes():
            os.kill(process.pid, signal.SIGKILL)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and "resource_tracker" not in " ".join(process.cmdline())
    except psutil.Error:
        return False


def run_engine_kills(folder: Path, *, seed: int, kills: int, say: Say) -> Kills:
    """Kills the engine's process `kills` times at random moments; the worker must go on each time."""
    draw, out = random.Random(f"engine kills {seed}"), Kills()
    models, published = policies(folder)
    versions: list[PolicyVersion] = [replace(published[v % 4], version=v) for v in range(VERSIONS)]
    began, engine = time.monotonic(), Engine()
    with Training("vllm", {**ENGINE, "max_model_len": CONTEXT}, versions) as run:
        run.until_groups(2 * GROUPS_A_STEP, seconds=BOUND_SECONDS, why="a first version's groups")
        files = psutil.Process().num_fds(), psutil.Process().num_threads()
        for number in range(1, kills + 1):
            time.sleep(draw.uniform(0.0, WELL_SECONDS))
            if draw.random() < LOAD_SHARE:
                announced = run.announced
                run.until(lambda before=announced: run.announced > before, seconds=IDLE_SECONDS, why="a version")
                time.sleep(draw.uniform(0.0, LOAD_SECONDS))
            kill = Kill()
            struck_at = _strike(run, engine, kill, draw.uniform(0.0, EARLY_SECONDS) * (draw.random() < EARLY_SHARE))
            say(f"  {struck_at - began:5.0f} s  kill {number}, at {_last(run, 'version')}")
            _goes_on(run, engine, kill, struck_at)
            out.kills.append(kill)
            say(f"           {kill}")
        loads = len(run.told("version"))
        run.until(lambda: len(run.told("version")) > loads, seconds=IDLE_SECONDS, why="another load")
        out.facts["open files and threads, first and last"] = (
            files,
            (psutil.Process().num_fds(), psutil.Process().num_threads()),
        )
        out.facts["versions loaded"] = len(run.told("version"))
        out.facts["groups"] = len(run.told("group"))
        run.stop()
        if run.raised:
            raise run.raised[0]
        crossed = run.compare([models[v % 4] for v in range(VERSIONS)])
        run.account()
    out.facts["rollouts that live through a load"] = sum(crossed.values())
    out.facts["seconds"] = round(time.monotonic() - began)
    for number, kill in enumerate(out.kills, 1):
        if kill.noticed > NOTICED_SECONDS:
            out.findings.append(f"kill {number} was said after {kill.noticed:.1f} s")
    return out


def _strike(run: Training, engine: Engine, kill: Kill, again: float) -> float:
    """Kills the engine, and the next one `again` seconds later unless that is 0. Returns the time of the last kill."""
    run.until(engine.processes, seconds=BOUND_SECONDS, why="an engine")
    struck_at = time.monotonic()
    engine.kill()
    if again:
        kill.struck, kill.noticed = _said(run, struck_at)
        time.sleep(max(0.0, struck_at + again - time.monotonic()))
        run.until(engine.processes, seconds=BOUND_SECONDS, why="the next engine")
        kill.again, struck_at = time.monotonic() - struck_at, time.monotonic()
        engine.kill()
    return struck_at


def _said(run: Training, struck_at: float) -> tuple[str, float]:
    """State of the worker when its engine was killed, by its own words, and after how many seconds it said so."""

    def said() -> list[dict[str, Any]]:
        return [event for event in run.told("trouble") if event["at"] > struck_at]

    run.until(said, seconds=BOUND_SECONDS, why="a word about the death")
    return _what(said()[0]["text"]), said()[0]["at"] - struck_at


def _goes_on(run: Training, engine: Engine, kill: Kill, struck_at: float) -> None:
    """Waits until the death of `struck_at` has been said and a group of the next engine is there.

    Where a start was struck, it was said already that the engine is away.
    """
    noticed = 0.0
    if not kill.again:
        kill.struck, kill.noticed = _said(run, struck_at)
        noticed = kill.noticed

    # A group that was finished when the engine died may still arrive: what counts comes after the word about it.
    def pushed() -> list[dict[str, Any]]:
        groups = [event for event in run.told("group") if event["at"] > struck_at + noticed]
        return groups if engine.processes() else []

    run.until(pushed, seconds=BOUND_SECONDS, why="a group of the next engine")
    kill.goes_on = pushed()[0]["at"] - struck_at


def _what(error: str) -> str:
    for words, what in (("while it loaded", "load"), ("has died", "sampling"), ("does not start", "start")):
        if words in error:
            return what
    return error


def _last(run: Training, kind: str) -> str:
    events = run.told(kind)
    return f"version {events[-1]['version']}" if events else "no version"


def main() -> int:
    """Runs what the command line asks for. Returns the exit code."""
    parser = argparse.ArgumentParser(description="A vLLM engine that is killed under a worker.")
    parser.add_argument("--seed", type=int, default=int(time.time()) % 10**6, help="of the moments")
    parser.add_argument("--kills", type=int, default=40, help="kills of the engine's process (default 40)")
    args = parser.parse_args()
    print(f"again with  --kills {args.kills} --seed {args.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="rlb-vllm-") as folder:
        out = run_engine_kills(Path(folder), seed=args.seed, kills=args.kills, say=lambda line: print(line, flush=True))
    print("\n".join(out.lines()))
    print("FAILED" if out.findings else "ok: no finding")
    return int(bool(out.findings))


if __name__ == "__main__":
    sys.exit(main())
