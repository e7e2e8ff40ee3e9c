"""The connection against real servers that die, refuse, hang up before they answer, or are the wrong ones."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import redis
from every_role import EveryRole
from faults import CuttingProxy, TalkingServer, info_reply
from own_server import OwnServer, free_port

from rlbuffer.client.writer import Writer
from rlbuffer.config.settings import ServerSettings
from rlbuffer.errors import (
    BufferClosed,
    ServerUnreachable,
    ServerUnsuitable,
)
from rlbuffer.process.file_locks import exclusive, is_held
from rlbuffer.store.server.binary import ServerBinary
from rlbuffer.store.server.connection import Connection
from rlbuffer.store.server.embedded import EmbeddedServer
from rlbuffer.testing import make_group

pytestmark = [pytest.mark.server, pytest.mark.usefixtures("server_binary")]

SETTINGS = ServerSettings(maxmemory="64mb", appendfsync="no")


@pytest.fixture
def connection(home: Path) -> Iterator[Connection]:
    """To an embedded server of the test's own."""
    with Connection(None, home=home, server=SETTINGS, name="test") as c:
        yield c


@pytest.fixture
def embedded(connection: Connection) -> EmbeddedServer:
    assert connection.embedded is not None
    return connection.embedded


def connect(url: str, home: Path, *, origin: str = "", patience_seconds: float = 5.0) -> Connection:
    return Connection(url, home=home, server=SETTINGS, name="test", origin=origin, patience_seconds=patience_seconds)


def socket_of(server: EmbeddedServer) -> str:
    return server.address.removeprefix("unix://").removesuffix("?db=0")


# -- what is repeated --------------------------------------------------------------------------------------------------


def write(c: Connection) -> object:
    return c.client.rpush("list", "x")


def transaction(c: Connection) -> object:
    with c.client.pipeline(transaction=True) as pipe:
        pipe.rpush("list", "x")
        pipe.pexpire("list", 60_000)
        return pipe.execute()


def script(c: Connection) -> object:
    return c.script("#!lua\nreturn redis.call('RPUSH', KEYS[1], ARGV[1])")(["list"], ["x"])


@pytest.mark.parametrize(("do", "word"), [(write, b"RPUSH"), (transaction, b"RPUSH"), (script, b"EVALSHA")])
def test_what_lost_its_reply_is_not_repeated_unless_told(
    home: Path, embedded: EmbeddedServer, do: Callable[[Connection], object], word: bytes
) -> None:
    with CuttingProxy(socket_of(embedded)) as proxy, connect(proxy.url, home) as c:
        do(c)
        proxy.swallow_replies(word, times=3)
        with pytest.raises(ServerUnreachable, match=r"Tried once\."):
            c.call(lambda: do(c), repeat=False)
        assert proxy.seen == 1
        assert c.client.llen("list") == 2


def test_idempotent_work_is_repeated_until_its_reply_comes(home: Path, embedded: EmbeddedServer) -> None:
    with CuttingProxy(socket_of(embedded)) as proxy, connect(proxy.url, home) as c:
        proxy.swallow_replies(b"HSET", times=3)
        c.call(lambda: c.client.hset("h", "f", "v"))
        assert proxy.seen == 4
        assert c.client.hgetall("h") == {b"f": b"v"}


@pytest.mark.parametrize("may_ask", [True, False])
def test_an_idle_connection_that_is_closed_is_a_loss_only_where_nobody_can_tell_who_answers(
    home: Path, connection: Connection, may_ask: bool
) -> None:
    rights = ["+@all", *([] if may_ask else ["-info"])]
    connection.client.execute_command("ACL", "SETUSER", "worker", "on", ">right", "~*", *rights)
    with connect(connection.address.replace("unix://", "unix://worker@") + "&password=right", home) as c:
        for turn in range(1, 4):
            c.call(lambda: c.blocking.get("k"))
            assert c.call(lambda: c.client.incr("k"), repeat=False) == turn
            for client in connection.client.client_list():
                if client["user"] == "worker":
                    connection.client.client_kill_filter(_id=client["id"])
        assert (c.losses == 0) == may_ask


# -- a server that dies ------------------------------------------------------------------------------------------------


def test_a_killed_embedded_server_is_back_within_the_call(connection: Connection, embedded: EmbeddedServer) -> None:
    append = connection.script("redis.call('SET', KEYS[1], ARGV[1])\nreturn redis.call('GET', KEYS[1])")
    append(["before"], ["1"])
    os.kill(embedded.pid, signal.SIGKILL)
    assert connection.call(lambda: append(["after"], ["2"])) == b"2", "its scripts are loaded again, too"
    assert connection.client.get("before") == b"1"
    assert connection.embedded is not None
    assert connection.embedded.pid != embedded.pid


def test_threads_outlive_three_kills_and_nothing_acknowledged_is_lost(connection: Connection) -> None:
    acknowledged: list[int] = []
    done = threading.Event()

    def write(worker: int) -> None:
        n = worker
        while not done.is_set():
            connection.call(lambda key=n: connection.client.hset("h", str(key), key), patience_seconds=30)
            acknowledged.append(n)
            n += 6

    def read() -> None:
        while not done.is_set():
            connection.call(lambda: connection.blocking.xread({"none": "0-0"}, block=200), patience_seconds=30)

    with ThreadPoolExecutor(8) as threads:
        futures = [*(threads.submit(write, worker) for worker in range(6)), *(threads.submit(read) for _ in range(2))]
        try:
            for _ in range(3):
                killed, known = connection.embedded, len(acknowledged)
                assert killed is not None
                os.kill(killed.pid, signal.SIGKILL)
                wait_for(lambda killed=killed: connection.embedded is not killed, 60)
                wait_for(lambda known=known: len(acknowledged) > known, 60)
        finally:
            done.set()
        for future in futures:
            future.result(60)
    assert len(acknowledged) > 6
    assert connection.client.hlen("h") == len(set(acknowledged))


def test_closing_stops_the_embedded_server_and_the_connection_stays_closed(home: Path) -> None:
    c = Connection(None, home=home, server=SETTINGS, name="test")
    c.close()
    c.close()
    with pytest.raises(BufferClosed):
        c.call(lambda: c.client.get("k"))
    assert not is_held(home / "server")


# -- addresses ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("origin", "instead"),
    [
        ("rlbuffer.toml:1", "leave redis_url out"),
        ("RLBUFFER_REDIS_URL", "unset RLBUFFER_REDIS_URL"),
        ("--redis", "leave --redis out"),
        ("", "leave redis_url out"),
    ],
)
def test_an_unreachable_server_is_named_with_the_origin_of_its_address(home: Path, origin: str, instead: str) -> None:
    port = free_port()
    url = f"redis://me:secret@127.0.0.1:{port}/0"
    with pytest.raises(ServerUnreachable) as caught:
        connect(url, home, origin=origin, patience_seconds=0.0)
    assert url.replace("secret", "***") in str(caught.value)
    assert "secret" not in str(caught.value)
    assert (f"comes from {origin}" in str(caught.value), instead in str(caught.value)) == (bool(origin), True)
    assert caught.value.exit_code == 4


def test_patience_bounds_the_tries(home: Path) -> None:
    begun = time.monotonic()
    with pytest.raises(ServerUnreachable, match=r"Tried [0-9]+ times in 0\.[0-9] s\."):
        connect(f"redis://127.0.0.1:{free_port()}", home, patience_seconds=0.4)
    assert time.monotonic() - begun < 5


# -- servers that will not do ------------------------------------------------------------------------------------------


def test_a_server_that_is_too_old_is_refused(home: Path) -> None:
    with TalkingServer(info_reply(redis_version="6.2.14")) as old, pytest.raises(ServerUnsuitable) as caught:
        connect(old.url, home, origin="--redis")
    assert "Redis 6.2.14" in str(caught.value)


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
def test_a_server_that_may_evict_keys_is_refused(home: Path, connection: Connection, policy: str) -> None:
    connection.client.config_set("maxmemory-policy", policy)
    with pytest.raises(ServerUnsuitable) as caught:
        connect(connection.address, home)
    facts = connection.describe()
    assert facts["policy"] == policy
    assert f"maxmemory-policy {policy}" in str(caught.value)


def test_a_login_that_is_refused_is_not_tried_again(home: Path, connection: Connection) -> None:
    connection.client.execute_command("ACL", "SETUSER", "worker", "on", ">right", "~*", "+@all", "-info", "-config")
    url = connection.address.replace("unix://", "unix://worker@")
    with connect(f"{url}&password=right", home) as allowed:
        # A client that may not ask for INFO is trusted to know the server.
        allowed.client.set("k", 1)
        with pytest.raises(ServerUnsuitable, match="no permissions"):
            allowed.call(lambda: allowed.client.config_get("maxmemory"))
    begun = time.monotonic()
    with pytest.raises(ServerUnsuitable, match=r"does not allow this: .*invalid username-password pair"):
        connect(f"{url}&password=wrong", home, patience_seconds=30)
    assert time.monotonic() - begun < 5


def test_a_cluster_of_one_shard_is_taken_by_the_address_of_its_server(home: Path, server_binary: ServerBinary) -> None:
    options = {"cluster-enabled": "yes", "cluster-port": str(free_port()), "appendonly": "no"}
    with OwnServer(home / "node", options=options) as node:
        node.ask("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        node.wait_for(lambda ask: ask("CLUSTER INFO")["cluster_state"] == "ok")
        with connect(node.url, home) as c:
            store = EveryRole(c, "cluster")
            writer = Writer(store, "w", epoch=store.open_run().epoch)
            pushed = writer.push_many([make_group(seed=n) for n in range(3)])  # payloads lie in several slots
            assert [one.status for one in pushed] == ["stored"] * 3


def wait_for(fact: object, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            if fact():  # type: ignore[operator]
                return
        except redis.ConnectionError:
            pass
        assert time.monotonic() < deadline
        time.sleep(0.02)


# -- how commands are sent ---------------------------------------------------------------------------------------------


def test_a_blocking_read_returns_in_time_and_blocks_nobody(connection: Connection) -> None:
    begun = time.monotonic()
    reader = threading.Thread(target=lambda: connection.blocking.xread({"s": "0-0"}, block=1000))
    reader.start()
    connection.client.set("k", 1)
    assert time.monotonic() - begun < 0.9
    reader.join()
    assert 0.9 < time.monotonic() - begun < 5
    assert connection.client.info("commandstats")["cmdstat_xread"]["calls"] == 1, "issued once, not again and again"


def test_a_forked_child_uses_connections_of_its_own(connection: Connection) -> None:
    connection.client.set("k", 0)
    child = os.fork()
    if child == 0:
        for _ in range(50):
            connection.client.incr("k")
        os._exit(0)
    for _ in range(50):
        connection.client.incr("k")
    assert os.waitpid(child, 0)[1] == 0
    assert connection.client.get("k") == b"100"


# -- more than it can accept -------------------------------------------------------------------------------------------


@pytest.fixture
def crowded(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Connection]:
    """To an embedded server that is halted, and whose queue of connections is full: the next ones hear EAGAIN. Its
    blocking client has none yet."""
    monkeypatch.setattr("rlbuffer.store.server.embedded_files.BACKLOG", 1)
    with Connection(None, home=home, server=SETTINGS, name="test") as c:
        assert c.embedded is not None
        os.kill(c.embedded.pid, signal.SIGSTOP)
        others: list[socket.socket] = []
        try:
            with suppress(BlockingIOError):
                while True:
                    others.append(socket.socket(socket.AF_UNIX))
                    others[-1].setblocking(False)
                    others[-1].connect(str(c.embedded.home / "server" / "server.sock"))
            yield c
        finally:
            os.kill(c.embedded.pid, signal.SIGCONT)
            for other in others:
                other.close()


def test_a_server_with_a_full_queue_of_connections_is_waited_for_and_nothing_is_lost(crowded: Connection) -> None:
    """A thousand processes that start at once are more than a server accepts that has little of the CPU."""
    assert crowded.embedded is not None
    tries: list[int] = []

    def write() -> int:
        tries.append(threading.get_ident())
        return int(crowded.blocking.incr("k"))

    losses = crowded.losses
    # Somebody else holds the lock that a server is started and stopped with: it is not asked for.
    with (
        exclusive(crowded.embedded.home / "server" / "start.lock", time.monotonic() + 5),
        ThreadPoolExecutor(8) as pool,
    ):
        written = [pool.submit(crowded.call, write) for _ in range(8)]
        while len(tries) < 24 or len(set(tries)) < 8:
            assert not any(future.done() for future in written), "nobody gave up"
            time.sleep(0.01)
        os.kill(crowded.embedded.pid, signal.SIGCONT)
        assert sorted(future.result() for future in written) == list(range(1, 9))
    assert crowded.losses == losses
