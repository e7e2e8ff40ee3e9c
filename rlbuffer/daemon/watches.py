"""The leader's watch of operators' wishes while it leads."""

from __future__ import annotations

import time

from rlbuffer.store.records import Meta
from rlbuffer.store.viewer import Viewer

WISHES_SECONDS = 0.5
"""Seconds between looks at whether an operator has asked for something."""


class WishWatch:
    """Looks whether an operator has asked for something since this leadership began.

    Args:
        store: the run.
        known: `Meta.asked` as it was before anything else was read, the settings included.
        meta: the run.
    """

    def __init__(self, store: Viewer, known: int, meta: Meta) -> None:
        self._store = store
        self._known = known
        self._looked = time.monotonic()
        self.is_draining = meta.draining_ms > 0
        """No tickets are given."""

    def has_more(self) -> bool:
        """True when something was asked for: what is in memory may not be true any more."""
        now = time.monotonic()
        if now - self._looked < WISHES_SECONDS:
            return False
        self._looked = now
        asked, self.is_draining = self._store.wishes()
        return asked != self._known
