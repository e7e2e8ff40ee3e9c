"""Two batchers serve one run; the leader is halted for longer than its lease, again and again."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import time

from accounts import check_ledger, check_metrics, check_trained, check_uses
from aof import Steps, read_written
from homes import Home
from kill_runs import WORLD_SIZE, home_step, write_config
from outcome import Outcome, Say
from places import EMBEDDED, note_steps, servers_at

from rlbuffer.client.buffer import Buffer
from rlbuffer.daemon import LEASE_SECONDS

ALLOWED_SECONDS = LEASE_SECONDS + 2.0
"""From the leader's halt to the other's first commit, by the server's clock."""
PATIENCE_SECONDS = 120.0
STATES = LEADS, LOST, STANDS_BY = ("serving run", "lost the lead", "standing by")
"""Status lines of `rlbuffer serve`."""


def run_takeovers(home: Home, *, rounds: int, steps_between: int, say: Say, place: str = EMBEDDED) -> Outcome:
    """Halts the leader `rounds` times. `facts["takeover seconds"]` are not judged here: machines differ."""
    outcome = Outcome(name=f"takeovers on the {place}")
    began = time.monotonic()
    with servers_at(home, place) as servers:
        # More steps than can be made meanwhile: the trainer is stopped when the rounds are over.
        config = write_config(home, steps=100_000, keep_checkpoints=100_000)
        serving = {name: home.start("serve", "--config", config, "--run", "tiny", log=name) for name in ("one", "two")}
        workers = [home.start("worker", env, "--config", config, log=f"worker-{env}") for env in ("vcopy", "repeat")]
        trainer = home.start("train", "--config", config, log="train")
        seconds: list[float] = []
        with home.connect() as buffer:
            for _ in range(rounds):
                wanted = home_step(home) + steps_between
                home.wait_until(lambda n=wanted: home_step(home) >= n, seconds=PATIENCE_SECONDS, why=f"step {wanted}")
                seconds.append(_round(home, buffer, serving, outcome, say))
            outcome.facts["takeover seconds"] = [round(n, 2) for n in seconds]
            trainer.send_signal(signal.SIGTERM)
            trainer.wait(timeout=60)
            # Nobody pushes or commits any more while the account is taken.
            for process in (*workers, *serving.values()):
                process.send_signal(signal.SIGTERM)
            for process in (*workers, *serving.values()):
                process.wait(timeout=60)
            trained = home_step(home)
            outcome.findings += check_metrics(home.metrics(), trained)
            verified = buffer.verify()
            outcome.findings += [f"{finding.invariant}: {finding.message}" for finding in verified.findings]
            _check_chain(buffer, outcome)
            if servers is None:
                written = read_written(home.path / "server", "tiny")
                outcome.findings += check_trained(written, home.metrics(), max_uses=1)
                outcome.findings += check_ledger(buffer, written, trained)
            else:
                committed: Steps = {}
                note_steps(servers, committed)
                outcome.findings += check_uses(committed, home.metrics())
    outcome.facts["steps"] = f"{trained} trained on {WORLD_SIZE} ranks"
    outcome.seconds = time.monotonic() - began
    return outcome


def _round(home: Home, buffer: Buffer, serving: dict[str, subprocess.Popen[str]], outcome: Outcome, say: Say) -> float:
    """One halt. -> seconds from it to the other's first commit, by the server's clock."""
    leader, other = sorted(serving, key=lambda name: state_of(home, name) != LEADS)
    lost_before = _count(home, leader, LOST)
    led_before = _count(home, other, LEADS)
    os.kill(serving[leader].pid, signal.SIGSTOP)
    halted, halted_at = time.monotonic(), buffer.store.now()
    time.sleep(0.1)  # what it had sent is carried out
    last = buffer.store.meta().step
    outcome.faults["SIGSTOP of the leader"] += 1
    first = home.wait_until(
        lambda: next(iter(buffer.store.headers(last + 1, last + 1)), None),
        seconds=PATIENCE_SECONDS,
        why=f"a commit after step {last} by the other batcher",
    )
    if _count(home, other, LEADS) != led_before + 1:
        outcome.findings.append(f"step {first.step} came, but batcher {other} does not say that it leads")
    # It comes back when the other has committed.
    time.sleep(max(0.0, halted + 1.5 * LEASE_SECONDS - time.monotonic()))
    os.kill(serving[leader].pid, signal.SIGCONT)
    home.wait_until(
        lambda: _count(home, leader, LOST) > lost_before and state_of(home, leader) == STANDS_BY,
        seconds=PATIENCE_SECONDS,
        why=f"a word of batcher {leader} that it does not lead any more",
    )
    now = home_step(home)
    home.wait_until(lambda: home_step(home) >= now + 2, seconds=PATIENCE_SECONDS, why="steps after the takeover")
    took = first.committed_ms / 1000 - halted_at
    say(f"  {leader} halted after step {last}; {other} committed step {first.step} {took:.2f} s later")
    return took


def _check_chain(buffer: Buffer, outcome: Outcome) -> None:
    headers = list(buffer.store.headers())
    if [header.step for header in headers] != list(range(1, buffer.store.meta().step + 1)):
        outcome.findings.append("the steps are not dense")
    for before, after in itertools.pairwise(headers):
        if after.previous_digest != before.digest:
            outcome.findings.append(f"step {after.step} does not chain on step {before.step}")
    if len({header.digest for header in headers}) != len(headers):
        outcome.findings.append("two steps have one digest")


def _lines(home: Home, name: str) -> list[str]:
    return (home.path / f"{name}.log").read_text().splitlines()


def _count(home: Home, name: str, words: str) -> int:
    return sum(words in line for line in _lines(home, name))


def state_of(home: Home, name: str) -> str:
    """The state in the batcher's last status line."""
    said = [words for line in _lines(home, name) for words in STATES if words in line]
    return said[-1] if said else ""
