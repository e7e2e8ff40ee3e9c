"""Commands of large values arrive whole, however they are packed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faults import CuttingProxy
from hypothesis import given
from hypothesis import strategies as st
from redis._parsers.encoders import Encoder
from redis.connection import PythonRespSerializer

from rlbuffer.config.settings import ServerSettings
from rlbuffer.store.server.connection import Connection
from rlbuffer.store.server.pools import Packer

pytestmark = [pytest.mark.server, pytest.mark.usefixtures("server_binary")]

SETTINGS = ServerSettings(maxmemory="256mb", appendfsync="no")


@pytest.fixture
def unix(home: Path) -> Iterator[Connection]:
    with Connection(None, home=home, server=SETTINGS, name="test") as connection:
        yield connection


@pytest.fixture
def proxy(unix: Connection) -> Iterator[CuttingProxy]:
    """The same server over TCP."""
    assert unix.embedded is not None
    with CuttingProxy(unix.embedded.address.removeprefix("unix://").removesuffix("?db=0")) as made:
        yield made


@pytest.fixture(params=["unix", "tcp"])
def connection(request: pytest.FixtureRequest, unix: Connection, proxy: CuttingProxy, home: Path) -> Iterator[Any]:
    if request.param == "unix":
        yield unix
    else:
        with Connection(proxy.url, home=home, server=SETTINGS, name="test") as over_tcp:
            yield over_tcp


@pytest.mark.parametrize(
    ("count", "size"), [(8, 2**20), (1500, 6001)], ids=["more than a socket takes", "more than a call takes"]
)
def test_values_of_which_a_call_takes_only_a_part_arrive_whole(connection: Connection, count: int, size: int) -> None:
    values = {str(i): os.urandom(size) for i in range(count)}
    for transaction in (False, True):
        with connection.client.pipeline(transaction=transaction) as pipe:
            pipe.unlink("h")
            pipe.hset("h", mapping=values)
            pipe.hlen("h")
            assert pipe.execute()[1:] == [count, count]
        assert connection.client.hgetall("h") == {name.encode(): value for name, value in values.items()}


@given(
    st.lists(
        st.one_of(
            st.text(st.characters(exclude_categories=["Cs"])),
            st.binary(),
            st.integers(),
            st.floats(),
            st.integers(5900, 6100).map(bytes),
            st.integers(2900, 3100).map("\xe9".__mul__),
        ),
        max_size=40,
    )
)
def test_a_command_is_packed_the_same_in_both_ways(args: list[Any]) -> None:
    encode = Encoder("utf-8", "strict", False).encode
    packed = [b"".join(way.pack("CONFIG SET", *args)) for way in (Packer(), PythonRespSerializer(6000, encode))]
    assert packed[0] == packed[1]
