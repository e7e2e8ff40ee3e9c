"""A primary and a replica behind one address; roles are exchanged as planned, and the primary is killed, in turns.

Or three servers under sentinels, or the shards of a cluster, between which slots are moved as well.

A planned failover loses nothing. A primary that is killed takes with it what it had acknowledged and not sent on: in
every other kill the replica hears nothing of its last steps. That is counted, and allowed; training a rollout twice is
not. Two batchers serve the run, and none of its processes may end.
"""

from __future__ import annotations

import random
import signal
import subprocess
import time
from collections.abc import Mapping

from aof import Steps
from homes import Home
from kill_runs import TAIL_STEPS, WORLD_SIZE, Watch, finish, home_step, inspect_uses, write_config
from outcome import Outcome, Say
from pairs import Pair
from places import Servers, lose_primary, note_steps, servers_at
from shards import InTurns

LOST_STEPS, LOST_SECONDS = 4, 5.0
"""Acknowledged steps that a kill takes at most."""
ENVS = ("vcopy", "repeat")
LONGEST_AWAY_SECONDS = 2.0
"""From the death of a primary until the replica takes its place."""
SENTINEL_MICRO_BATCHES = 6
FAILOVER, KILL, MOVE = "planned failover", "kill -9 of the primary", "move of slots"


def run_failovers(
    home: Home,
    *,
    seed: int,
    failovers: int,
    kills: int,
    steps: int,
    say: Say,
    place: str = "pair",
    slot_moves: int = 0,
) -> Outcome:
    """`failovers` planned ones and `kills` of the primary, in a drawn order, spread over a run of `steps` steps.

    At the `place` "sentinels" three servers are watched by three of them, as docs/guide/deploy.md has it. Nobody but
    them chooses a primary, and one without a replica takes no writes: what a kill takes is what it had not sent on yet.
    At "cluster" the shard of the control keys and another one of three are hit in turns; `slot_moves` times slots move
    under the run, in turns that of the control keys and some that hold payloads.
    """
    outcome = Outcome(name=f"failovers of a {place} (seed {seed})")
    draw = random.Random(f"failovers {seed}")
    began = time.monotonic()
    faults = [FAILOVER] * failovers + [KILL] * kills + [MOVE] * slot_moves
    draw.shuffle(faults)
    committed: Steps = {}
    with servers_at(home, place) as pair:
        # Sentinels take seconds for each fault: a step has to take longer, too.
        size = SENTINEL_MICRO_BATCHES if place == "sentinels" else 1
        config = write_config(home, steps=steps, keep_checkpoints=3, micro_batches=size)
        others = {name: home.start("serve", "--config", config, "--run", "tiny", log=name) for name in ("one", "two")}
        for env in ENVS:
            others[env] = home.start("worker", env, "--config", config, log=f"worker-{env}")
        trainer = home.start("train", "--config", config, log="train")
        progress = Watch(home, trainer)
        for i, fault in enumerate(faults):
            due = max(progress.last + 1, 2 + i * (steps - TAIL_STEPS) // len(faults))
            if not progress.reaches(due, outcome):
                break
            time.sleep(draw.uniform(0, 0.3))
            if fault == MOVE:
                said = _move(pair, committed)
            else:
                said = _fail_over(pair, committed) if fault == FAILOVER else _kill(home, pair, committed, draw)
            say(f"  {time.monotonic() - began:5.0f} s  step {progress.last}: {fault}{said}")
            outcome.faults[fault] += 1
            progress.last = home_step(home)
        progress.reaches(steps, outcome)
        _end(home, others, outcome)
        finish(home, outcome, trainer, steps)
        inspect_uses(home, outcome, steps, pair, committed)
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


def _fail_over(pair: Servers, committed: Steps) -> str:
    pair.fail_over()
    note_steps(pair, committed)
    pair.settle()
    return f", to port {pair.primary.port}"


def _move(cluster: InTurns, committed: Steps) -> str:
    said = cluster.move()
    note_steps(cluster, committed)
    return said


def _kill(home: Home, pair: Servers, committed: Steps, draw: random.Random) -> str:
    """Returns the sentence about it."""
    before, lost = home_step(home), draw.choice((0, draw.randint(1, LOST_STEPS))) * isinstance(pair, Pair)
    if lost:
        pair.cut()
        deadline = time.monotonic() + LOST_SECONDS
        while home_step(home) < before + lost and time.monotonic() < deadline:
            time.sleep(0.02)
    away = lose_primary(pair, committed, away_seconds=draw.uniform(0, LONGEST_AWAY_SECONDS) * isinstance(pair, Pair))
    taken = f"with what it did since step {before}, " if lost else ""
    return f", {taken}nobody there for {away:.1f} s"


def _end(home: Home, others: Mapping[str, subprocess.Popen[str]], outcome: Outcome) -> None:
    """Nobody has ended by itself, but workers behind the last step, with 0; then all are asked to."""
    for name, process in others.items():
        code = process.poll()
        has_done_its_part = code == 0 and name in ENVS
        if code is not None and not has_done_its_part:
            outcome.findings.append(f"{name} ended with exit code {code} during the run\n{home.logs()}")
        process.send_signal(signal.SIGTERM)
    for process in others.values():
        process.wait(timeout=60)


def _count(home: Home, name: str, words: str) -> int:
    return sum(words in line for line in (home.path / f"{name}.log").read_text().splitlines())
