"""Tables as msgpack, written from columns: a list of rows, each a list of its values, without an object for any value.

The bytes are those that msgpack writes of the same lists.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgpack
import numpy as np
from numpy.typing import NDArray

_NIL, _FALSE, _TRUE, _FLOAT64 = 0xC0, 0xC2, 0xC3, 0xCB
_WIDER = ((0x7F, 1), (0xFF, 1), (0xFFFF, 2), (0xFFFF_FFFF, 4))
"""A whole number above the first takes so many bytes more."""
_UINTS = np.array([0, 0, 0xCC, 0xCD, 0, 0xCE, 0, 0, 0, 0xCF], np.uint8)
"""The first byte of a whole number of so many bytes, unless it is its only one."""


class Column(NamedTuple):
    """The values of a column as msgpack."""

    data: NDArray[np.uint8]
    """[rows, width] bytes of each value, from the left; those behind them are not written."""
    sizes: NDArray[Any]
    """[rows] bytes of each value."""


class PackedList(NamedTuple):
    """A list whose items are msgpack already."""

    length: int
    items: bytes


def integers(values: NDArray[Any]) -> Column:
    """Whole numbers from 0, each in the fewest bytes."""
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
    """Text. The longest decides how much memory each takes on the way."""
    is_ascii = "".join(values).isascii()
    lengths = np.array([len(value if is_ascii else value.encode()) for value in values], np.int64)
    sizes = 1 + lengths + (lengths > 31) + (lengths > 0xFF) + 2 * (lengths > 0xFFFF)
    return _cut(msgpack.packb(values), sizes)


def maps(values: Sequence[Mapping[str, Any]]) -> Column:
    """Maps, of which most are empty: msgpack itself packs the others."""
    packer = msgpack.Packer()
    empty = packer.pack({})
    if not any(values):
        return _same(empty, len(values))
    packed = [packer.pack(value) if value else empty for value in values]
    return _cut(b"".join(packed), np.array([len(data) for data in packed]))


def packed_rows(columns: Sequence[Column], orders: Sequence[NDArray[np.int64]]) -> Iterator[PackedList]:
    """Lists of rows, each row the list of its values: of those that each of `orders` names, in its order."""
    rows = len(columns[0].sizes)
    columns = [_same(msgpack.Packer().pack_array_header(len(columns)), rows), *columns]
    widths = [int(sizes.max(initial=0)) for _, sizes in columns]
    data = np.empty((rows, sum(widths)), np.uint8)
    is_written = np.ones(data.shape, np.bool_)
    start = 0
    for (values, sizes), width in zip(columns, widths, strict=True):
        data[:, start : start + width] = values[:, :width]
        for place in range(int(sizes.min(initial=width)), width):
            is_written[:, start + place] = sizes > place
        start += width
    for order in orders:
        items = data.take(order, axis=0)[is_written.take(order, axis=0)]
        yield PackedList(len(order), items.tobytes())


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
    """So many rows of the same."""
    return Column(np.full((rows, len(data)), np.frombuffer(data, np.uint8)), np.full(rows, len(data)))


def _cut(data: bytes, sizes: NDArray[Any]) -> Column:
    """The values of these sizes that `data` ends with."""
    is_used = np.arange(sizes.max(initial=0)) < sizes[:, np.newaxis]
    out = np.empty(is_used.shape, np.uint8)
    out[is_used] = np.frombuffer(data, np.uint8)[len(data) - int(sizes.sum()) :]
    return Column(out, sizes)


def _bytes(values: NDArray[Any], dtype: str) -> NDArray[np.uint8]:
    """[values, 8] as numbers of 8 bytes."""
    return values.astype(dtype).view(np.uint8).reshape(-1, 8)
