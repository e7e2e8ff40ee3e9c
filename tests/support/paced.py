"""Workers and trainers of a known speed, as processes of their own: what a test of shares and tickets needs.

The worker is rlbuffer's own loop (tickets, heartbeat, versions, pushes); only its sampler is a stand-in that takes a
given time and answers at random. The trainer is a bare reader that trains nothing.

    python paced.py worker --home DIR --run NAME --env ENV --seconds 0.1
    python paced.py trainer --home DIR --run NAME --steps 30 --timeout 60
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from homes import Home
from numpy.typing import NDArray

from rlbuffer.client.buffer import connect
from rlbuffer.config.settings import RunSettings, WorkerSettings
from rlbuffer.errors import RlbufferError
from rlbuffer.process.logs import heard
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.records.spans import VersionSpan
from rlbuffer.state.vocabulary import VOCAB_SIZE
from rlbuffer.worker.envs import make_env
from rlbuffer.worker.loop import run_worker
from rlbuffer.worker.samplers import Completion, Sampling
from rlbuffer.worker.samplers.transformers import Batched

LONGEST = 40
"""Tokens of the longest completion."""


class PacedSampler:
    """Takes `seconds` for every group; completions of random length and tokens."""

    def __init__(self, seconds: float, seed: int) -> None:
        self.seconds = seconds
        self.version = -1
        self.vocab_size = VOCAB_SIZE
        self.context = 0
        self._rng = np.random.default_rng(seed)

    def load(self, policy: PolicyVersion) -> None:
        self.version = policy.version

    def sample(
        self,
        prompts: Sequence[NDArray[np.int32]],
        *,
        n: int,
        sampling: Sampling,
        stopped: Callable[[], bool] | None = None,
    ) -> list[list[Completion]]:
        time.sleep(self.seconds * len(prompts))
        return [[self._completion() for _ in range(n)] for _ in prompts]

    def _completion(self) -> Completion:
        length = int(self._rng.integers(1, LONGEST))
        return Completion(
            tokens=self._rng.integers(0, VOCAB_SIZE, length).astype(np.int32),
            logprobs=np.full(length, -np.log(VOCAB_SIZE), np.float32),
            finish_reason="length",
            version_spans=(VersionSpan(self.version, 0, length),),
        )


def spawn(home: Home, role: str, *arguments: str, log: str) -> subprocess.Popen[str]:
    """Starts this file as a process of `home`; its output goes to `<home>/<log>.log`."""
    return home.start_python(__file__, role, "--home", str(home.path), *arguments, log=log)


def start_worker(
    home: Home, run: str, env: str, seconds: float, *, name: str = "", batch: int = 1
) -> subprocess.Popen[str]:
    """A worker of `env` that needs `seconds` for a group and takes `batch` tickets at a time."""
    options = ["--run", run, "--env", env, "--seconds", str(seconds), "--name", name or env, "--batch", str(batch)]
    return spawn(home, "worker", *options, log=f"worker-{name or env}")


def start_trainer(home: Home, run: str, *, steps: int, timeout: float) -> subprocess.Popen[str]:
    """A trainer that makes `steps` steps and waits at most `timeout` seconds for each."""
    return spawn(home, "trainer", "--run", run, "--steps", str(steps), "--timeout", str(timeout), log="trainer")


def events(home: Home, log: str, kind: str = "") -> list[dict[str, Any]]:
    """The JSON objects of a log so far, of one kind if given."""
    path = home.path / f"{log}.log"
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            event = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(event, dict) and kind in ("", event.get("event")):
            found.append(event)
    return found


def kill(process: subprocess.Popen[str]) -> None:
    """Sends SIGKILL to one process that `spawn` started."""
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=30)


# -- the processes -----------------------------------------------------------------------------------------------------
def _say(event: dict[str, Any]) -> None:
    print(json.dumps(event | {"at": time.time()}, default=str), flush=True)


def _worker(options: argparse.Namespace) -> int:
    stop = threading.Event()

    def leave(number: int, frame: FrameType | None) -> None:
        stop.set()

    signal.signal(signal.SIGTERM, leave)
    settings = WorkerSettings(env="vcopy", group_size=8, groups_in_flight=options.batch)
    env = make_env("vcopy", name=options.env)
    with connect(run=options.run, config=RunSettings(home=options.home)) as buffer:
        sampler = Batched(PacedSampler(options.seconds, seed=os.getpid()))
        with heard("rlbuffer.worker", _say):
            run_worker(buffer, options.name, settings, stop=stop, env=env, sampler=sampler)
    return 0


def _trainer(options: argparse.Namespace) -> int:
    with connect(run=options.run, config=RunSettings(home=options.home)) as buffer:
        reader = buffer.reader(timeout_seconds=options.timeout)
        try:
            for step in reader.steps():
                policy = buffer.policy
                policy.announce(step.number, location="", size=0, checksum="")
                reader.trained(step)
                _say({"event": "trained", "step": step.number, "groups": step.groups})
                if step.number >= options.steps:
                    return 0
        except RlbufferError as error:
            _say({"event": "error", "kind": type(error).__name__, "text": str(error)})
            return error.exit_code
    return 1


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["worker", "trainer"])
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--run", required=True)
    parser.add_argument("--env", default="")
    parser.add_argument("--name", default="")
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=60.0)
    options = parser.parse_args()
    return _worker(options) if options.role == "worker" else _trainer(options)


if __name__ == "__main__":
    sys.exit(main())
