"""Commands of large values arrive whole, however they are packed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from faults import CuttingProxy
from hypothesis import given
from hypothesis import strategies as st
from redis._parsers.encoders import Encoder
from redis.connection import PythonRespSerializer

from rlbuffer.config.settings import ServerSettings
from rlbuffer.errors import ServerUnreachable
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


def test_a_connection_that_breaks_between_the_pieces_is_a_lost_one(proxy: CuttingProxy, home: Path) -> None:
    with Connection(proxy.url, home=home, server=SETTINGS, name="test", patience_seconds=5.0) as connection:
        values = {str(i): b"*" * 2**20 for i in range(8)}  # the proxy looks for this byte in what comes
        proxy.strike("before send", 3)
        with pytest.raises(ServerUnreachable, match=r"Tried once\."):
            connection.call(lambda: connection.client.hset("h", mapping=values), repeat=False)
        assert connection.call(lambda: connection.client.exists("h")) == 0


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


@pytest.mark.parametrize("argument", [True, None, [1], object()])
def test_an_argument_that_cannot_be_sent_is_named_whatever_else_the_command_has(argument: Any) -> None:
    packer = Packer()
    for other in (b"small", bytes(10_000)):
        with pytest.raises(redis.DataError, match=f"Invalid input of type: '{type(argument).__name__}'"):
            packer.pack("SET", "k", other, argument)
