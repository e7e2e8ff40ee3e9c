"""Processes of a run whose output nobody reads: they do what they would have done."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator

import pytest
from homes import Home

PIPE_BYTES = 4096


@pytest.fixture
def reader(home: Home) -> Iterator[int]:
    """Reader of the log "unread", a pipe that is full: it is there, and does not read."""
    os.mkfifo(home.path / "unread.log")
    reader = os.open(home.path / "unread.log", os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(home.path / "unread.log", os.O_WRONLY)
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    os.write(writer, bytes(PIPE_BYTES))
    yield reader
    os.close(writer)


def test_a_supervised_run_trains_its_steps_and_starts_nobody_again(home: Home, reader: int) -> None:
    process = home.start("run", home.config(steps=3, world_size=1), "--display", "plain", log="unread")
    (home.path / "unread.log").unlink()  # a test that fails reads every log
    assert home.ended(process, 120) == 0
    log = (home.path / "runs" / "tiny" / "run.log").read_text()
    assert [record["step"] for record in home.metrics()] == [1, 2, 3], log
    assert "starting it again" not in log
    assert os.read(reader, 2 * PIPE_BYTES) == bytes(PIPE_BYTES)
    os.close(reader)
