"""`rlbuffer run` with a worker that has a Python and an environment of its own."""

from __future__ import annotations

import os
import signal
import sys

import psutil
from homes import Home


def test_a_worker_with_a_python_of_its_own_is_supervised_as_the_others(home: Home) -> None:
    """Takes a minute: a Python of its own imports everything again, at every start."""
    wrapper, started = home.path / "python", home.path / "started"
    wrapper.write_text(f'#!/bin/sh\necho "$CUDA_VISIBLE_DEVICES $*" >> {started}\nexec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    config = home.config(world_size=1, steps=1000)
    text = config.read_text().replace("[worker.vcopy]\n", f'[worker.vcopy]\npython = "{wrapper}"\ngpus = [3]\n')
    config.write_text(text)

    def pid() -> int:
        return home.pids().get("worker vcopy", 0)

    def steps() -> int:
        return max((record["step"] for record in home.metrics()), default=0)

    supervisor = home.start("run", config, "--display", "plain", log="run")
    home.wait_until(lambda: steps() >= 1, seconds=180, why="the first step, which needs both workers")
    first = pid()
    assert started.read_text().splitlines()[1:] == ["3 -m rlbuffer.run.members worker vcopy 0 vcopy"]

    os.kill(first, signal.SIGKILL)
    home.wait_until(lambda: pid() not in (0, first), seconds=120, why="another worker in place of the killed one")
    home.wait_until(lambda: len(started.read_text().splitlines()) == 3, seconds=60, why="its Python's first word")
    before = steps()
    home.wait_until(lambda: steps() > before + 2, seconds=180, why="steps after that")
    assert "worker vcopy was killed by SIGKILL; starting it again" in (home.path / "run.log").read_text()

    second = psutil.Process(pid())
    supervisor.send_signal(signal.SIGKILL)
    supervisor.wait(timeout=30)
    home.wait_until(lambda: not alive(second), seconds=60, why="the worker's end after its supervisor's")


def alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
