"""A primary and a replica behind one address; roles are exchanged as planned, and the primary is killed, in turns.

A planned failover loses nothing. A primary that is killed takes with it what it had acknowledged and not sent on: in
every other kill the replica hears nothing of its last steps. That is counted, and allowed; training a rollout twice is
not. Two batchers serve the run, and none of its processes may end.
"""

from __future__ import annotations

import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from accounts import check_metrics
from aof import read_steps
from homes import Home
from kill_runs import TAIL_STEPS, WORLD_SIZE, Watch, finish, home_step, write_config
from outcome import Outcome, Say
from pairs import Pair
from shards import InTurns
from watched import Watched

from rlbuffer.store.keys import Keys

LOST_STEPS, LOST_SECONDS = 4, 5.0
"""Acknowledged steps that a kill takes at most."""
LONGEST_AWAY_SECONDS = 2.0
"""From the death of a primary until the replica takes its place."""
FAILOVER, KILL = "planned failover", "kill -9 of the primary"
OPTIONS = {"appendfsync": "everysec", "auto-aof-rewrite-percentage": "0"}

PLACES: Mapping[str, Any] = {
    "pair": Pair,
    "sentinels": Watched,
    "cluster": partial(InTurns, key=Keys("tiny").meta),
}
"""Where a run is, and what makes it."""
Steps = dict[tuple[int, str], list[str]]
"""(step, digest) -> its rollouts."""


def run_failovers(
    home: Home, *, seed: int, failovers: int, kills: int, steps: int, say: Say, place: str = "pair"
) -> Outcome:
    """`failovers` planned ones and `kills` of the primary, in a drawn order, spread over a run of `steps` steps.

    At the `place` "sentinels" three servers are watched by three of them, as docs/guide/deploy.md has it. Nobody but
    them chooses a primary, and one without a replica takes no writes: what a kill takes is what it had not sent on yet.
    At "cluster" the shard of the control keys and another one of three are hit in turns.
    """
    outcome = Outcome(name=f"failovers of a {place} (seed {seed})")
    draw = random.Random(f"failovers {seed}")
    began = time.monotonic()
    faults = [FAILOVER] * failovers + [KILL] * kills
    draw.shuffle(faults)
    committed: Steps = {}
    with PLACES[place](home.path / "pair", options=OPTIONS) as pair:
        home.url = pair.url
        home.environment["RLBUFFER_REDIS_URL"] = pair.url
        config = write_config(home, steps=steps, keep_checkpoints=3)
        others = {name: home.start("serve", "--config", config, "--run", "tiny", log=name) for name in ("one", "two")}
        for env in ("vcopy", "repeat"):
            others[env] = home.start("worker", env, "--config", config, log=f"worker-{env}")
        trainer = home.start("train", "--config", config, log="train")
        progress = Watch(home, trainer)
        for i, fault in enumerate(faults):
            due = max(progress.last + 1, 2 + i * (steps - TAIL_STEPS) // len(faults))
            if not progress.reaches(due, outcome):
                break
            time.sleep(draw.uniform(0, 0.3))
            said = _fail_over(pair, committed) if fault == FAILOVER else _kill(home, pair, committed, draw)
            say(f"  {time.monotonic() - began:5.0f} s  step {progress.last}: {fault}{said}")
            outcome.faults[fault] += 1
            progress.last = home_step(home)
        progress.reaches(steps, outcome)
        _end(others, outcome)
        finish(home, outcome, trainer, steps)
        _note_steps(pair, committed)
        outcome.findings += check_metrics(home.metrics(), steps)
        outcome.findings += check_uses(committed, home.metrics())
        with home.connect() as buffer:
            total, ledger = buffer.ledger().total(), buffer.ledger()
        outcome.facts["rollouts, tokens"] = (
            f"pushed {total.pushed}, trained {total.trained}, packed {total.packed}, pending {total.pending}, "
            f"dropped {dict(total.dropped)}; {ledger.lost} pushes lost"
        )
    outcome.facts["steps"] = f"{home_step(home)} trained on {WORLD_SIZE} ranks, {len(committed)} committed"
    outcome.facts["times that trained steps were handed back"] = sum(
        _count(home, name, "the server had lost") for name in ("one", "two")
    )
    outcome.facts["takeovers"] = sum(_count(home, name, "serving run") for name in ("one", "two"))
    outcome.facts["starts of the ranks"] = 1 + _count(home, "train", "Starting all")
    outcome.seconds = time.monotonic() - began
    return outcome


def check_uses(committed: Mapping[tuple[int, str], list[str]], metrics: Iterable[Mapping[str, Any]]) -> list[str]:
    """Every trained step had been committed, and no rollout was in two trained steps."""
    findings = []
    uses: Counter[str] = Counter()
    for number, digest in sorted({(record["step"], record["digest"]) for record in metrics}):
        rollouts = committed.get((number, digest))
        if rollouts is None:
            findings.append(f"step {number} was trained with digest {digest[:12]}, which was never committed")
            continue
        uses.update(rollouts)
    findings += [f"rollout {rollout} was trained {n} times" for rollout, n in uses.items() if n > 1]
    return findings or ([] if uses else ["nothing was trained"])


def _fail_over(pair: Pair | Watched | InTurns, committed: Steps) -> str:
    pair.fail_over()
    _note_steps(pair, committed)
    pair.settle()
    return f", to port {pair.primary.port}"


def _kill(home: Home, pair: Pair | Watched | InTurns, committed: Steps, draw: random.Random) -> str:
    """Returns the sentence about it."""
    before, lost = home_step(home), draw.choice((0, draw.randint(1, LOST_STEPS))) * isinstance(pair, Pair)
    if lost:
        pair.cut()
        deadline = time.monotonic() + LOST_SECONDS
        while home_step(home) < before + lost and time.monotonic() < deadline:
            time.sleep(0.02)
    pair.primary.kill()
    began, away = time.monotonic(), draw.uniform(0, LONGEST_AWAY_SECONDS)
    if isinstance(pair, Pair):
        time.sleep(away)
    pair.promote()
    away = time.monotonic() - began
    _note_steps(pair, committed)
    pair.mend()
    taken = f"with what it did since step {before}, " if lost else ""
    return f", {taken}nobody there for {away:.1f} s"


def _note_steps(pair: Pair | Watched | InTurns, committed: Steps) -> None:
    """The steps in every server's file, before one of them loads what another has."""
    for server in pair.servers:
        committed |= read_steps(server.directory, "tiny")


def _end(others: Mapping[str, subprocess.Popen[str]], outcome: Outcome) -> None:
    """Nobody has ended by itself; then all are asked to."""
    for name, process in others.items():
        if process.poll() is not None:
            outcome.findings.append(f"{name} ended with exit code {process.returncode} during the run")
        process.send_signal(signal.SIGTERM)
    for process in others.values():
        process.wait(timeout=60)


def _count(home: Home, name: str, words: str) -> int:
    return sum(words in line for line in (home.path / f"{name}.log").read_text().splitlines())
