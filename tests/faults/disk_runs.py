"""`rlbuffer run` on a server whose disk is full for a while, again and again: nobody ends, and the account is exact."""

from __future__ import annotations

import time

from homes import Home
from kill_runs import Watch, finish, home_step, inspect_end, write_config
from outcome import Outcome, Say
from own_server import Disk, OwnServer

ROOM_BYTES = 40_000
STEPS_BETWEEN = 4
REASON = "it cannot write to its disk"
WAITING = ("serve", "worker", "train")
"""Processes that must say that they wait, in the one log of the run."""
PATIENCE_SECONDS = 120.0


def run_full_disks(home: Home, *, rounds: int, full_seconds: float, say: Say) -> Outcome:
    """The disk is full until everybody has said so, and for `full_seconds` more."""
    outcome = Outcome(name="disks")
    began = time.monotonic()
    steps = (rounds + 1) * STEPS_BETWEEN
    with OwnServer(home.path / "tcp", options={"appendfsync": "everysec"}) as server:
        home.url = home.environment["RLBUFFER_REDIS_URL"] = server.url
        supervisor = home.start("run", write_config(home, steps=steps, keep_checkpoints=3), "--display", "plain")
        progress, disk = Watch(home, supervisor), Disk(server)
        for i in range(rounds):
            if not progress.reaches(STEPS_BETWEEN * (i + 1) - 1, outcome):
                break
            before = _waiting(home)
            disk.fill(room_bytes=ROOM_BYTES)
            home.wait_until(
                lambda then=before: all(now > n for now, n in zip(_waiting(home), then, strict=True)),
                seconds=PATIENCE_SECONDS,
                why=f"a word of each of {', '.join(WAITING)} that the disk is full",
            )
            time.sleep(full_seconds)
            disk.clear()
            outcome.faults["full disk"] += 1
            say(f"  {time.monotonic() - began:5.0f} s  step {home_step(home)}: the disk was full")
        finish(home, outcome, supervisor, steps)
        outcome.seconds = time.monotonic() - began
        outcome.findings += _ends(_lines(home))
        if not outcome.findings:
            inspect_end(home, outcome, steps, server.directory)
    outcome.facts["lines about it"] = dict(zip(WAITING, _waiting(home), strict=True))
    return outcome


def _ends(lines: list[str]) -> list[str]:
    """What was started again, each behind what was said just before."""
    found = [i for i, line in enumerate(lines) if "starting it again" in line or "Starting all" in line]
    return [line for i in found for line in lines[max(0, i - 3) : i + 1]]


def _lines(home: Home) -> list[str]:
    path = home.path / "runs" / "tiny" / "run.log"
    return path.read_text().splitlines() if path.exists() else []


def _waiting(home: Home) -> list[int]:
    """Times that each of WAITING has said that it waits for the disk."""
    told = [line for line in _lines(home) if REASON in line]
    return [sum(f" {who}" in line[:26] for line in told) for who in WAITING]
