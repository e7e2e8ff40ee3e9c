"""Memory for micro-batches that is used again from step to step.

The first touch of fresh memory costs four to seven times the copy into it, because the kernel has to map and clear
every page. A reader therefore writes several micro-batches into one block, and a block is used again once nobody
holds an array that was cut from it.

**Lifetime rule: there is none to keep.** Every array of a micro-batch is a view of its block and holds a reference to
it; so do torch tensors made with `from_numpy`. A block is handed out again only when no such reference is left, so a
micro-batch that is kept (in a list, for a prefetch, for a test) stays as it was. Never keep a bare address
(`array.ctypes.data`) beyond the array.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

ALIGNMENT = 64
"""Bytes; a cache line, and what vector loads like."""

Allocate = Callable[[tuple[int, ...], DTypeLike], NDArray[Any]]
"""(shape, dtype) -> an array whose values are arbitrary."""


class Arena:
    """Blocks of memory that are handed out again when nothing refers to them.

    Several threads may use one: a reference can only be made from a reference, so a block that is idle stays idle until
    it is handed out.
    """

    def __init__(self, *, keep_bytes: int = 1 << 30) -> None:
        """`keep_bytes`: idle memory beyond this many bytes is given back to the system."""
        self._keep_bytes = keep_bytes
        self._blocks: list[NDArray[np.uint8]] = [np.empty(0, np.uint8)]
        # The count of a block that only this list holds, measured on the spot: interpreters differ in what they count.
        self._idle_references = self._references(0)
        self._blocks.clear()
        self._handing_out = threading.Lock()

    def _references(self, index: int) -> int:
        return sys.getrefcount(self._blocks[index])

    @property
    def held_bytes(self) -> int:
        """Bytes of all blocks, idle or in use."""
        return sum(block.nbytes for block in self._blocks)

    def block(self, size: int) -> Allocate:
        """An allocator of arrays within one block of at least `size` bytes (see :func:`aligned`)."""
        with self._handing_out:
            idle = [k for k in range(len(self._blocks)) if self._references(k) == self._idle_references]
            fitting = [k for k in idle if self._blocks[k].nbytes >= size + ALIGNMENT]
            if fitting:
                return _cutter(self._blocks[min(fitting, key=lambda k: self._blocks[k].nbytes)])
            capacity = _size_class(size + ALIGNMENT)
            for k in reversed(idle):
                if self.held_bytes + capacity > self._keep_bytes:
                    del self._blocks[k]
            chosen = np.empty(capacity, np.uint8)
            self._blocks.append(chosen)
            return _cutter(chosen)


def _size_class(size: int) -> int:
    """`size` rounded up to four classes per doubling, so that the next, slightly larger micro-batch fits as well."""
    quarter = max(ALIGNMENT, 1 << max(0, size.bit_length() - 3))
    return -(-size // quarter) * quarter


def aligned(shape: tuple[int, ...], dtype: DTypeLike) -> int:
    """Bytes that an array takes in a block."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    return -(-size // ALIGNMENT) * ALIGNMENT


def _cutter(block: NDArray[np.uint8]) -> Allocate:
    offset = -int(block.__array_interface__["data"][0]) % ALIGNMENT

    def allocate(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        nonlocal offset
        start, size = offset, math.prod(shape) * np.dtype(dtype).itemsize
        offset += aligned(shape, dtype)
        return block[start : start + size].view(dtype).reshape(shape)

    return allocate
