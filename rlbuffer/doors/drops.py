"""What the batcher has dropped, for a door whose trainer waits for the group."""

from __future__ import annotations

from rlbuffer.store.history import Dropped
from rlbuffer.store.viewer import Viewer


class Drops:
    """Reads the run's history from where it stood at the beginning."""

    def __init__(self, store: Viewer, env: str) -> None:
        self._store, self._env = store, env
        self._seen = "0-0"
        while records := store.read_history(self._seen).records:
            self._seen = records[-1][0]

    def new(self) -> dict[str, int]:
        """Group -> rollouts of it that were dropped since the last call."""
        found: dict[str, int] = {}
        for entry_id, record in self._store.read_history(self._seen).records:
            self._seen = entry_id
            if record.get("event") == Dropped.event and record.get("env") == self._env:
                group_id = str(record.get("group_id"))
                found[group_id] = found.get(group_id, 0) + int(record.get("rollouts", 0))
        return found
