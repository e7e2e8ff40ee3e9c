"""A server that comes back without its newest second or three, again and again, under a trainer of one's own.

The documented loops compare nothing between their ranks. Every rank notes each step that it is given: the n-th step of
a job must be the same on all its ranks. A job of which a rank ends is started again whole, as torchrun does.
"""

from __future__ import annotations

import json
import random
import shutil
import socket
import time
from collections import defaultdict
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from homes import Home
from outcome import Outcome, Say
from own_server import OwnServer
from transformers import AutoConfig, AutoModelForCausalLM

import rlbuffer
from rlbuffer.weights.model import TINY_QWEN3

ROOT = Path(__file__).parents[2]
EXAMPLES = ("plain_loop", "hf_trainer", "accelerate_loop")
RANKS = 2
STANDSTILL_SECONDS = 30.0
COPY_SECONDS, COPIES = 0.5, 8
AGES = (1, 7)
"""How many copies ago the server comes back from."""
CONFIG = """
run = "own"

[batcher]
row_tokens = 64
step_groups = 3
max_age = 4
lookahead = 1

[worker.parity]
env = "parity:Parity"
group_size = 8
groups_in_flight = 6
"""


class _Job:
    """The ranks of a trainer of one's own, started again when one of them ends."""

    def __init__(self, home: Home, url: str, example: str) -> None:
        self._home, self._url, self._example = home, url, example
        self.number, self.given = 0, home.path / "given.jsonl"
        self._ranks: list[Any] = []
        self.start()

    def start(self) -> None:
        self.number += 1
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        alone, self._ranks = self._home.environment, []
        for rank in range(RANKS):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "MASTER_ADDR": "127.0.0.1"}
            place |= {"MASTER_PORT": port, "GIVEN": self.given, "JOB": self.number, "OMP_NUM_THREADS": 1}
            place["ACCELERATE_USE_CPU"] = "true"  # as `accelerate launch` says where there is no GPU
            self._home.environment = alone | {name: str(value) for name, value in place.items()}
            command = (
                Path(__file__).parent / "noted_steps.py",
                self._home.path / f"{self._example}.py",
                self._url,
                "own",
            )
            folders = (self._home.path / "model", self._home.path / "out", 10**6)
            self._ranks.append(self._home.start_python(*map(str, (*command, *folders)), log=f"rank-{rank}"))
        self._home.environment = alone

    def look(self) -> None:
        """Starts all ranks again when one has ended."""
        if any(rank.poll() is not None for rank in self._ranks):
            self.end()
            self.start()

    def end(self) -> None:
        for rank in self._ranks:
            with suppress(ProcessLookupError):
                rank.kill()
            rank.wait()

    def notes(self) -> list[tuple[float, int, int, int, str]]:
        """(when, job, rank, step, digest), the oldest first."""
        return [tuple(json.loads(line)) for line in self.given.read_text().splitlines()] if self.given.exists() else []


def run_losses(home: Home, example: str, *, seed: int, losses: int, say: Say) -> Outcome:
    """Makes the server lose its newest writes `losses` times under one of :data:`EXAMPLES`."""
    outcome, dice, began = Outcome(name=f"lost writes under {example}.py"), random.Random(seed), time.monotonic()
    for path in (ROOT / "docs" / "examples").glob("*.py"):
        shutil.copy(path, home.path)
    (home.path / "own.toml").write_text(CONFIG)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**TINY_QWEN3)).save_pretrained(home.path / "model")
    with OwnServer(home.path / "server", options={"appendfsync": "everysec"}) as server:
        home.environment["RLBUFFER_REDIS_URL"] = server.url
        home.start("serve", "--config", home.path / "own.toml", "--display", "plain", log="serve")
        home.start("worker", "parity", "--config", home.path / "own.toml", "--display", "plain", log="worker")
        job = _Job(home, server.url, example)
        copies: list[Path] = []
        try:
            _pass(job, server, copies, home.path, steps=4, seconds=0.0)
            for number in range(losses):
                _pass(job, server, copies, home.path, steps=3, seconds=dice.uniform(0.5, 4.0))
                age = min(dice.randint(*AGES), len(copies) - 1)
                server.kill()
                shutil.rmtree(server.directory / "appendonlydir")
                shutil.copytree(copies[-1 - age], server.directory / "appendonlydir")
                server.start()
                outcome.faults["loss"] += 1
                given = len(job.notes())
                say(f"  loss {number + 1}: back {age * COPY_SECONDS:.1f} s, job {job.number}, {given} steps given")
            _pass(job, server, copies, home.path, steps=3, seconds=0.0)
        finally:
            job.end()
        with rlbuffer.connect(server.url, run="own") as buffer:
            outcome.findings += [f"{finding.invariant}: {finding.message}" for finding in buffer.verify().findings]
        home.stop()
    notes = job.notes()
    outcome.findings += _mixed(notes)
    gaps = _gaps(notes)
    outcome.facts |= {"steps given to rank 0": len(gaps) + 1, "jobs": job.number, "longest stand-still, s": max(gaps)}
    outcome.findings += [f"no step for {gap:.1f} s" for gap in gaps if gap > STANDSTILL_SECONDS]
    outcome.seconds = time.monotonic() - began
    return outcome


def _pass(job: _Job, server: OwnServer, copies: list[Path], folder: Path, *, steps: int, seconds: float) -> None:
    """Waits until rank 0 was given so many steps more, and so long; copies the server's files meanwhile."""
    count = lambda: sum(note[2] == 0 for note in job.notes())  # noqa: E731
    target, until, deadline = count() + steps, time.monotonic() + seconds, time.monotonic() + 180.0
    while count() < target or time.monotonic() < until or not copies:
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {steps} steps within 180 s: see the logs in {folder}")
        job.look()
        files = server.directory / "appendonlydir"
        copy = folder / "copies" / str(time.monotonic_ns())
        with suppress(OSError, shutil.Error):
            before = sorted(path.name for path in files.iterdir())
            shutil.copytree(files, copy)
            if sorted(path.name for path in files.iterdir()) == before:  # not in the middle of a rewrite
                copies.append(copy)
        for old in copies[:-COPIES]:
            shutil.rmtree(old)
        del copies[:-COPIES]
        time.sleep(COPY_SECONDS)


def _mixed(notes: list[tuple[float, int, int, int, str]]) -> list[str]:
    given: dict[tuple[int, int], list[tuple[int, str]]] = defaultdict(list)
    for _, job, rank, step, digest in notes:
        given[job, rank].append((step, digest))
    return [
        f"job {job}: pass {place}: rank 0 was given step {ours[0]} {ours[1][:12]}, rank {rank} {its[0]} {its[1][:12]}"
        for (job, rank), theirs in given.items()
        for place, (ours, its) in enumerate(zip(given[job, 0], theirs, strict=False))
        if ours != its
    ]


def _gaps(notes: list[tuple[float, int, int, int, str]]) -> list[float]:
    times = [when for when, _, rank, _, _ in notes if rank == 0]
    return [round(after - before, 1) for before, after in pairwise(times)]
