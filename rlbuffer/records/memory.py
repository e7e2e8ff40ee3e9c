"""Memory of arrays that is used again from step to step.

The first touch of fresh memory costs several times the copy into it: the kernel maps and clears every page.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

MOST_UNUSED_BYTES = 2**30
"""Beyond this it is given back: a run whose lengths change would keep memory of each size that it had."""
_unused: defaultdict[int, list[memoryview]] = defaultdict(list)
"""Bytes -> memory of that size that nobody holds."""


def empty(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """An array whose values are arbitrary, in memory that was used before if there is any.

    There is no lifetime rule to keep: a view of an array holds it, as does a torch tensor made with `from_numpy`, and
    its memory is used again when nobody holds it any more. Never keep a bare address beyond the array.
    """
    kind, items = np.dtype(dtype), math.prod(shape)
    size = items * kind.itemsize
    quarter = 1 << max(size.bit_length() - 3, 0)
    size = (size // quarter + 1) * quarter  # four sizes in a doubling: most steps find one
    try:
        memory = _unused[size].pop()
    except IndexError:
        memory = np.empty(size, np.uint8).data
    array = np.frombuffer(memory, kind, items)
    # The base of every view is `array`, as that of `array` is no array.
    weakref.finalize(array, _keep, memory).atexit = False
    return array.reshape(shape)


def _keep(memory: memoryview) -> None:
    if sum([size * len(arrays) for size, arrays in [*_unused.items()]]) > MOST_UNUSED_BYTES:
        _unused.clear()
    _unused[len(memory)].append(memory)
