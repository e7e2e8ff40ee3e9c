"""A step that is being pulled while the one before it trains."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass, field

from rlbuffer.records.micro_batch import Step


class NotAwaited(Exception):
    """The caller of :meth:`rlbuffer.client.reader.Reader.steps` does not wait any longer, or the run has ended."""


@dataclass(frozen=True, slots=True, eq=False)
class Fetch:
    """A pull under way. Nobody waits for an abandoned one, so it must not keep its thread."""

    future: Future[Step]
    is_abandoned: threading.Event = field(default_factory=threading.Event)

    def abandon(self) -> None:
        """Lets its thread go, and takes it back where it has not begun."""
        self.is_abandoned.set()
        self.future.cancel()
