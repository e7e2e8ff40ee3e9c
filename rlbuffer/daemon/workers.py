"""The leader's watch of the workers: what of them somebody must cure."""

from __future__ import annotations

import time

from rlbuffer.records.waiting import Problem, Waiting
from rlbuffer.state.heartbeats import Process, processes, worker_problems
from rlbuffer.store.viewer import Viewer

WORKERS_LOOK_SECONDS = 1.0
"""Seconds between the leader's looks at the workers' heartbeats."""


class WorkerWatch:
    """Watches the workers, whose problems the leader's own output tells."""

    def __init__(self, store: Viewer) -> None:
        self._store = store
        self._seen: tuple[Process, ...] = ()
        self._looked = float("-inf")

    def problems(self, waiting: Waiting | None) -> tuple[Problem, ...]:
        """What the workers say, and what their silence says, while the leader has `waiting`."""
        now = time.monotonic()
        if now - self._looked > WORKERS_LOOK_SECONDS:
            self._looked, self._seen = now, processes("worker", self._store.heartbeats("worker"))
        return worker_problems(self._seen, waiting)
