"""Memory of arrays is used again when nobody holds it, and never before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rlbuffer.packing.pack import pack
from rlbuffer.records import memory
from rlbuffer.records.memory import empty
from rlbuffer.records.micro_batch import DERIVED_ARRAYS
from rlbuffer.testing import make_group


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


@pytest.mark.parametrize(
    ("shape", "dtype"), [((0,), "i4"), ((3, 0), "f8"), ((1,), "?"), ((5, 2, 3), "i2"), ((8,), "i8")]
)
def test_arrays_of_any_shape_have_it_and_can_be_written(shape: tuple[int, ...], dtype: str) -> None:
    array = empty(shape, dtype)
    array.fill(1)
    assert (array.shape, array.dtype, array.tolist()) == (shape, np.dtype(dtype), np.ones(shape, dtype).tolist())


def test_a_micro_batch_that_is_kept_stays_as_it_was() -> None:
    rollouts = make_group(lengths=[40, 30]).rollouts
    names = ("input_ids", "loss_mask", "logprobs", *DERIVED_ARRAYS)
    kept = pack(rollouts, [1.0, -1.0], row_tokens=128)
    its = {name: getattr(kept, name).tolist() for name in names}
    for seed in range(1, 4):
        other = pack(make_group(lengths=[40, 30], seed=seed).rollouts, [2.0, 3.0], row_tokens=128)
        assert not any(np.shares_memory(getattr(kept, a), getattr(other, b)) for a in names for b in names)
    assert {name: getattr(kept, name).tolist() for name in names} == its
