"""`rlbuffer run` with a worker that has a Python and an environment of its own, and an env beside the config."""

from __future__ import annotations

import os
import signal
import sys

import psutil
from homes import Home


def test_a_worker_with_a_python_of_its_own_is_supervised_as_the_others(home: Home) -> None:
    """Takes half a minute: a Python of its own imports everything again, at every start."""
    wrapper, started = home.path / "python", home.path / "started"
    wrapper.write_text(f'#!/bin/sh\necho "$CUDA_VISIBLE_DEVICES $*" >> {started}\nexec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    project = home.path / "project"
    project.mkdir()
    (project / "beside.py").write_text('from rlbuffer.worker.envs import BUILT_IN\n\nmake = BUILT_IN["vcopy"]\n')
    config = home.config(world_size=1, steps=1000).rename(project / "own.toml")
    own = f'[worker.vcopy]\npython = "{wrapper}"\ngpus = [3]\nenv = "beside:make"\n'
    config.write_text(config.read_text().replace('[worker.vcopy]\nenv = "vcopy"\n', own))

    def pid() -> int:
        return home.pids().get("worker vcopy", 0) if (home.path / "runs/tiny/pids.json").exists() else 0

    def steps() -> int:
        return max((record["step"] for record in home.metrics()), default=0)

    def starts() -> list[str]:
        return started.read_text().splitlines()[1:] if started.exists() else []

    supervisor = home.start("run", config, "--display", "plain", log="run")
    first = home.wait_until(lambda: starts() and pid(), seconds=120, why="its Python's first word")
    assert starts() == ["3 -m rlbuffer.run.members worker vcopy 0 vcopy"]
    os.kill(first, signal.SIGKILL)
    home.wait_until(lambda: pid() not in (0, first), seconds=120, why="another worker in place of the killed one")
    home.wait_until(lambda: steps() >= 1, seconds=180, why="a step, which needs the other worker")
    assert len(starts()) == 2
    assert "worker vcopy was killed by SIGKILL; starting it again" in (home.path / "run.log").read_text()

    second = psutil.Process(pid())
    supervisor.send_signal(signal.SIGKILL)
    supervisor.wait(timeout=30)
    home.wait_until(lambda: not alive(second), seconds=60, why="the worker's end after its supervisor's")


def alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
