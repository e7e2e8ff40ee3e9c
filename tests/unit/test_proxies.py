"""A proxy from the environment is for other hosts: this host's own servers are asked directly, and an error says it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from rlbuffer.errors import RlbufferError
from rlbuffer.process.environment import through_proxy
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.weights.cache import VersionCache
from rlbuffer.weights.download import make_client
from rlbuffer.worker.samplers.endpoint import Endpoint

PROXIES = ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY", "no_proxy", "NO_PROXY")
ABSENT = "http://elsewhere.invalid:8000"


class _Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(204)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def port() -> Iterator[int]:
    with HTTPServer(("127.0.0.1", 0), _Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_server_of_this_host_is_asked_without_the_proxy(
    host: str, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")  # nobody answers there
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with make_client() as client:
        assert client.get(f"http://{host}:{port}/").status_code == 204


@pytest.fixture(params=["http_proxy", "ALL_PROXY"])
def proxied(request: pytest.FixtureRequest, port: int, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """Both ways to name a proxy, one that answers with nothing of use. -> the variable, the address."""
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(request.param, f"http://somebody:secret@127.0.0.1:{port}")
    return request.param, f"127.0.0.1:{port}"


async def _asked() -> None:
    endpoint = Endpoint(ABSENT, timeout_seconds=5.0)
    try:
        await endpoint.probe()
    finally:
        await endpoint.close()


def _fetched(folder: Path) -> None:
    policy = PolicyVersion(version=1, location=f"{ABSENT}/v00000001-{'0' * 12}", checksum="0" * 64)
    VersionCache(folder).localized(policy)


@pytest.mark.parametrize("client", ["sampler", "weights"])
def test_a_request_that_fails_through_a_proxy_names_it_without_its_password(
    client: str, proxied: tuple[str, str], tmp_path: Path
) -> None:
    variable, address = proxied
    with pytest.raises(RlbufferError) as error:
        asyncio.run(_asked()) if client == "sampler" else _fetched(tmp_path)
    assert variable in str(error.value)
    assert address in str(error.value)
    assert "secret" not in str(error.value)


def test_no_proxy_is_named_for_a_host_that_is_asked_directly(
    proxied: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "elsewhere.invalid")
    assert [through_proxy(url) for url in (ABSENT, "http://localhost:1", "http://[::1]:1")] == ["", "", ""]
