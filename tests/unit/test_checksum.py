"""The checksum is the standard library's CRC-32, whoever computes it."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from rlbuffer.wire import checksum


@pytest.mark.parametrize(
    "data",
    [
        b"",
        bytes(24),
        np.arange(3000, dtype=np.float32).reshape(30, 100),
        np.array([True, False]),
        np.array(7),
        memoryview(bytes(range(256)) * 500)[3:],
    ],
    ids=["no bytes", "a header", "a column", "a mask", "a scalar", "a part of a message"],
)
@pytest.mark.parametrize("start", [0, 1, 0xFFFFFFFF])
def test_it_is_the_same_number_over_all_that_the_wire_holds(data: object, start: int) -> None:
    assert checksum.crc32(data, start) == zlib.crc32(memoryview(data).tobytes(), start)  # type: ignore[arg-type]
