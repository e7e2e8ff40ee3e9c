"""One `rlbuffer run` per run, on a real server: a second one hears of the first."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest

import rlbuffer
from rlbuffer.errors import ConfigError
from rlbuffer.process.identity import visible_from
from rlbuffer.run import claim
from rlbuffer.run.claim import SupervisorHeartbeat
from rlbuffer.store.member import Member


@pytest.fixture
def store(redis_url: str, run_name: str) -> Iterator[Member]:
    with rlbuffer.connect(redis_url, run=run_name) as buffer:
        yield buffer.store.role(Member)


OTHER = {"pid": os.getppid(), "host": "a.example", "space": visible_from(), "started": 1.0}


@pytest.mark.parametrize("space", [visible_from(), "another machine"])
def test_a_second_supervisor_does_not_begin_and_names_the_first(store: Member, space: str) -> None:
    over = threading.Event()

    def beat() -> None:
        while not over.wait(0.1):
            store.heartbeat("batcher", "run", {**OTHER, "space": space})

    store.heartbeat("batcher", "run", {**OTHER, "space": space})
    first = threading.Thread(target=beat)
    first.start()
    try:
        with pytest.raises(ConfigError, match=f"pid {OTHER['pid']} on a.example"):
            SupervisorHeartbeat(store, "twice").refuse_second(threading.Event())
    finally:
        over.set()
        first.join()


@pytest.mark.parametrize(
    "beat",
    [
        pytest.param({**OTHER, "left": True}, id="has left"),
        pytest.param({**OTHER, "pid": 2**22 + 1}, id="was killed here"),
        pytest.param({**OTHER, "space": "another machine"}, id="is silent elsewhere"),
    ],
)
def test_a_supervisor_begins_where_the_one_before_is_gone(
    store: Member, beat: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claim, "FRESH_SECONDS", 0.5)
    store.heartbeat("batcher", "run", beat)
    SupervisorHeartbeat(store, "once").refuse_second(threading.Event())


def test_of_two_supervisors_that_begin_at_once_the_later_one_ends(
    store: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlbuffer.process.heartbeat.BEAT_SECONDS", 0.02)
    first = SupervisorHeartbeat(store, "twice")
    time.sleep(0.01)
    second = SupervisorHeartbeat(store, "twice")
    first.start()
    second.start()
    try:
        until = time.monotonic() + 30
        while first.twin() is None or second.twin() is None:
            assert time.monotonic() < until
            time.sleep(0.01)
        first.check()
        with pytest.raises(ConfigError, match=f"pid {os.getpid()}"):
            second.check()
    finally:
        first.close()
        second.close()
