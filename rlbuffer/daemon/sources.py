"""The leader's watch of the sources: the envs that send nothing more."""

from __future__ import annotations

import time

from rlbuffer.batcher.batcher import Batcher
from rlbuffer.store.records import Sources
from rlbuffer.store.viewer import Viewer

SOURCES_SECONDS = 0.5
"""Seconds between the leader's looks at which envs are done."""


class SourceWatch:
    """Tells the batcher which envs are done.

    An env is done for the server before its last groups are read: pushes come first, then the word that it was the last
    one. So what was seen counts only once the pool has been read to its end after it.
    """

    def __init__(self, store: Viewer, batcher: Batcher) -> None:
        self._store = store
        self._batcher = batcher
        self._seen: Sources | None = None
        self.known = Sources()
        """What the batcher knows."""
        self._looked = float("-inf")

    def look(self) -> None:
        """Asks the server now and then. Before the pool is read."""
        now = time.monotonic()
        if now - self._looked >= SOURCES_SECONDS:
            self._looked, self._seen = now, self._store.sources()

    def update_ends(self) -> None:
        """The pool was read to its end since the last look."""
        seen, self._seen = self._seen, None
        if seen is not None:
            self.known = seen
            expected = {f"[worker.{section}]" for section in seen.expected}
            self._batcher.set_sources(done=seen.done, said=seen.said, others=seen.open | expected)
