"""Fields of known sizes are received into memory of the caller; any other answer leaves the connection in order."""

from __future__ import annotations

import contextlib
import random
import select
import shutil
import socket
import ssl
import subprocess
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis
from faults import CuttingProxy

from rlbuffer.config.settings import ServerSettings
from rlbuffer.store.received import FieldMemory, InPlace
from rlbuffer.store.server import embedded, receiving
from rlbuffer.store.server.connection import Connection
from rlbuffer.store.server.receiving import receive_fields

pytestmark = [pytest.mark.server, pytest.mark.usefixtures("server_binary")]

SETTINGS = ServerSettings(maxmemory="256mb", appendfsync="no")
HASHES = {
    "h:1": {"0": b"a" * 30_000, "3": b"\r\n$1\r\n", "group": b"answer"},
    "h:2": {"12": random.Random(0).randbytes(300_000)},
    "h:ü": {"1": b"", "2": b"x", "group": b""},
}
SIZES = {
    key: {field: len(value) for field, value in fields.items() if field != "group"} for key, fields in HASHES.items()
}
WHOLE = [
    *([fields[field] for field in SIZES[key]] for key, fields in HASHES.items()),
    *(fields.get("group") for fields in HASHES.values()),
]


@pytest.fixture
def address(server_home: Path) -> str:
    running = embedded.find(server_home)
    assert running is not None
    return running.address


@pytest.fixture(params=["unix", "tcp", "RESP2", "TLS"])
def client(request: pytest.FixtureRequest, address: str, tmp_path: Path) -> Iterator[redis.Redis]:
    """Of a server that has the hashes."""
    path = urlsplit(address).path
    with contextlib.ExitStack() as stack:
        url = address
        if request.param == "tcp":
            url = stack.enter_context(CuttingProxy(path)).url
        if request.param == "TLS":
            url = stack.enter_context(tls_front(path, tmp_path))
        if request.param == "RESP2":
            made = stack.enter_context(redis.Redis(unix_socket_path=path, protocol=2))
        else:
            made = stack.enter_context(Connection(url, home=tmp_path, server=SETTINGS, name="test")).client
        yield filled(made)


@contextlib.contextmanager
def tls_front(path: str, folder: Path) -> Iterator[str]:
    """The URL of a port that speaks TLS before the server on that socket."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl program to make a certificate")
    certificate, key = folder / "server.crt", folder / "server.key"
    making = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "9"]
    named = ["-subj", "/CN=server", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate]
    subprocess.run(["openssl", *making, *named], check=True, capture_output=True, timeout=60)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    listener = socket.create_server(("127.0.0.1", 0))
    threads = []

    def forward(near: socket.socket) -> None:
        with (
            contextlib.suppress(OSError),
            context.wrap_socket(near, server_side=True) as inner,
            socket.socket(socket.AF_UNIX) as far,
        ):
            far.connect(path)
            while True:
                ready = [inner] if inner.pending() else select.select([inner, far], [], [])[0]
                for end, other in ((inner, far), (far, inner)):
                    if end in ready:
                        data = end.recv(1 << 16)
                        if not data:
                            return
                        other.sendall(data)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threads.append(threading.Thread(target=forward, args=(listener.accept()[0],)))
                threads[-1].start()

    threads.append(threading.Thread(target=accept))
    threads[0].start()
    try:
        yield f"rediss://127.0.0.1:{listener.getsockname()[1]}/0?ssl_ca_certs={certificate}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        # The clients are closed before the front: every forwarder ends.
        for thread in threads:
            thread.join(30)


def filled(client: redis.Redis) -> redis.Redis:
    client.delete(*HASHES)
    for key, fields in HASHES.items():
        client.hset(key, mapping=fields)  # type: ignore[arg-type]
    return client


def cut(memory: bytearray, size: int, ends: Sequence[int]) -> list[memoryview]:
    """Pieces of `size` bytes of memory, cut at these places; also empty ones."""
    bounds = [0, *sorted(min(end, size) for end in ends), size]
    return [memoryview(memory)[start:end] for start, end in pairwise(bounds)]


def memory_for(sizes: Mapping[str, Mapping[str, int]], *ends: int) -> dict[str, list[FieldMemory]]:
    """Memory of its own for every field, in pieces."""
    return {
        key: [(field, size, cut(bytearray(size), size, ends)) for field, size in fields.items()]
        for key, fields in sizes.items()
    }


def checksum(pieces: Sequence[memoryview]) -> int:
    return zlib.crc32(b"".join(pieces))


def received(client: redis.Redis, *ends: int) -> list[Any]:
    """What came for the fields, wherever it lies."""
    wanted = memory_for(SIZES, *ends)
    replies = receive_fields(client, wanted, "group", checksum)
    for i, fields in enumerate(wanted.values()):
        if isinstance(reply := replies[i], InPlace):
            replies[i] = [b"".join(pieces) for _, _, pieces in fields]
            assert reply.checksums == [*map(zlib.crc32, replies[i])], "a checksum was computed of other bytes"
    return replies


def asked_for(client: redis.Redis) -> list[Any]:
    """The same by the usual way."""
    with client.pipeline(transaction=False) as pipe:
        for key, fields in SIZES.items():
            pipe.hmget(key, list(fields))
        for key in SIZES:
            pipe.hget(key, "group")
        return pipe.execute(raise_on_error=False)


def test_fields_are_received_as_hmget_reads_them(client: redis.Redis) -> None:
    for _ in range(3):
        assert received(client) == asked_for(client) == WHOLE


def test_fields_are_received_in_pieces_of_any_sizes(client: redis.Redis) -> None:
    for ends in ((0, 1, 7, 7), (3, 29_999), tuple(range(0, 3000, 30)), (1000, 300_000)):
        assert received(client, *ends) == WHOLE


def test_nothing_is_copied_of_fields_of_the_sizes_that_were_known(client: redis.Redis) -> None:
    replies = receive_fields(client, memory_for(SIZES), "group", checksum)
    assert [type(reply) for reply in replies[: len(SIZES)]] == [InPlace] * len(SIZES)


def test_a_field_may_be_asked_for_twice(client: redis.Redis) -> None:
    wanted = memory_for({"h:1": SIZES["h:1"]}) | {"h:2": memory_for(SIZES)["h:2"] + memory_for(SIZES)["h:2"]}
    receive_fields(client, wanted, "group", checksum)
    assert [b"".join(pieces) for _, _, pieces in wanted["h:2"]] == [HASHES["h:2"]["12"]] * 2


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a field is missing": lambda client: client.hdel("h:1", "0"),
    "the last field is missing": lambda client: client.hdel("h:ü", "2"),
    "a large field is missing": lambda client: client.delete("h:2"),
    "all fields are missing": lambda client: client.delete(*HASHES),
    "one is shorter": lambda client: client.hset("h:2", "12", "short"),
    "one is longer": lambda client: client.hset("h:2", "12", "l" * 300_001),
    "one is larger than all": lambda client: client.hset("h:1", "0", "l" * 3_000_000),
    "one is of as many digits": lambda client: client.hset("h:1", "3", "12345678"),
    "another type": lambda client: (client.delete("h:2"), client.set("h:2", "text")),
    "a last one of another type": lambda client: (client.delete("h:ü"), client.set("h:ü", "text")),
}


@pytest.mark.parametrize("name", CHANGES)
def test_another_answer_is_parsed_as_ever_at_once_and_whole(client: redis.Redis, name: str) -> None:
    CHANGES[name](client)
    used = client.client_id()
    begun = time.monotonic()
    replies = received(client)
    assert time.monotonic() - begun < 2, "it waited for bytes that never come"
    assert [str(reply) for reply in replies] == [str(reply) for reply in asked_for(client)] != [*map(str, WHOLE)]
    assert client.client_id() == used, "the connection was given up"


def test_a_server_that_says_nothing_is_a_timeout(address: str) -> None:
    path = urlsplit(address).path
    with redis.Redis(unix_socket_path=path) as other, redis.Redis(unix_socket_path=path, socket_timeout=0.2) as client:
        filled(client)
        other.client_pause(1500)
        with pytest.raises(redis.TimeoutError, match="while fields were received: timed out"):
            received(client)
        other.client_unpause()
        assert received(client) == WHOLE


def test_a_connection_that_breaks_in_the_middle_is_an_error_of_the_connection(address: str, tmp_path: Path) -> None:
    with (
        CuttingProxy(urlsplit(address).path) as proxy,
        Connection(proxy.url, home=tmp_path, server=SETTINGS, name="test") as tcp,
    ):
        filled(tcp.client)
        for moment in ("before send", "sent without reply"):
            proxy.strike(moment, 1)
            with pytest.raises(redis.ConnectionError, match="while fields were received"):
                received(tcp.client)
            proxy.strike(moment, 1)
            assert tcp.call(lambda: received(tcp.client)) == WHOLE


def answer(hashes: Mapping[str, Mapping[str, bytes]]) -> bytes:
    """What a server says to the HMGETs."""
    out = b""
    for fields in hashes.values():
        out += b"*%d\r\n" % len(fields) + b"".join(b"$%d\r\n%b\r\n" % (len(v), v) for v in fields.values())
    return out


@pytest.mark.parametrize("seed", range(40))
def test_an_answer_in_any_pieces_is_taken_and_any_other_byte_between_fields_is_seen(seed: int) -> None:
    """Every second answer has one byte changed, and nothing follows it."""
    rng = random.Random(seed)
    hashes = {
        f"k{i}": {f"{j}": rng.randbytes(rng.choice([0, 1, 9, 10, 99, 700])) for j in range(rng.randrange(1, 4))}
        for i in range(rng.randrange(1, 5))
    }
    sizes = {key: {field: len(value) for field, value in fields.items()} for key, fields in hashes.items()}
    wanted = memory_for(sizes, *(rng.randrange(700) for _ in range(rng.randrange(4))))
    marks = receiving._marks(wanted)
    data = bytearray(answer(hashes))
    assert len(data) == sum(map(len, marks)) + sum(size for fields in sizes.values() for size in fields.values())
    at = None
    if seed % 2:
        before = [0, *accumulate(size for fields in sizes.values() for size in fields.values())]
        which = rng.randrange(len(marks))
        at = before[which] + sum(map(len, marks[:which])) + rng.randrange(len(marks[which]))
        data[at] ^= 1 << rng.randrange(8)
        del data[at + 1 :]
    near, far = socket.socketpair()
    with near, far:
        near.settimeout(20)

        def send() -> None:
            sent = 0
            while sent < len(data):
                size = rng.choice([1, 2, 5, 50, 2000])
                far.sendall(data[sent : sent + size])
                sent += size

        sender = threading.Thread(target=send)
        sender.start()
        begun, checksums = receiving._receive(near, wanted, checksum)
        sender.join()
    if at is not None:
        assert begun == data
    else:
        assert begun is None
        values = [value for fields in hashes.values() for value in fields.values()]
        assert [b"".join(pieces) for fields in wanted.values() for _, _, pieces in fields] == values
        assert checksums == [*map(zlib.crc32, values)]
