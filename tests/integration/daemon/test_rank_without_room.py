"""A rank has no room for what it writes: that is what the batcher waits for, and says, as long as it lasts."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from daemon_runs import leading
from waits import kind, said

import rlbuffer
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.records.waiting import Wait, Waiting

pytestmark = pytest.mark.server
PATIENCE_SECONDS = 60.0


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_batcher_says_whose_disk_is_full(server_binary: object, tmp_path: Path) -> None:
    with rlbuffer.connect(run="room", config={"home": tmp_path}) as buffer:
        store, full = buffer.store, Waiting(kind=Wait.DISK, detail="the disk of /out is full")

        with leading(buffer, rlbuffer.BatcherConfig(64, step_groups=2)):
            reader = buffer.reader(timeout_seconds=20)
            reader.start()
            reader.announce(PolicyVersion(version=0))
            until(lambda: kind(store) is Wait.FILLING)
            reader.waits(full)
            until(lambda: said(store) == full)
            assert str(said(store)) == (
                "The trainer has to write, and the disk of /out is full. Make room there; it goes on by itself."
            )
            reader.waits(None)
            until(lambda: kind(store) is Wait.FILLING)
            reader.close()
