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
from samplers_conformance import CONTEXT, policies
from vllm_server import ENGINE
from worker_run import WorkerRun

from rlbuffer.records import PolicyVersion

GROUPS_A_STEP = 4
"""Groups between two versions, as if each step trained so many."""
VERSIONS = 20_000
"""That can be announced; four different models take turns."""
EARLY_SHARE, EARLY_SECONDS = 0.2, 20.0
"""Share of the kills that strike a start: so long after the kill before them, at most, whatever the engine does."""
WELL_SECONDS = 3.0
"""The others strike so long, at most, after the worker has gone on."""
NOTICED_SECONDS = 30.0
"""Longest until a death is said. The sampler looks twice a second; this is for a machine that is busy with others."""
BOUND_SECONDS = 600.0
"""Longest until a group comes of the next engine: a start, which takes 10 s of CPU and more on a busy machine."""
IDLE_SECONDS = 120.0
"""Longest until a first group of the whole run, and until a version of it is loaded."""

Say = Callable[[str], None]


@dataclass(slots=True)
class Kill:
    """One kill, and what came of it."""

    strikes: str
    """What the worker was at, by its own words: a load, sampling, or a start of the engine."""
    noticed: float = 0.0
    """Seconds until it was said."""
    goes_on: float = 0.0
    """Seconds until a group of the next engine was pushed."""
    sentences: int = 0
    """Different ones that were said of it."""


@dataclass(slots=True)
class Kills:
    """Findings and figures of a run."""

    findings: list[str] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """For people."""
        struck = Counter(kill.strikes for kill in self.kills)
        lines = [", ".join(f"{count} x {what}" for what, count in sorted(struck.items()))]
        for name in ("noticed", "goes_on"):
            seconds = sorted(getattr(kill, name) for kill in self.kills if getattr(kill, name))
            if seconds:
                lines.append(f"  {name}: median {seconds[len(seconds) // 2]:.1f} s, longest {seconds[-1]:.1f} s")
        lines += [f"  {name}: {value}" for name, value in self.facts.items()]
        return lines + ([f"  FINDING: {finding}" for finding in self.findings] or ["  no finding"])


class Training(WorkerRun):
    """A worker whose trainer makes a version of every few groups."""

    def _note(self, event: dict[str, Any]) -> None:
        super()._note(event | {"at": time.monotonic()})
        if event["event"] == "group" and len(self.told("group")) % GROUPS_A_STEP == 0:
            self.announce(len(self.told("group")) // GROUPS_A_STEP)


class Engine:
    """The engine's own process, which is forked from this one: whatever it has of children that it had not before."""

    def __init__(self) -> None:
        self._known = {child.pid for child in psutil.Process().children()}

    def processes(self) -> list[psutil.Process]:
        """Also while it starts, before it has a name of its own."""
        return [child for child in psutil.Process().children() if child.pid not in self._known and _is_alive(child)]

    def kill(self) -> str:
        """SIGKILL. -> what was killed"""
        found = self.processes()
        names = [process.name() for process in found]
        for process in found:
            os.kill(process.pid, signal.SIGKILL)
        return ", ".join(names)


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
        struck_at = 0.0
        for number in range(kills):
            early = number > 0 and draw.random() < EARLY_SHARE
            if early:
                moment = struck_at + draw.uniform(0.0, EARLY_SECONDS)
                run.until(
                    lambda m=moment: time.monotonic() >= m and engine.processes(),
                    seconds=BOUND_SECONDS,
                    why="an engine",
                )
            else:
                if number:
                    _goes_on(run, engine, out, struck_at, say)
                time.sleep(draw.uniform(0.0, WELL_SECONDS))
                run.until(engine.processes, seconds=BOUND_SECONDS, why="an engine")
            struck_at = time.monotonic()
            found = engine.kill()
            say(f"  {struck_at - began:5.0f} s  kill {number + 1}: {found}, {_last(run, 'version')}")
            out.kills.append(Kill("struck again before it went on"))
        _goes_on(run, engine, out, struck_at, say)
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


def _goes_on(run: Training, engine: Engine, out: Kills, struck_at: float, say: Say) -> None:
    """Waits until the death of `struck_at` has been said and a group of the next engine is there."""
    kill = out.kills[-1]

    def said() -> list[dict[str, Any]]:
        return [event for event in run.told("trouble") if event["at"] > struck_at]

    run.until(said, seconds=BOUND_SECONDS, why="a word about the death")
    first = said()[0]
    kill.noticed = first["at"] - struck_at
    kill.strikes = _what(first["error"])

    # A group that was finished when the engine died may still arrive: what counts comes after the word about it.
    def pushed() -> list[dict[str, Any]]:
        return [event for event in run.told("group") if event["at"] > first["at"] and engine.processes()]

    run.until(pushed, seconds=BOUND_SECONDS, why="a group of the next engine")
    kill.goes_on = pushed()[0]["at"] - struck_at
    kill.sentences = len({event["error"] for event in said()})
    say(
        f"           {kill.strikes}: said after {kill.noticed:.1f} s in {kill.sentences} sentence(s), a group after "
        f"{kill.goes_on:.1f} s"
    )


def _what(error: str) -> str:
    for words, what in (("while it loaded", "load"), ("has died", "sampling"), ("does not start", "start")):
        if words in error:
            return what
    return error


def _last(run: Training, kind: str) -> str:
    events = run.told(kind)
    return f"version {events[-1]['version']}" if events else "no version"


def main() -> int:
    """Runs what the command line asks for. -> exit code"""
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
