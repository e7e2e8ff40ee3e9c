"""A trainer's own numbers of its weights, as versions of the run: what the doors of trainers that count share."""

from __future__ import annotations

import threading

from rlbuffer.client.stream import Stream


class Labels:
    """The trainer's labels, which grow, and the run's versions of them. From any thread.

    A trainer that goes on from a checkpoint begins with the label of that checkpoint: to the run it is a new version.
    """

    def __init__(self, stream: Stream, first: str | int) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self._versions: dict[int, int] = {}
        self._newest = stream.version(first)
        if isinstance(first, int):
            self._versions[first] = self._newest

    def version(self, label: int | None) -> int:
        """The run's version for a label; the first to name one announces it. None is the newest. One that is older than
        those that are known is the oldest of them."""
        with self._lock:
            if label is None:
                return self._newest
            if label > max(self._versions, default=-1):
                self._versions[label] = self._newest = self._stream.version(label)
            return self._versions.get(label, min(self._versions.values(), default=self._newest))
