"""The scorer's heartbeat, which keeps its claims."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rlbuffer.process.heartbeat import Heartbeats
from rlbuffer.records.waiting import Trouble
from rlbuffer.store.scorer import ScorerStore

CLAIM_SECONDS = 8.0
"""Seconds that a claim outlives its scorer: three beats missed, and a reconnect. Then another scorer takes its groups
over."""


class Beat(Heartbeats):
    """Says what a scorer gives and has done; renews its claims."""

    def __init__(self, store: ScorerStore, name: str, *, owner: str, gives: Sequence[str], envs: Sequence[str]) -> None:
        super().__init__("rlbuffer-beat", Trouble.SCORER_STUCK)
        self.late = 0
        """Groups that somebody else had scored, or that were dropped, before this scorer was done."""
        self._store, self._name, self._owner = store, name, owner
        self._gives, self._envs = list(gives), list(envs)
        self._held: set[str] = set()

    def hold(self, entry_ids: Iterable[str]) -> None:
        """Renews these claims from now on, and no others."""
        with self._holding:
            self._held = set(entry_ids)

    def record(self) -> dict[str, Any]:
        """The content of a heartbeat; msgpack types."""
        return {"gives": self._gives, "envs": self._envs, "late": self.late} | super().record()

    def _renew(self) -> None:
        self._store.renew_scoring(sorted(self._held), owner=self._owner, ttl_seconds=CLAIM_SECONDS)

    def _tell(self, record: dict[str, Any]) -> Mapping[str, Any] | None:
        return self._store.heartbeat("scorer", self._name, record)
