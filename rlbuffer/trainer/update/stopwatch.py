"""Seconds of the parts of a step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rlbuffer.process.stages import Stages


class Stopwatch:
    """Seconds per part of a step, and in all since it was made.

    Of a CUDA `device` they are the device's own, which tell a slow rank from those that wait for it; nothing is waited
    for before `seconds` is asked.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._is_cuda = device is not None and device.type == "cuda"
        self._stages = Stages()
        self._events: list[tuple[str, Any, Any]] = []
        self._began = time.perf_counter()

    @property
    def total(self) -> float:
        """Seconds since it was made, measured parts or not."""
        return time.perf_counter() - self._began

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by part."""
        seconds = self._stages.seconds
        for part, begin, end in self._events:
            end.synchronize()
            seconds[part] = seconds.get(part, 0.0) + begin.elapsed_time(end) / 1000
        self._events.clear()
        return seconds

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Adds the block's time to `part`."""
        if self._is_cuda:
            event: Any = torch.cuda.Event
            begin, end = event(enable_timing=True), event(enable_timing=True)
            begin.record()
            yield
            end.record()
            self._events.append((part, begin, end))
            return
        with self._stages.measure(part):
            yield
