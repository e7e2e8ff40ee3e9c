"""Writer, daemon and reader together on a real server: what a user of the library meets."""

from __future__ import annotations

import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
import waits
from logged import Logged

import rlbuffer
from rlbuffer.daemon import Daemon
from rlbuffer.errors import BatcherFailed, BatchTimeout, ConfigError
from rlbuffer.records.waiting import Wait, Waiting
from rlbuffer.testing import make_group

CONFIG = rlbuffer.BatcherConfig(64, step_groups=2, max_age=8)


@dataclass
class Place:
    """One run on one server, its daemons and its buffers; everything is closed at the end."""

    url: str
    run: str
    buffers: list[rlbuffer.Buffer] = field(default_factory=list)
    daemons: list[tuple[threading.Event, threading.Thread]] = field(default_factory=list)
    logged: Logged = field(default_factory=lambda: Logged("rlbuffer.daemon"))
    errors: list[BaseException] = field(default_factory=list)

    def connect(self) -> rlbuffer.Buffer:
        buffer = rlbuffer.connect(self.url, run=self.run)
        self.buffers.append(buffer)
        return buffer

    def serve(self, config: rlbuffer.BatcherConfig = CONFIG, **options: Any) -> threading.Event:
        stop = threading.Event()
        daemon = Daemon(self.connect(), config, lease_seconds=1.0, **options)

        def lead() -> None:
            try:
                daemon.run(stop)
            except Exception as error:
                self.errors.append(error)

        thread = threading.Thread(target=lead)
        thread.start()
        self.daemons.append((stop, thread))
        return stop

    def stop_serving(self) -> None:
        for stop, _ in self.daemons:
            stop.set()
        for _, thread in self.daemons:
            thread.join(timeout=20)
        self.daemons.clear()

    def wait_for(self, what: Callable[[], Any], seconds: float = 20) -> Any:
        deadline = time.monotonic() + seconds
        while not (value := what()):
            assert time.monotonic() < deadline, f"lines: {self.logged.lines[-5:]} errors: {self.errors}"
            time.sleep(0.02)
        return value


@pytest.fixture
def place(redis_url: str) -> Iterator[Place]:
    made = Place(redis_url, f"loop-{uuid.uuid4().hex[:8]}")
    yield made
    made.stop_serving()
    made.logged.close()
    for buffer in made.buffers:
        buffer.close()


def push_groups(place: Place, seeds: range, **values: Any) -> None:
    writer = place.connect().writer("w")
    for seed in seeds:
        assert writer.push(make_group(seed=seed, size=2, rewards=[0.0, 1.0], **values)).status == "stored"


def take_steps(reader: rlbuffer.Reader, count: int) -> list[rlbuffer.Step]:
    out = []
    for step in reader.steps():
        out.append(step)
        if len(out) == count:
            reader.trained(step)
            return out
    raise AssertionError("the reader ended by itself")


def start_trainer(buffer: rlbuffer.Buffer, reader: rlbuffer.Reader | None = None) -> None:
    """An attempt with version 0 announced, as a trainer does before its first step."""
    (reader or buffer.reader()).start(0)
    buffer.policy().announce(0, location="", size=0, checksum="")


def test_the_leader_goes_on_where_another_stopped(place: Place) -> None:
    place.serve()
    push_groups(place, range(4))
    reader = place.connect().reader(timeout_seconds=20)
    steps = reader.steps()
    assert next(steps).number == 1
    place.stop_serving()
    place.serve()
    assert next(steps).number == 2
    push_groups(place, range(10, 14))
    assert next(steps).number == 3
    assert place.connect().verify().ok


def test_a_timeout_says_what_the_batcher_waits_for(place: Place) -> None:
    place.serve()
    push_groups(place, range(1))
    reader = place.connect().reader(timeout_seconds=2.5)
    with pytest.raises(BatchTimeout, match=r"no batch for step 1 within 2\.5 s\. .*a goes next"):
        next(reader.steps())


def test_an_estimator_that_fails_stops_the_batcher_and_every_waiting_rank_hears_why(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("estimators_of_a_test")
    module.half = lambda rewards, lengths, group: rewards[1:]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "estimators_of_a_test", module)
    place.serve(
        rlbuffer.BatcherConfig(64, step_groups=2, max_age=8, envs={"a": {"advantage": "estimators_of_a_test:half"}})
    )
    push_groups(place, range(2))
    reader = place.connect().reader(timeout_seconds=30)
    sentence = (
        r"ConfigError: batcher.envs.a.advantage = 'estimators_of_a_test:half' gave numbers of shape \[1\] for group "
        r"\S+ of env a: it must be one for each of 2 rollouts"
    )
    with pytest.raises(BatcherFailed, match=rf"the batcher of run .* failed: {sentence}"):
        next(reader.steps())
    assert isinstance(place.wait_for(lambda: place.errors)[0], ConfigError)
    account = place.connect().ledger().envs["a"]
    assert (account.pending[0], dict(account.dropped)) == (4, {})


def test_a_group_that_lost_payloads_of_several_parts_before_the_commit_drops_as_a_whole(place: Place) -> None:
    buffer = place.connect()
    start_trainer(buffer)
    writer = buffer.writer("w")
    for part in range(3):
        ids = [f"a.0/{part}"]
        writer.push(make_group(group_id="a.0", size=1, rewards=[float(part)], planned_size=3, rollout_ids=ids))
    client = buffer.store.client
    keys = sorted(key for key in client.scan_iter("rlb:*:g:a.0:*") if place.run in str(key))
    assert len(keys) == 3
    for key in keys[:2]:
        client.delete(key)
    push_groups(place, range(1, 3))
    place.serve()
    place.wait_for(lambda: buffer.store.meta().step == 1)
    place.wait_for(lambda: buffer.ledger().envs["a"].pending[0] == 0)
    assert place.errors == []
    account = buffer.ledger().envs["a"]
    assert (account.pushed[0], account.packed[0], account.dropped["invalid"][0]) == (7, 4, 3)


def test_a_trainer_that_has_gone_silent_is_named_as_what_everybody_waits_for(place: Place) -> None:
    place.serve()
    buffer = place.connect()
    reader = buffer.reader()
    start_trainer(buffer, reader)
    push_groups(place, range(6))
    busy = Waiting(kind=Wait.TRAINER_BUSY, step=2, limit=1)
    place.wait_for(lambda: waits.said(buffer.store) == busy)
    reader.close()
    keys, client = buffer.store.keys, buffer.store.client  # type: ignore[attr-defined]
    client.hset(keys.trainer, "seen", int(1000 * (buffer.store.now() - 25)))
    gone = Waiting(kind=Wait.TRAINER_GONE, step=2, seconds=20.0)
    place.wait_for(lambda: waits.said(buffer.store) == gone)
