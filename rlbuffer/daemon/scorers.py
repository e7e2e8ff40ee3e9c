"""The leader's watch of the scorers: groups that lack what no scorer gives."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rlbuffer.batcher.batcher import Batcher
from rlbuffer.records.waiting import Problem, Trouble
from rlbuffer.state.heartbeats import FRESH_SECONDS
from rlbuffer.store.viewer import Viewer

SCORERS_LOOK_SECONDS = 1.0
"""Seconds between the leader's looks at which scorers are alive, while groups wait for one."""


class ScorerWatch:
    """Watches the scorers that give what the pending groups need."""

    def __init__(self, store: Viewer, batcher: Batcher) -> None:
        self._store = store
        self._batcher = batcher
        self._beats: list[Mapping[str, Any]] = []
        self._looked = float("-inf")

    def problems(self) -> tuple[Problem, ...]:
        """A problem for each need of pending groups that no living scorer gives."""
        needs = self._batcher.needs
        if not needs:
            return ()
        now = time.monotonic()
        if now - self._looked > SCORERS_LOOK_SECONDS:
            self._looked = now
            beats = self._store.heartbeats("scorer").values()
            self._beats = [beat for beat in beats if beat["seconds_ago"] <= FRESH_SECONDS]  # its claims are lost, too
        return tuple(
            Problem(kind=Trouble.NO_SCORER, env=env, count=count, detail=need)
            for (env, need), count in sorted(needs.items())
            if not any(_gives(beat, env, need) for beat in self._beats)
        )


def _gives(beat: Mapping[str, Any], env: str, need: str) -> bool:
    """Any process may write a heartbeat, so nothing in it is certain to be there."""
    gives, envs = beat.get("gives"), beat.get("envs")
    return isinstance(gives, list) and need in gives and (not envs or (isinstance(envs, list) and env in envs))
