"""One `rlbuffer run` per run: it says on the server that it is there, and another one does not begin beside it."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

from rlbuffer.errors import ConfigError
from rlbuffer.process.heartbeat import Heartbeats
from rlbuffer.process.identity import may_live, named
from rlbuffer.records.waiting import STARTING_SECONDS, Wait, Waiting
from rlbuffer.state.heartbeats import FRESH_SECONDS, SUPERVISOR
from rlbuffer.store.member import Member

CLAIM_LOOK_SECONDS = 0.5


class SupervisorHeartbeat(Heartbeats):
    """The heartbeat of a supervisor. Call `refuse_second` before `start`."""

    def __init__(self, store: Member, run: str) -> None:
        super().__init__("claim")
        self._store, self._name = store, run
        self.loads = ""
        """What must be loaded before most processes start."""

    def refuse_second(self, stop: threading.Event) -> None:
        """Waits until it is certain that no other supervisor is there; at once, unless one was last seen a moment ago.

        Raises:
            ConfigError: one is there.
        """
        silent = float("inf")
        while not stop.is_set():
            beat = self._store.heartbeats("batcher").get(SUPERVISOR)
            if beat is None or beat["seconds_ago"] > FRESH_SECONDS or not may_live(beat):
                return
            if beat["seconds_ago"] < silent and silent < float("inf"):
                raise self._taken(beat)
            silent = beat["seconds_ago"]
            stop.wait(CLAIM_LOOK_SECONDS)

    def check(self) -> None:
        """Raises ConfigError when another supervisor is there that began before this one: both began at once."""
        twin = self.twin()
        if twin is not None and (twin.get("started") or 0.0) < self._started:
            raise self._taken(twin)

    def _taken(self, other: Mapping[str, Any]) -> ConfigError:
        return ConfigError(
            f"run {self._name!r} has an `rlbuffer run` already, {named(other)}: two would restart each other's "
            "processes and share checkpoints. End that one first, or give this run another name (--run)",
            setting="run",
        )

    def record(self) -> dict[str, Any]:
        """In its first minute it says that all processes start: nobody need miss one of them."""
        seconds = time.time() - self._started
        waiting = Waiting(kind=Wait.STARTING, seconds=round(seconds, 1), detail=self.loads)
        return super().record() | ({"waiting": waiting.record()} if seconds < STARTING_SECONDS else {})

    def _renew(self) -> None:
        """Nothing is held but the name."""

    def _tell(self, record: dict[str, Any]) -> Mapping[str, Any] | None:
        return self._store.heartbeat("batcher", SUPERVISOR, record)
