"""Processes of a run whose output nobody reads: they do what they would have done."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from homes import Home


def unread(home: Home, *arguments: str | Path) -> subprocess.Popen[str]:
    """Starts a command whose stdout and stderr are a pipe without a reader."""
    reader, writer = os.pipe()
    os.close(reader)
    process = subprocess.Popen(
        [sys.executable, "-m", "rlbuffer_cli", *map(str, arguments)],
        cwd=home.path,
        env=home.environment,
        stdin=subprocess.DEVNULL,
        stdout=writer,
        stderr=writer,
        text=True,
        start_new_session=True,
    )
    os.close(writer)
    home.processes.append(process)
    return process


@pytest.mark.parametrize("words", [["run"], ["demo", "--config"]], ids=["run", "demo"])
def test_a_supervised_run_trains_its_steps_and_starts_nobody_again(home: Home, words: list[str]) -> None:
    """Takes half a minute: this process is started as a user starts it."""
    path = home.config(steps=3, world_size=1)
    process = unread(home, *words, path, "--run", "tiny", "--display", "plain")
    assert home.ended(process, 120) == 0
    log = (home.path / "runs" / "tiny" / "run.log").read_text()
    assert [record["step"] for record in home.metrics()] == [1, 2, 3], log
    assert "starting it again" not in log


def test_each_process_of_a_run_goes_on_by_itself(home: Home) -> None:
    """Takes a minute, as four processes that import torch."""
    path = home.config(steps=3, world_size=1)
    others = [
        unread(home, *words, "--config", path) for words in (["serve"], ["worker", "vcopy"], ["worker", "repeat"])
    ]
    trainer = unread(home, "train", "--config", path, "--display", "plain")
    assert home.ended(trainer, 240) == 0
    assert [record["step"] for record in home.metrics()] == [1, 2, 3]
    assert [process.poll() for process in others] == [None] * 3
    for process in reversed(others):
        process.send_signal(signal.SIGTERM)
    assert [home.ended(process, 60) for process in others] == [0] * 3
