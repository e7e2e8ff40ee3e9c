"""Every small web server of a run: whom it answers, and what strangers make it say."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import logging
import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import rlbuffer
from rlbuffer.weights.serving import FileServer, make_app
from rlbuffer.worker.envs.local_engine import LocalEngine
from rlbuffer_cli.web.server import Pages
from rlbuffer_cli.whole_run import WholeRun

Serve = Callable[[Path], AbstractContextManager[str]]


@contextmanager
def weights(folder: Path) -> Iterator[str]:
    with FileServer(make_app(folder), "127.0.0.1:0") as server:
        yield f"{server.url}/"


@contextmanager
def pages(folder: Path) -> Iterator[str]:
    with rlbuffer.connect(f"memory://{uuid.uuid4().hex}", run="r", config={"home": str(folder)}) as buffer:
        buffer.writer("w")
        with Pages(WholeRun(buffer), 0) as served:
            thread = threading.Thread(target=served.serve_forever)
            thread.start()
            try:
                yield served.url
            finally:
                served.shutdown()
                thread.join()


@contextmanager
def local_engine(folder: Path) -> Iterator[str]:
    served, loop = LocalEngine(), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(served.start(), loop).result()
        yield f"{served.url}/v1/models"
        asyncio.run_coroutine_threadsafe(served.close(), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.fixture(params=[weights, pages, local_engine], ids=lambda made: made.__name__)
def serve(request: pytest.FixtureRequest) -> Serve:
    made: Serve = request.param
    return made


def status(url: str, host: str) -> int:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
    with contextlib.closing(connection):
        connection.request("GET", parts.path, headers={"Host": host})
        return connection.getresponse().status


def test_loopback_is_asked_by_a_name_that_is_only_this_machine_s(serve: Serve, tmp_path: Path) -> None:
    with serve(tmp_path) as url:
        port = urlsplit(url).port
        for host in (f"127.0.0.1:{port}", f"localhost:{port}", "localhost:8080", "[::1]:80"):
            assert status(url, host) == 200, host
        for host in (
            "evil.example",
            f"evil.example:{port}",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "[x",
            "",
        ):
            assert status(url, host) == 403, host


STRANGE = [
    b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nno colon here\r\n\r\n",
    b"GET http://[ HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
    b"GET /" + b"a" * 10_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"POST /inference/v1/generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\n\r\n{",
    b"GET /%zz/\xff?a=%ff HTTP/9.9\r\nHost: localhost\r\n\r\n",
]


def test_what_strangers_send_writes_no_traceback(
    serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO)
    with serve(tmp_path) as url:
        for strange in STRANGE:
            with socket.create_connection((urlsplit(url).hostname, urlsplit(url).port), timeout=60) as end:
                end.sendall(strange)
                end.shutdown(socket.SHUT_WR)
                with contextlib.suppress(ConnectionError):
                    while end.recv(4096):
                        pass
        assert status(url, "localhost") == 200
    assert [record.message for record in caplog.records if record.exc_info or record.levelno >= logging.WARNING] == []
    assert "Traceback" not in "".join(capfd.readouterr())
