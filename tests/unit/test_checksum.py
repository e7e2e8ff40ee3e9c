"""The checksum is the standard library's CRC-32, whoever computes it."""

from __future__ import annotations

import runpy
import sys
import zlib
from collections.abc import Callable

import numpy as np
import pytest

from rlbuffer.wire import checksum


def loaded_anew() -> Callable[..., int]:
    """The function that a process takes which imports the module now."""
    crc32: Callable[..., int] = runpy.run_path(checksum.__file__)["crc32"]
    return crc32


def test_without_isal_it_is_the_one_of_the_standard_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "isal", None)
    monkeypatch.delitem(sys.modules, "isal.isal_zlib", raising=False)
    assert loaded_anew() is zlib.crc32


def test_with_isal_it_is_the_one_of_isal() -> None:
    isal_zlib = pytest.importorskip("isal.isal_zlib")
    assert loaded_anew() is isal_zlib.crc32


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
