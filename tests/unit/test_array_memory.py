"""Memory of arrays is used again when nobody holds it, and never before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rlbuffer.records import memory
from rlbuffer.records.memory import empty


@pytest.mark.parametrize(
    "view",
    [
        lambda array: array,
        lambda array: array[4:8, 1],
        lambda array: array.reshape(-1)[7:].view(np.uint8)[5:],
        lambda array: np.asarray(memoryview(array))[1:],
        lambda array: torch.from_numpy(array)[2:].reshape(-1).numpy(),
    ],
    ids=["itself", "slice", "other dtype", "buffer", "tensor"],
)
def test_memory_is_used_again_once_nobody_holds_a_view_of_it(view: Callable[[Any], Any]) -> None:
    array = empty((70_001, 3), np.int32)
    array.fill(7)
    place = array.ctypes.data
    held = view(array)
    del array
    as_it_was = held.copy()
    others = [empty((70_001, 3), np.int32) for _ in range(3)]
    for other in others:
        other.fill(0)
    assert np.array_equal(held, as_it_was)
    del held
    assert empty((70_001, 3), np.float32).ctypes.data == place


def test_memory_that_nobody_holds_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "MOST_UNUSED_BYTES", 1_000_000)
    for length in range(10_000, 100_000, 1_000):
        empty((length,), np.int32)
        assert sum(size * len(its) for size, its in memory._unused.items()) <= 1_000_000 + 2 * 400_000
