"""The pool for whoever looks at it again and again: the first look reads it, later ones read what has changed.

What came is at the stream's end; what went is named by the steps committed since, and by the history. Whatever else
moves the pool (steps taken back, a part of a group dropped, a server that lost writes) makes the next look a first one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence

from rlbuffer.client.views import PendingGroup, counted, pool_pages
from rlbuffer.store.history import Committed, Dropped, RetiredEarly
from rlbuffer.store.pool import CLOSING_REASONS
from rlbuffer.store.records import Meta, PoolEntry
from rlbuffer.store.viewer import Viewer

MOST_RECORDS = 1000
"""Records of the history since the last look; with more of them the pool is read again."""


class PoolLook:
    """The pending groups of a run. Changes nothing; safe from several threads.

    Args:
        store: the run.
    """

    def __init__(self, store: Viewer) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._entries: dict[str, dict[str, PoolEntry]] = {}
        """Group -> entry id -> push."""
        self._cursor = self._place = "0-0"
        """Id of the last entry, and of the last record of the history, that is known."""
        self._meta: Meta | None = None

    def groups(self) -> Iterator[PendingGroup]:
        """The groups that are pending now, in the order in which they came."""
        return counted(self._store, self.pushes())

    def pushes(self) -> Mapping[str, Sequence[PoolEntry]]:
        """Group -> its pushes that are pending now, in the order in which they came."""
        with self._lock:
            meta = self._store.meta()
            if self._meta is None or not self._follow(self._meta, meta):
                # The time first: what goes while the pool is read is named by the next look's records.
                self._place, self._cursor, self._entries = f"{int(self._store.now() * 1000)}-0", "0-0", {}
                self._read_new()
            self._meta = meta
            return {group_id: list(its.values()) for group_id, its in self._entries.items() if its}

    def _read_new(self) -> None:
        for page in pool_pages(self._store, self._cursor):
            for entry in page:
                its = self._entries.setdefault(entry.group_id, {})
                its.pop(entry.replaces, None)
                its[entry.entry_id] = entry
            self._cursor = page[-1].entry_id

    def _follow(self, before: Meta, meta: Meta) -> bool:
        """Takes in what changed since the last look. -> False: that cannot be said."""
        if meta.epoch != before.epoch or meta.step < before.step or meta.retired > before.step:
            return False
        self._read_new()
        page = self._store.read_history(self._place, count=MOST_RECORDS)
        headers = list(self._store.headers(before.step + 1, meta.step, problems=[]))
        gone = [group_id for header in headers for group_id in header.group_ids]
        for entry_id, record in page.records:
            self._place = entry_id
            kind = record.get("event")
            if kind == Dropped.event and record.get("reason") in CLOSING_REASONS:
                gone.append(str(record.get("group_id")))
            elif kind not in (Committed.event, RetiredEarly.event):
                return False
        for group_id in gone:
            self._entries.pop(group_id, None)
        return len(headers) == meta.step - before.step and len(page.records) < MOST_RECORDS
