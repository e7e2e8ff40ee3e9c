"""Processes of a run whose output nobody reads: they do what they would have done."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from homes import Home

PIPE_BYTES = 4096


@pytest.fixture
def writer(request: pytest.FixtureRequest) -> Iterator[int]:
    """A pipe whose reader has left, or is there and does not read while the pipe is full."""
    reader, writer = os.pipe()
    if request.param == "gone":
        os.close(reader)
    else:
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        os.write(writer, bytes(PIPE_BYTES))
    yield writer
    os.close(writer)
    if request.param != "gone":
        assert os.read(reader, 2 * PIPE_BYTES) == bytes(PIPE_BYTES)
        os.close(reader)


def unread(home: Home, writer: int, *arguments: str | Path) -> subprocess.Popen[str]:
    """Starts a command whose stdout and stderr nobody reads."""
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
    home.processes.append(process)
    return process


@pytest.mark.parametrize("writer", ["stays"], indirect=True)
def test_a_supervised_run_trains_its_steps_and_starts_nobody_again(home: Home, writer: int) -> None:
    """Takes half a minute: this process is started as a user starts it."""
    path = home.config(steps=3, world_size=1)
    process = unread(home, writer, "run", path, "--run", "tiny", "--display", "plain")
    assert home.ended(process, 120) == 0
    log = (home.path / "runs" / "tiny" / "run.log").read_text()
    assert [record["step"] for record in home.metrics()] == [1, 2, 3], log
    assert "starting it again" not in log


@pytest.mark.parametrize("writer", ["gone"], indirect=True)
def test_each_process_of_a_run_goes_on_by_itself(home: Home, writer: int) -> None:
    """Takes a minute, as four processes that import torch."""
    path = home.config(steps=3, world_size=1)
    others = [
        unread(home, writer, *words, "--config", path)
        for words in (["serve"], ["worker", "vcopy"], ["worker", "repeat"])
    ]
    trainer = unread(home, writer, "train", "--config", path, "--display", "plain")
    assert home.ended(trainer, 240) == 0
    assert [record["step"] for record in home.metrics()] == [1, 2, 3]
    assert [process.poll() for process in others] == [None] * 3
    for process in reversed(others):
        process.send_signal(signal.SIGTERM)
    assert [home.ended(process, 60) for process in others] == [0] * 3
