"""A run of TRL's AsyncGRPO behind the buffer, whose processes are killed with SIGKILL at drawn moments. It runs in the
environment of ``make adapters-test``, which has TRL."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from homes import Home
from outcome import Outcome, Say

VICTIMS = ("trainer", "child", "serve", "server")
STALL_SECONDS = 400.0
"""Without a new step for so long the run is stuck. A trainer takes half a minute to come back, its child another."""
STEPS_PER_KILL = 2
TAIL_STEPS = 3
"""Steps at the end in which nothing is killed any more."""


def run_doors(home: Home, *, seed: int, kills: int, say: Say) -> Outcome:
    """Kills `kills` processes, each kind as often as the others; the next one when a step was trained since."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "adapters"))
    from trl_runs import TrlRun, check

    outcome = Outcome(name=f"kill -9 of a trainer of TRL, its child, serve and the server (seed {seed})")
    dice, began = random.Random(f"doors {seed}"), time.monotonic()
    steps = STEPS_PER_KILL * kills + TAIL_STEPS
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    run = TrlRun(home)
    (trainer,) = run.train(steps)
    victims = [kind for kind in VICTIMS for _ in range(-(-kills // len(VICTIMS)))][:kills]
    dice.shuffle(victims)

    def waits_for(step: int) -> bool:
        since, newest = time.monotonic(), -1
        while (now := max((line["step"] for line in run.lines("trained")), default=0)) < step:
            if now != newest:
                newest, since = now, time.monotonic()
            if trainer.poll() is not None or time.monotonic() - since > STALL_SECONDS:
                outcome.findings.append(f"no step after step {now}: trainer {trainer.poll()}\n{home.logs()}")
                return False
            time.sleep(0.1)
        return True

    done = 0
    for kind in victims:
        if not waits_for(done + 1):
            break
        time.sleep(dice.uniform(0.0, 1.0))
        if kind == "trainer":
            trainer.kill()
            trainer.wait()
            (trainer,) = run.train(steps)
        elif kind == "child":
            home.wait_until(lambda: _is_alive(run.child()), seconds=STALL_SECONDS, why="a child that scores")
            os.kill(run.child(), signal.SIGKILL)
        elif kind == "serve":
            run.serving.kill()
            run.serving.wait()
            run.serving = run.serve()
        else:
            record = json.loads((home.path / "server" / "server.json").read_text())
            os.kill(int(record["pid"]), signal.SIGKILL)
        outcome.faults[kind] += 1
        done = max((line["step"] for line in run.lines("trained")), default=0)
        say(f"  {time.monotonic() - began:5.0f} s  step {done}: kill -9 {kind}")
    if not outcome.findings and waits_for(steps):
        try:
            code = home.ended(trainer, STALL_SECONDS)
            if code:
                outcome.findings.append(f"the trainer ended with {code}\n{home.logs()}")
            check(run)
        except AssertionError as error:
            outcome.findings.append(str(error))
    history, again = run.history(), run.trained_again()
    outcome.facts["optimizer steps"] = len({line["step"] for line in run.lines("trained")})
    outcome.facts["samples in the weights' history"] = f"{len(history)}, {len(set(run.places()))} of them different"
    outcome.facts["steps trained again"] = f"{len(again)}, {sum(again)} with the same samples"
    outcome.seconds = time.monotonic() - began
    return outcome


def _is_alive(pid: int) -> bool:
    """False also for one that was killed, and that its parent has not noticed yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
