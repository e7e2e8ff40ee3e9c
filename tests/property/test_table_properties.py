"""Tables written from columns are the bytes that msgpack writes of the same lists."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgpack
import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from rlbuffer.wire.tables import (
    TABLE_BYTES,
    Column,
    PackedList,
    booleans,
    floats,
    integers,
    maps,
    pack_map,
    packed_rows,
    strings,
)

WIDTHS = [n for power in (7, 8, 16, 32, 63, 64) for n in (2**power - 1, 2**power)][:-1]
"""Around each whole number that takes another byte, up to the largest."""
LENGTHS = [0, 31, 32, 255, 256, 65535, 65536]
wholes = st.sampled_from([0, *WIDTHS]) | st.integers(0, 2**64 - 1) | st.integers(0, 300)
numbers = st.floats(allow_nan=False)
texts = st.text(max_size=40) | st.text("aé", max_size=300)
rewards = st.just({}) | st.dictionaries(st.text(max_size=4), numbers, max_size=3)
rows = st.tuples(wholes, numbers, texts, st.none() | numbers, rewards, st.booleans())


def columns_of(items: list[tuple[Any, ...]]) -> list[Column]:
    whole, number, text, scored, named, truth = zip(*items, strict=True) if items else ((),) * 6
    are_there = np.array([value is not None for value in scored], bool)
    return [
        integers(np.array(whole, np.uint64)),
        floats(np.array(number, np.float64)),
        strings(text),
        floats(np.array([0.0 if value is None else value for value in scored]), are_there),
        maps(named),
        booleans(np.array(truth, bool)),
    ]


@given(st.lists(rows, max_size=40), st.integers(0, 9), st.integers(1, 3))
@example([(n, -0.0, "é" * n, None, {}, False) for n in range(33)], 0, 1)
@example([], 0, 2)
def test_rows_are_what_msgpack_writes_of_them_in_any_order(items, seed, lists):
    order = np.random.default_rng(seed).permutation(len(items))
    orders = [order[start::lists] for start in range(lists)]
    made = packed_rows(columns_of(items), orders)
    expected = [[items[place] for place in its] for its in orders]
    assert [pack_map({"a": 1, "rows": its, "b": [[1]]}) for its in made] == [
        msgpack.packb({"a": 1, "rows": its, "b": [[1]]}) for its in expected
    ]


def test_every_width_of_a_number_and_a_text_is_written_beside_every_other():
    for dtype in ("u1", "<u4", "<u8"):
        its = [number for number in WIDTHS if number <= np.iinfo(dtype).max]
        (made,) = packed_rows([integers(np.array(its, dtype))], [np.arange(len(its))])
        assert made == PackedList(len(its), b"".join(msgpack.packb([number]) for number in its))
    for letter in "aé":
        its = [letter * length for length in LENGTHS]
        (made,) = packed_rows([strings(its)], [np.arange(len(its))])
        assert made.items == b"".join(msgpack.packb([text]) for text in its)


def test_numbers_of_half_the_width_are_written_as_they_are():
    its = np.array([0.1, -0.0, 1e-45, 3.4e38], np.float32)
    (made,) = packed_rows([floats(its)], [np.arange(4)])
    assert made.items == b"".join(msgpack.packb([number]) for number in its.tolist())


def test_a_list_of_many_rows_or_columns_has_a_longer_head():
    for count in (15, 16, 65536):
        (made,) = packed_rows([integers(np.zeros(count))], [np.arange(count)])
        assert pack_map({"rows": made}) == msgpack.packb({"rows": [[0]] * count})
    (made,) = packed_rows([integers(np.zeros(2))] * 16, [np.arange(2)])
    assert made.items == msgpack.packb([0] * 16) * 2


def test_a_long_value_does_not_make_a_large_table_of_its_width():
    count = 20_000
    ids = ["x"] * count
    ids[7], named = "y" * 60_000, [{"correct": 1.0}, *[{}] * (count - 1)]
    order = np.random.default_rng(0).permutation(count)
    tracemalloc.start()
    try:
        (made,) = packed_rows([strings(ids), integers(np.arange(count)), maps(named)], [order])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert made.items == b"".join(msgpack.packb([ids[n], n, named[n]]) for n in order.tolist())
    assert peak < 4 * TABLE_BYTES  # 1.2 GB as one table
