"""One address in front of a primary and a replica, which is switched at a failover: a VIP, a service, a name.

Connections that were open before stay open, and lead to the server that was demoted.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from pairs import Pair

from rlbuffer.config.settings import ServerSettings
from rlbuffer.store.server.connection import Connection

pytestmark = [pytest.mark.server, pytest.mark.usefixtures("server_binary")]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with Pair(tmp_path) as made:
        yield made


@pytest.fixture
def connection(pair: Pair, tmp_path: Path) -> Iterator[Connection]:
    with Connection(pair.url, home=tmp_path, server=ServerSettings(), name="test") as made:
        yield made


def test_a_write_reaches_the_new_primary_although_the_old_ones_connections_stay_open(
    pair: Pair, connection: Connection
) -> None:
    connection.call(lambda: connection.client.set("k", 1))
    before = connection.losses
    pair.fail_over()
    assert connection.call(lambda: connection.client.incr("k"), patience_seconds=20) == 2
    assert pair.primary.ask("GET", "k") == b"2"
    assert connection.losses > before, "the new primary may lack what the old one had acknowledged"


def test_no_connection_of_before_is_used_after_a_loss(pair: Pair, connection: Connection) -> None:
    # Both clients have connections, and one is in use while the address is switched.
    connection.call(lambda: connection.blocking.get("k"))
    before = connection.losses
    begun = threading.Event()

    def write() -> None:
        while connection.losses == before:
            connection.call(lambda: connection.client.set("k", 1), patience_seconds=20)
            begun.set()

    writing = threading.Thread(target=write)
    writing.start()
    begun.wait()
    pair.fail_over()
    write()
    writing.join()
    new = f"127.0.0.1:{pair.primary.port}"
    for client in (connection.client, connection.blocking):
        assert {connection.call(lambda c=client: c.client_info()["laddr"]) for _ in range(4)} == {new}


def test_a_blocked_read_of_a_demoted_primary_is_tried_again(pair: Pair, connection: Connection) -> None:
    answers: list[object] = []

    def read() -> None:
        call = lambda: connection.blocking.xread({"s": "0-0"}, block=2000)  # noqa: E731
        while not answers or not answers[-1]:
            answers.append(connection.call(call, patience_seconds=20))

    reading = threading.Thread(target=read)
    reading.start()
    pair.primary.wait_for(lambda ask: b"cmd=xread" in ask("CLIENT", "LIST"))
    before = connection.losses
    pair.fail_over()
    connection.call(lambda: connection.client.xadd("s", {"a": 1}), patience_seconds=20)
    reading.join()
    assert answers[-1]
    assert connection.losses > before


def test_an_address_with_nobody_behind_it_is_waited_for(pair: Pair, connection: Connection) -> None:
    pair.primary.kill()
    back = threading.Timer(0.3, pair.promote)
    back.start()
    assert connection.call(lambda: connection.client.set("k", 1), patience_seconds=20) is True
    back.join()
