"""Tables as msgpack, written from columns: a list of rows, each a list of its values, without an object for any value.

The bytes are those that msgpack writes of the same lists.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgpack
import numpy as np
from numpy.typing import NDArray

TABLE_BYTES = 32 * 2**20
"""Memory of the rows that are put together at once, as far as one row fits: a single long value makes all rows of its
table wide."""
_NIL, _FALSE, _TRUE, _FLOAT64 = 0xC0, 0xC2, 0xC3, 0xCB
_WIDER = ((0x7F, 1), (0xFF, 1), (0xFFFF, 2), (0xFFFF_FFFF, 4))
"""(limit, further bytes that a whole number above it takes)."""
_UINTS = np.array([0, 0, 0xCC, 0xCD, 0, 0xCE, 0, 0, 0, 0xCF], np.uint8)
"""The first byte of a packed whole number, by its size in bytes; 0 for sizes that do not occur."""


class Column(NamedTuple):
    """The values of a column as msgpack."""

    data: NDArray[np.uint8]
    """[rows, width] bytes of each value, from the left, and anything behind them; or all values one after the other."""
    sizes: NDArray[Any]
    """[rows] bytes of each value."""


class PackedList(NamedTuple):
    """A list whose items are msgpack already."""

    length: int
    items: bytes


def integers(values: NDArray[Any]) -> Column:
    """Whole numbers, none negative, each in the fewest bytes."""
    values = values.astype(np.uint64)
    largest, sizes = values.max(initial=0), np.ones(len(values), np.uint8)
    for limit, more in _WIDER:
        if largest > limit:
            sizes += (values > limit) * np.uint8(more)
    width = int(sizes.max(initial=1))
    if width == 1:
        return Column(values.astype(np.uint8)[:, np.newaxis], sizes)
    data = np.empty((len(values), width), np.uint8)
    data[:, 0] = np.where(sizes == 1, values, _UINTS[sizes])
    data[:, 1:] = _bytes(values << (72 - 8 * sizes.astype(np.uint64)), ">u8")[:, : width - 1]
    return Column(data, sizes)


def floats(values: NDArray[Any], are_there: NDArray[np.bool_] | None = None) -> Column:
    """Numbers of 64 bits; nil for those that are not there."""
    data, sizes = np.empty((len(values), 9), np.uint8), np.full(len(values), 9, np.uint8)
    data[:, 0], data[:, 1:] = _FLOAT64, _bytes(values, ">f8")
    if are_there is not None:
        data[~are_there, 0], sizes[~are_there] = _NIL, 1
    return Column(data, sizes)


def booleans(values: NDArray[np.bool_]) -> Column:
    """True and False."""
    data = np.where(values, np.uint8(_TRUE), np.uint8(_FALSE))
    return Column(data[:, np.newaxis], np.ones(len(values), np.uint8))


def strings(values: Sequence[str]) -> Column:
    """Text."""
    is_ascii = "".join(values).isascii()
    lengths = np.array([len(value if is_ascii else value.encode()) for value in values], np.int64)
    sizes = 1 + lengths + (lengths > 31) + (lengths > 0xFF) + 2 * (lengths > 0xFFFF)
    data = np.frombuffer(msgpack.packb(values), np.uint8)
    return Column(data[len(data) - int(sizes.sum()) :], sizes)


def maps(values: Sequence[Mapping[str, Any]]) -> Column:
    """Maps. Most are empty; msgpack itself packs the others one by one."""
    packer = msgpack.Packer()
    empty = packer.pack({})
    if not any(values):
        return _same(empty, len(values))
    packed = [packer.pack(value) if value else empty for value in values]
    return Column(np.frombuffer(b"".join(packed), np.uint8), np.array([len(data) for data in packed]))


def packed_rows(columns: Sequence[Column], orders: Sequence[NDArray[np.int64]]) -> Iterator[PackedList]:
    """Yields for each of `orders` the rows that it names, in its order, as a list of lists."""
    rows = len(columns[0].sizes)
    columns = [_same(msgpack.Packer().pack_array_header(len(columns)), rows), *columns]
    longest = sum([int(sizes.max(initial=0)) for _, sizes in columns])
    if rows * longest <= TABLE_BYTES:
        data, is_written = _table(columns, slice(None))
        for order in orders:
            items = data.take(order, axis=0)[is_written.take(order, axis=0)]
            yield PackedList(len(order), items.tobytes())
        return
    page = max(1, TABLE_BYTES // longest)
    for order in orders:
        tables = [_table(columns, order[start : start + page]) for start in range(0, len(order), page)]
        yield PackedList(len(order), b"".join([data[is_written].tobytes() for data, is_written in tables]))


def _table(columns: Sequence[Column], rows: Any) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """[rows, bytes] of some rows, each as wide as the longest value of each column asks; and which bytes are used."""
    its_sizes = [sizes[rows] for _, sizes in columns]
    widths = [int(sizes.max(initial=0)) for sizes in its_sizes]
    data = np.empty((len(its_sizes[0]), sum(widths)), np.uint8)
    is_used = np.ones(data.shape, np.bool_)
    start = 0
    for (values, all_sizes), sizes, width in zip(columns, its_sizes, widths, strict=True):
        its = slice(start, start + width)
        start += width
        if width > 64:
            np.less(np.arange(width), sizes[:, np.newaxis], out=is_used[:, its])
        else:  # a byte after the other takes half as long
            for place in range(int(sizes.min(initial=width)), width):
                is_used[:, its.start + place] = sizes > place
        if values.ndim == 2:
            data[:, its] = values[rows, :width]
        elif isinstance(rows, slice):
            data[:, its][is_used[:, its]] = values
        else:
            begins = (np.cumsum(all_sizes) - all_sizes)[rows]
            for row, begin, size in zip(data[:, its], begins.tolist(), sizes.tolist(), strict=True):
                row[:size] = values[begin : begin + size]
    return data, is_used


def pack_map(record: Mapping[str, Any]) -> bytes:
    """A map as msgpack, some of whose values may be packed lists."""
    packer = msgpack.Packer()
    pieces = [packer.pack_map_header(len(record))]
    for name, value in record.items():
        is_packed = isinstance(value, PackedList)
        value = (packer.pack_array_header(value.length), value.items) if is_packed else (packer.pack(value),)
        pieces += packer.pack(name), *value
    return b"".join(pieces)


def _same(data: bytes, rows: int) -> Column:
    """A column that has the same bytes in every row."""
    return Column(np.full((rows, len(data)), np.frombuffer(data, np.uint8)), np.full(rows, len(data)))


def _bytes(values: NDArray[Any], dtype: str) -> NDArray[np.uint8]:
    """[values, 8] as numbers of 8 bytes."""
    return values.astype(dtype).view(np.uint8).reshape(-1, 8)
