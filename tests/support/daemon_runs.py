"""Daemons in threads, for tests that look at what a batcher does to a run. They end with the run, at the latest.

Most trainers of these tests speak only once, before the batcher: it waits `word_seconds` for them to speak again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from logged import Logged
from store_runs import Run

from rlbuffer.client.buffer import Buffer
from rlbuffer.config.batcher import BatcherConfig
from rlbuffer.config.settings import RunSettings
from rlbuffer.daemon import Daemon, watches
from rlbuffer.records.group import Group
from rlbuffer.records.micro_batch import Step
from rlbuffer.records.policy_version import PolicyVersion

LEASE_SECONDS = 20.0
"""One that is stopped gives it back at once; a busy machine must not take it from one that works."""


def start_trainer(run: Run, *, world_size: int = 1) -> int:
    """A trainer that has announced its first weights. -> number of its attempt."""
    number = run.store.attempt(uuid="trainer", world_size=world_size, resume_step=0).number
    run.store.announce(number, PolicyVersion(version=0))
    return number


@contextmanager
def leading(buffer: Buffer, config: BatcherConfig) -> Iterator[None]:
    """A batcher leads the run in a thread meanwhile."""
    stop = threading.Event()
    thread = threading.Thread(target=Daemon(buffer, config).run, args=(stop,))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def pulled(buffer: Buffer, config: BatcherConfig, *groups: Group) -> Step:
    """Step 1 of a run to which these were pushed."""
    writer = buffer.writer("outside")
    for group in groups:
        assert writer.push(group).status == "stored"
    with leading(buffer, config):
        reader = buffer.reader(timeout_seconds=20)
        reader.start()
        reader.announce(PolicyVersion(version=0))
        return reader.pull(1)


class Served:
    """Daemons over the run's store, and what they said."""

    def __init__(self, run: Run, *, word_seconds: float = 0.1) -> None:
        self.run = run
        self._usual_seconds = watches.ATTEMPT_SECONDS
        self._word_seconds = word_seconds
        self.logged = Logged("rlbuffer.daemon")
        self.events = self.logged.lines
        self.errors: list[BaseException] = []
        self._running: list[tuple[threading.Event, threading.Thread]] = []

    def serve(self, config: BatcherConfig, *, settings: RunSettings | None = None, **options: Any) -> Any:
        """Starts a daemon; `options` are the Daemon's. -> its store."""
        store = self.run.again()
        self.run.closes(self)
        watches.ATTEMPT_SECONDS = self._word_seconds
        options = {"lease_seconds": LEASE_SECONDS} | options
        daemon = Daemon(Buffer(store, settings=settings or RunSettings()), config, **options)
        stop = threading.Event()

        def lead() -> None:
            try:
                daemon.run(stop)
            except BaseException as error:
                self.errors.append(error)

        thread = threading.Thread(target=lead)
        thread.start()
        self._running.append((stop, thread))
        return store

    def stop(self, which: int = 0) -> None:
        stop, thread = self._running.pop(which)
        stop.set()
        thread.join()

    def close(self) -> None:
        while self._running:
            self.stop()
        self.logged.close()
        watches.ATTEMPT_SECONDS = self._usual_seconds

    def wait_for(self, what: Callable[[], Any], seconds: float = 10.0, *, checks_errors: bool = True) -> Any:
        """The first true answer. `seconds` are an idle machine's: a busy one has ten times as long."""
        deadline = time.monotonic() + 10 * seconds
        while not (value := what()):
            assert not (checks_errors and self.errors), self.errors
            assert time.monotonic() < deadline, self.events[-5:]
            time.sleep(0.02)
        return value

    def said(self, kind: str, **fields: Any) -> list[dict[str, Any]]:
        return [e for e in list(self.events) if e["event"] == kind and fields.items() <= e.items()]
