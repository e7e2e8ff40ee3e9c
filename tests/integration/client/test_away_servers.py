"""A server that is away for minutes: what a worker's or a trainer's own loop asks for waits for it, and goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from own_server import OwnServer

import rlbuffer
from rlbuffer.client import producer
from rlbuffer.config.settings import RunSettings
from rlbuffer.daemon import Daemon
from rlbuffer.errors import RlbufferError, ServerUnreachable
from rlbuffer.store.scorer import ScorerStore
from rlbuffer.store.server import connection
from rlbuffer.store.session import Session
from rlbuffer.store.trainer import TrainerStore
from rlbuffer.store.worker import WorkerStore
from rlbuffer.testing import make_group

pytestmark = pytest.mark.server
NUMBERS = count(1)
MINUTES = 4
"""The server is away for so long, by the clock of who waits."""


class Outage:
    """The clock of this thread's calls: each of their pauses lasts a minute, and in the last one the server is started
    again. Other threads have the real one."""

    def __init__(self, server: OwnServer, minutes: int) -> None:
        self._server, self._minutes, self._thread = server, minutes, threading.get_ident()
        self.pauses = 0

    def monotonic(self) -> float:
        return time.monotonic() + 60 * self.pauses * (threading.get_ident() == self._thread)

    def sleep(self, seconds: float) -> None:
        if threading.get_ident() != self._thread:
            time.sleep(seconds)
            return
        self.pauses += 1
        if self.pauses == self._minutes:
            self._server.start()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[OwnServer]:
    with OwnServer(tmp_path) as made:
        yield made


class Loops:
    """A run with a batcher, a worker that has tickets, and a trainer that was given a step."""

    def __init__(self, url: str, feeds: str) -> None:
        settings = RunSettings(batcher=rlbuffer.BatcherConfig(64, step_groups=1, max_age=9, feeds=feeds))  # type: ignore[arg-type]
        self.buffer = rlbuffer.connect(url, run=f"away-{next(NUMBERS)}", config=settings)
        self.stop = threading.Event()
        daemon = Daemon(self.buffer, settings.batcher)
        self.batcher = threading.Thread(target=daemon.run, args=(self.stop,))
        self.batcher.start()
        self.writer = self.buffer.writer("worker-0")
        self.push(3)
        if feeds == "stream":
            self.stream = self.buffer.stream()
            self.stream.resume()
            self.stream.version("first")
            self.groups = iter(self.stream)
            self.place = next(self.groups).place
        else:
            self.reader = self.buffer.reader()
            self.steps = self.reader.steps()
            self.step = next(self.steps)
        self.tickets = self.writer.take("math", 3, timeout_seconds=30)

    def push(self, groups: int) -> None:
        self.writer.push_many([make_group(env="math", group_id=f"own.{next(NUMBERS)}") for _ in range(groups)])

    def announce(self, version: int) -> None:
        self.buffer.policy.announce(version, location="", size=0, checksum="")

    def close(self) -> None:
        self.stop.set()
        self.batcher.join()
        self.buffer.close()


@pytest.fixture
def begun(server: OwnServer) -> Iterator[Callable[[str], Loops]]:
    made: list[Loops] = []

    def begin(feeds: str) -> Loops:
        made.append(Loops(server.url, feeds))
        return made[-1]

    yield begin
    if not server.is_up:
        server.start()
    for loops in made:
        loops.close()


CALLS: dict[str, Callable[[Loops], object]] = {
    "take": lambda c: c.writer.take("math"),
    "tickets": lambda c: next(c.writer.tickets("math")),
    "renew": lambda c: c.writer.renew(c.tickets),
    "release": lambda c: c.writer.release(c.tickets),
    "skip": lambda c: c.writer.skip(c.tickets),
    "push": lambda c: c.writer.push(c.tickets[0], make_group(rollout_ids=["", ""]).rollouts),
    "push_many": lambda c: c.push(2),
    "done": lambda c: c.writer.done("math"),
    "policy.version": lambda c: c.buffer.policy.version,
    "policy.wait": lambda c: c.buffer.policy.wait(0, timeout_seconds=30),
    "policy.announce": lambda c: c.announce(1),
    "steps": lambda c: next(c.steps),
    "pull": lambda c: c.reader.pull(1),
    "trained": lambda c: c.reader.trained(c.step),
    "checkpointed": lambda c: (c.reader.trained(c.step), c.reader.checkpointed(c.step)),
    "finished": lambda c: c.reader.finished(),
    "start": lambda c: c.buffer.reader().start(),
}
STREAM_CALLS: dict[str, Callable[[Loops], object]] = {
    "writer.version": lambda c: c.writer.version("first"),
    "stream": lambda c: next(c.groups),
    "stream.version": lambda c: c.stream.version("second"),
    "stream.trained": lambda c: c.stream.trained(c.place),
    "resume": lambda c: c.buffer.stream().resume(),
}


@pytest.mark.parametrize("name", [*CALLS, *STREAM_CALLS])
def test_a_call_of_a_loop_waits_for_a_server_that_is_away_for_minutes(
    name: str, server: OwnServer, begun: Callable[[str], Loops], monkeypatch: pytest.MonkeyPatch
) -> None:
    loops = begun("stream" if name in STREAM_CALLS else "ranks")
    server.kill()
    outage = Outage(server, MINUTES)
    clock = SimpleNamespace(monotonic=outage.monotonic, sleep=outage.sleep)
    for module in (connection, producer):
        monkeypatch.setattr(module, "time", clock)
    (CALLS | STREAM_CALLS)[name](loops)
    assert server.is_up


class Enough(Exception):
    """What the caller raises that does not wait any longer."""


@pytest.mark.parametrize("name", ["take", "renew", "release", "skip", "push", "push_many", "done"])
def test_who_hears_what_a_writer_waits_for_may_end_the_waiting(
    name: str, server: OwnServer, begun: Callable[[str], Loops]
) -> None:
    loops = begun("ranks")
    heard: list[RlbufferError] = []

    def hears(error: RlbufferError) -> None:
        heard.append(error)
        raise Enough

    loops.writer = loops.buffer.writer("worker-1", on_retry=hears)
    server.kill()
    with pytest.raises(Enough):
        CALLS[name](loops)
    assert [type(error) for error in heard] == [ServerUnreachable]


def test_a_loop_that_is_asked_to_end_does_not_wait_for_a_server_that_is_away(
    server: OwnServer, begun: Callable[[str], Loops]
) -> None:
    loops = begun("ranks")
    loops.steps.close()
    reader = loops.buffer.reader()
    asked = iter([False, False])
    steps = reader.steps(until=lambda: next(asked, True))
    assert next(steps).number == 1
    reader.trained(1)
    server.kill()
    assert list(steps) == []


def test_a_reader_that_is_closed_does_not_wait_for_a_server_that_is_away(
    server: OwnServer, begun: Callable[[str], Loops]
) -> None:
    loops = begun("ranks")
    server.kill()
    threading.Timer(0.2, loops.reader.close).start()
    with pytest.raises(RlbufferError):
        loops.reader.trained(loops.step)


@pytest.mark.parametrize("role", [TrainerStore, WorkerStore, ScorerStore])
def test_every_role_of_a_patient_session_says_that_it_waits(server: OwnServer, role: type[Session]) -> None:
    heard: list[RlbufferError] = []
    with rlbuffer.connect(server.url, run=f"away-{next(NUMBERS)}") as buffer:
        store = buffer.store.patient(1.0, on_retry=heard.append).role(role)
        store.open_run()
        server.kill()
        with pytest.raises(ServerUnreachable):
            store.meta()
    assert heard
