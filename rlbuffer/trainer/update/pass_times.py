"""The time that a rank's own passes take, which tells a slow rank from those that wait for it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class PassTimes:
    """Seconds per part of a step, on the device that does the work. On a GPU nothing is waited for before `seconds`."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._seconds: dict[str, float] = {}
        self._events: list[tuple[str, Any, Any]] = []

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Adds what the block takes to `part`."""
        if self._is_cuda:
            event: Any = torch.cuda.Event
            begin, end = event(enable_timing=True), event(enable_timing=True)
            begin.record()
            yield
            end.record()
            self._events.append((part, begin, end))
            return
        start = time.perf_counter()
        yield
        self._seconds[part] = self._seconds.get(part, 0.0) + time.perf_counter() - start

    def seconds(self) -> dict[str, float]:
        """Seconds by part."""
        for part, begin, end in self._events:
            end.synchronize()
            self._seconds[part] = self._seconds.get(part, 0.0) + begin.elapsed_time(end) / 1000
        self._events.clear()
        return dict(self._seconds)
