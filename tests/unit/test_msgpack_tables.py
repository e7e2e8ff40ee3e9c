"""Lists of lists are checked by columns where they are tables, and find what is wrong wherever it stands."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from rlbuffer.errors import PayloadError
from rlbuffer.wire.bounded_msgpack import dumps, loads


@pytest.mark.parametrize("rows", [1, 2, 3, 40])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (float("nan"), "a number that is not finite"),
        ([1, [-float("inf")]], "a number that is not finite"),
        ({"a": {"b": float("inf")}}, "a number that is not finite"),
        ({b"a": 1}, "a key that is not a string"),
    ],
)
def test_a_table_of_lists_is_checked_in_every_place(rows: int, wrong: Any, message: str) -> None:
    for row in range(rows):
        for column in range(3):
            table = [[0.5, "x", {"a": 1}] for _ in range(rows)]
            loads(msgpack.packb(table), limit=66_000)
            table[row][column] = wrong
            with pytest.raises(PayloadError, match=f"^malformed msgpack: {message}"):
                loads(msgpack.packb(table), limit=66_000)


def test_lists_of_several_lengths_are_no_table() -> None:
    value: list[Any] = [[1], [1, 0.5, {}], [], [3, "x"]]
    assert loads(dumps(value), limit=100) == value
    value[1][1] = float("nan")
    with pytest.raises(PayloadError, match="not finite"):
        loads(msgpack.packb(value), limit=100)
