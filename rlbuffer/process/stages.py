"""What a piece of work took: seconds by stage, bytes by kind."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stages:
    """What a piece of work took, added up while it is done.

    Example:
        >>> took = Stages()
        >>> with took.measure("write"):
        ...     took.count("whole", 3)
        >>> list(took.seconds), took.bytes
        (['write'], {'whole': 3})
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        """By stage."""
        self.bytes: dict[str, int] = {}
        """By kind."""

    @contextmanager
    def measure(self, stage: str) -> Iterator[None]:
        """Adds the block's time to `stage`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start

    def count(self, kind: str, size: int) -> None:
        """Adds bytes to `kind`."""
        self.bytes[kind] = self.bytes.get(kind, 0) + size
