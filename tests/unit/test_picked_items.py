"""Some items of a packed list are read, as strictly as the whole; the others become no objects."""

from __future__ import annotations

import struct

import pytest

from rlbuffer.errors import PayloadError
from rlbuffer.wire.bounded_msgpack import dumps, picked


def test_items_of_a_list_are_picked_and_the_others_are_not_looked_at() -> None:
    data = b"\x94" + dumps({"a": 1}) + b"\xc7\x00\x05" + dumps([2, "π"]) + b"\xc7\x00\x05"
    assert picked(data, (0, 2), items=4) == [{"a": 1}, [2, "π"]]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "malformed msgpack: No more data to unpack."),
        (b"\x91\x01", "malformed msgpack: a list of another length"),
        (b"\x82\x01\x01", "malformed msgpack: Unexpected type header on stream"),
        (b"\x92\x01\xc1", "malformed msgpack: FormatError"),
        (b"\x92\x01\x93\x01", "malformed msgpack: No more data to unpack."),
        (b"\x92\x01\xc7\x00\x05", "malformed msgpack: extension type 5"),
        (b"\x92\x01\xdd" + struct.pack(">I", 200_000), "malformed msgpack: 200000 exceeds max_array_len(65536)"),
        (b"\x92\x01\x01\x01", "malformed msgpack: bytes after the list"),
        (b"\x92\x01\xca" + struct.pack(">f", float("nan")), "malformed msgpack: a number that is not finite"),
    ],
)
def test_items_that_nobody_here_writes_are_not_picked(data: bytes, message: str) -> None:
    with pytest.raises(PayloadError) as caught:
        picked(data, (1,), items=2)
    assert str(caught.value) == message
    assert picked(b"\x92\x01\x02", (1,), items=2) == [2], "what failed is still in the way"
