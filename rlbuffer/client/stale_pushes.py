"""Does what a worker pushes go stale? It hears so here."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from typing import Any

from rlbuffer.errors import ServerUnsuitable
from rlbuffer.records.states import Reason
from rlbuffer.store.history import Dropped
from rlbuffer.store.viewer import Viewer

LEAST_PUSHED, MOST_STALE = 200, 0.2
"""Rollouts of an env from which a share is worth a word, and the share of them that may go stale."""
STALE_SECONDS = 60.0
"""Seconds between two looks, and so between two warnings."""
_log = logging.getLogger(__name__)


class StalePushes:
    """Warns a writer. One look reads the ledger; only where too much of an env went stale it asks whose that was."""

    def __init__(self, store: Viewer, worker: str) -> None:
        self._store, self._worker = store, worker
        self._envs: set[str] = set()
        """Those that it pushes groups of."""
        self._before: dict[str, tuple[int, int, float]] = {}
        """env -> rollouts pushed, rollouts gone stale, server time in seconds, from which is counted."""
        self._looked_at = time.monotonic()

    def look(self, env: str, config: Mapping[str, Any]) -> None:
        """A group of `env` is about to be pushed; `config` is the run's."""
        self._envs.add(env)
        if time.monotonic() - self._looked_at < STALE_SECONDS:
            return
        self._looked_at = time.monotonic()
        try:
            self._count(config)
        except ServerUnsuitable:  # its user may not read that
            self._looked_at = math.inf

    def _count(self, config: Mapping[str, Any]) -> None:
        ledger, now = self._store.ledger(), self._store.now()
        for name in self._envs & ledger.envs.keys():
            account = ledger.envs[name]
            pushed, stale = account.pushed[0], account.dropped.get(Reason.STALE, (0, 0))[0]
            had, lost, since = self._before.setdefault(name, (pushed, stale, now))
            if 0 <= pushed - had < LEAST_PUSHED:
                continue
            self._before[name] = pushed, stale, now
            if pushed > had and stale - lost > MOST_STALE * (pushed - had):
                self._say(name, pushed - had, stale - lost, since, config)

    def _say(self, env: str, pushed: int, stale: int, since: float, config: Mapping[str, Any]) -> None:
        drops = [
            record
            for record in self._store.history()
            if (record.get("event"), record.get("env"), record.get("reason")) == (Dropped.event, env, Reason.STALE)
            and record["at"] >= since
        ]
        own = sum(record.get("worker") == self._worker for record in drops)
        if not own:
            return
        limit = (config.get("envs") or {}).get(env, {}).get("max_age")
        _log.warning(
            "env %s: %d of the %d rollouts that were pushed lately went stale (%.0f %%; max_age is %s), and %d of the "
            "last %d groups dropped for it came from %s. Sample each ticket with the newest version "
            "(buffer.policy().current()) and push as soon as a group is made; where that is so, workers outrun the "
            "trainer: start fewer, or raise batcher.max_age",
            *(env, stale, pushed, 100 * stale / pushed, config.get("max_age") if limit is None else limit),
            *(own, len(drops), self._worker),
        )
