"""One start of the trainer."""

from __future__ import annotations

from typing import Any

from rlbuffer.records.micro_batch import Step
from simulation.scheduler import Process, Scheduler
from simulation.stand_ins import Event


class Job:
    """One start of the trainer: its ranks, and what they exchange."""

    def __init__(self, scheduler: Scheduler, world_size: int, state: dict[str, Any] | None) -> None:
        self.world_size = world_size
        self.state = state
        self.processes: list[Process] = []
        self.is_over = False
        self.is_started = False
        self.at = state["step"] if state else 0
        """Last step in its state."""
        self.adapters: dict[str, int] = dict(state["adapters"]) if state else {}
        """Adapter -> its version."""
        self._held: dict[str, dict[int, str]] = {}
        self._given: dict[int, int] = {}
        """Pass -> the rank that was given its step first."""
        self._news = Event(scheduler)

    def is_first(self, rank: int, passes: int) -> bool:
        """True when no other rank was given its step of this pass yet."""
        given = self._given.setdefault(passes, rank)
        return given == rank and self.world_size > 1

    def exchange(self, rank: int, step: Step, what: str) -> list[str]:
        """An all-gather: everybody's digests, once everybody is here."""
        digests = self._held.setdefault(what, {})
        digests[rank] = step.digest
        self._news.set()
        while len(digests) < self.world_size:
            self._news.clear()
            self._news.wait()
        return list(digests.values())
