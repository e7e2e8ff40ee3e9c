"""Daemons in threads, for tests that look at what a batcher does to a run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from store_runs import Run

from rlbuffer.client import Buffer
from rlbuffer.config import BatcherConfig
from rlbuffer.daemon import Daemon
from rlbuffer.settings import RunSettings


class Served:
    """Daemons over the run's store, and what they said."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.events: list[dict[str, Any]] = []
        self.errors: list[BaseException] = []
        self._running: list[tuple[threading.Event, threading.Thread]] = []

    def serve(self, config: BatcherConfig, **options: Any) -> Any:
        """Starts a daemon; `options` are the Daemon's. -> its store."""
        store = self.run.again()
        daemon = Daemon(
            Buffer(store, settings=RunSettings()), config, on_event=self.events.append, lease_seconds=1.0, **options
        )
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
        thread.join(timeout=20)

    def close(self) -> None:
        while self._running:
            self.stop()

    def wait_for(self, what: Callable[[], Any], seconds: float = 10.0, *, checks_errors: bool = True) -> Any:
        deadline = time.monotonic() + seconds
        while not (value := what()):
            assert not (checks_errors and self.errors), self.errors
            assert time.monotonic() < deadline, self.events[-5:]
            time.sleep(0.02)
        return value

    def said(self, kind: str, **fields: Any) -> list[dict[str, Any]]:
        return [e for e in list(self.events) if e["event"] == kind and fields.items() <= e.items()]
