"""Refusals: what a worker refuses of samplers, and of servers that answer what they should not."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import sys
import threading
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from answering_server import answering

from rlbuffer.config.settings import WorkerSettings
from rlbuffer.errors import ConfigError, RequestFailed, RlbufferError, SamplerUnavailable, WeightsError
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.weights.files import publish
from rlbuffer.weights.shapes import names_and_shapes
from rlbuffer.worker.samplers import Sampling, endpoint, make_sampler
from rlbuffer.worker.samplers.decoding import Decoder
from rlbuffer.worker.samplers.endpoint import GENERATE, Endpoint, encoded
from rlbuffer.worker.samplers.openai import OpenAIOptions, OpenAISampler

PROMPT = np.array([1, 2], np.int32)
ONE = Sampling(max_new_tokens=1)
SLOW = None
"""A server that gives no answer."""


def choices(*given: dict[str, Any]) -> tuple[int, str]:
    return 200, json.dumps({"choices": given})


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (SLOW, SamplerUnavailable),
        ((500, "engine\ndead"), SamplerUnavailable),
        ((400, "no such model"), RequestFailed),
        ((404, ""), ConfigError),
        ((200, "hello"), SamplerUnavailable),
        (choices(), RequestFailed),
        (choices({"text": "a"}), RequestFailed),
        (choices({"token_ids": [1, 2], "logprobs": {"token_logprobs": [-1.0]}}), RequestFailed),
        (choices({"token_ids": [1], "logprobs": {"token_logprobs": [-1.0]}}), RequestFailed),
    ],
)
def test_a_server_that_answers_wrongly_is_named_with_what_it_said(
    answer: tuple[int, str] | None, error: type[RlbufferError]
) -> None:
    async def ask(url: str) -> None:
        endpoint = Endpoint(url, timeout_seconds=0.3 if answer == SLOW else 60.0)
        try:
            await endpoint.sample(PROMPT, n=1, sampling=ONE)
        finally:
            await endpoint.close()

    with answering(lambda path: answer) as url, pytest.raises(error, match=url) as caught:
        asyncio.run(ask(url))
    if answer and answer[0] in (400, 500):
        assert " ".join(answer[1].split()) in str(caught.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_server_of_this_host_is_asked_without_the_proxy(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")  # nobody answers there
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)

    async def ask(url: str) -> Any:
        endpoint = Endpoint(url, timeout_seconds=60.0)
        try:
            return await endpoint.call("POST", "/", {})
        finally:
            await endpoint.close()

    with answering(lambda path: (200, "7")) as url:
        assert asyncio.run(ask(url.replace("127.0.0.1", host))) == 7
    with pytest.raises(SamplerUnavailable, match=r"vllm:8000/ cannot be reached: .*127\.0\.0\.1:1"):
        asyncio.run(ask("http://vllm:8000"))  # by the proxy


@pytest.mark.parametrize("given", ["a\ud7ff \u2028 \U0001f333", 2**64, -(2**63) - 1, 1.5e300, [None, True, 1, -2, 0.1]])
def test_what_a_server_is_asked_is_the_same_value_of_json(given: object) -> None:
    assert json.loads(encoded({"asked": given})) == {"asked": given}


def test_a_request_of_many_bytes_reaches_a_server_whole(tmp_path: Path) -> None:
    whole = "x" * 3_000_000
    with Server(None) as server:

        async def ask() -> None:
            endpoint = Endpoint(server.url, timeout_seconds=60.0)
            try:
                await endpoint.call("POST", "/any", {"text": whole})
            finally:
                await endpoint.close()

        asyncio.run(ask())
    assert server.bodies == [("/any", {"text": whole})]


def test_a_server_that_is_away_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"

    async def ask() -> None:
        endpoint = Endpoint(url, timeout_seconds=60.0)
        try:
            await endpoint.identify()
        finally:
            await endpoint.close()

    with pytest.raises(SamplerUnavailable, match=f"{url}/v1/models cannot be reached"):
        asyncio.run(ask())


@pytest.mark.parametrize(
    "options",
    [
        {"servers": "http://vllm:8000", "port": 1},
        {},
        {"servers": ["vllm"]},
    ],
)
def test_options_that_name_no_server_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        make_sampler(WorkerSettings(env="vcopy", sampler="openai", sampler_options=options))


class Server:
    """A server that answers every POST of a sampler with one token; notes what it was asked.

    With `answers_per_connection` it cuts a connection when one more request comes on it, as a server does that closes
    an idle connection just as it is used again.
    """

    def __init__(self, versions: list[dict[str, Any]] | None, *, answers_per_connection: int | None = None) -> None:
        self.asked: list[str] = []
        self.bodies: list[tuple[str, Any]] = []
        """What came with each POST, by path."""
        asked, bodies = self.asked, self.bodies
        choice = {"token_ids": [1], "logprobs": {"token_logprobs": [-1.0]}}

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.0" if answers_per_connection is None else "HTTP/1.1"
            answered = 0
            """Answers on this connection: a handler serves one."""

            def do_GET(self) -> None:
                asked.append(self.path)
                self.answer({"data": [{"id": "m"}]})

            def do_POST(self) -> None:
                asked.append(self.path)
                body = self.rfile.read(int(self.headers["Content-Length"] or 0))
                bodies.append((self.path, json.loads(body) if body else None))
                is_there = versions is not None or self.path != GENERATE
                self.answer({"choices": [choice | {"weight_versions": versions}]}, 200 if is_there else 404)

            def answer(self, content: dict[str, Any], status: int = 200) -> None:
                if self.answered == answers_per_connection:
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    self.connection.close()  # with a reset
                    self.close_connection = True
                    return
                self.answered += 1
                data = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    def __enter__(self) -> Server:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def published(directory: Path, version: int, size: int = 2) -> PolicyVersion:
    return publish(directory, version, state={"weight": torch.zeros(size)}, config={}, keep=1)


def sampled(directory: Path, times: int, *, then: PolicyVersion | None = None, seed: int = 0, **options: Any) -> None:
    """Loads version 0, samples so often, and loads another one."""

    async def ask() -> None:
        sampler = OpenAISampler(OpenAIOptions(**options), seed=seed)
        try:
            await sampler.load(published(directory, 0))
            for _ in range(times):
                assert len(await sampler.sample(PROMPT, n=1, sampling=ONE)) == 1
            if then is not None:
                await sampler.load(then)
        finally:
            await sampler.close()

    asyncio.run(ask())


@pytest.mark.parametrize(("own", "expected"), [({}, 3600.0), ({"timeout_seconds": 30.0}, 30.0)])
def test_a_request_may_take_as_long_as_a_rollout(own: dict[str, float], expected: float) -> None:
    """A completion of 32,000 tokens takes longer than ten minutes."""
    settings = WorkerSettings(env="vcopy", sampler="openai", rollout_timeout_seconds=3600.0)
    sampler = OpenAISampler.make(settings, OpenAIOptions(servers="http://vllm:8000", **own), seed=0)
    assert [endpoint.timeout_seconds for endpoint in sampler._endpoints] == [expected]
    asyncio.run(sampler.close())


def test_a_server_that_was_restarted_is_left_out(tmp_path: Path) -> None:
    with Server([{"version": "default", "start": 0, "end": 1}]) as server, pytest.raises(SamplerUnavailable):
        sampled(tmp_path, 1, servers=server.url)


def test_every_load_into_a_server_comes_with_another_seed_and_no_request_with_one(tmp_path: Path) -> None:
    """Two servers, two versions, and two samplers, as a worker has them that starts again."""
    good: list[dict[str, Any]] = [{"version": "0", "start": 0, "end": 1}]
    with Server(good) as one, Server(good) as two:
        for life in range(2):
            sampled(tmp_path, 1, then=published(tmp_path, 1), seed=life, servers=(one.url, two.url))
        bodies = [*one.bodies, *two.bodies]
    seeds = [body["args"][2] for path, body in bodies if path == "/collective_rpc"]
    assert len(seeds) == 8
    assert len(set(seeds)) == 8
    assert all("seed" not in body["sampling_params"] for path, body in bodies if path == GENERATE)


def test_a_connection_that_is_closed_as_it_is_used_again_takes_no_server_down(tmp_path: Path) -> None:
    with Server([{"version": "0", "start": 0, "end": 1}], answers_per_connection=1) as server:
        sampled(tmp_path, 3, servers=server.url)
    assert server.asked.count(GENERATE) > 4, "some were asked twice"


def test_a_server_that_closes_every_connection_is_named(tmp_path: Path) -> None:
    with Server(None, answers_per_connection=0) as server, pytest.raises(SamplerUnavailable, match=server.url):
        sampled(tmp_path, 0, servers=server.url)
    assert set(server.asked) == {"/v1/models"}
    assert len(server.asked) > 1, "it was asked again"


@pytest.mark.skipif(sys.platform != "linux", reason="what a full queue does differs elsewhere")
def test_a_server_that_takes_no_connection_is_told_from_one_that_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "CONNECT_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, ExitStack() as waiting:
        for _ in range(2):  # they fill its queue
            one = waiting.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(full.getsockname())

        async def ask() -> None:
            served = Endpoint(f"http://127.0.0.1:{full.getsockname()[1]}", timeout_seconds=60.0)
            try:
                await served.call("GET", "/version", seconds=60.0)
            finally:
                await served.close()

        with pytest.raises(SamplerUnavailable, match=r"cannot be reached: no connection within 0\.3 s"):
            asyncio.run(ask())


def test_a_server_that_was_started_without_the_endpoint_is_refused(tmp_path: Path) -> None:
    with Server(None) as server, pytest.raises(ConfigError, match="--enable-scale-out") as caught:
        sampled(tmp_path, 0, servers=server.url)
    assert caught.value.setting == "sampler_options.servers"


def test_weights_of_another_model_are_refused_before_a_server_is_asked(tmp_path: Path) -> None:
    with Server([{"version": "0", "start": 0, "end": 1}]) as server, pytest.raises(WeightsError):
        sampled(tmp_path, 0, then=published(tmp_path / "other", 1, size=3), servers=server.url)
    assert server.asked.count("/collective_rpc") == 1


def test_weights_that_are_no_weights_are_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"short")
    with pytest.raises(WeightsError) as caught:
        names_and_shapes(tmp_path)
    assert str(caught.value).startswith(f"the weights at {tmp_path} cannot be read: Error while deserializing header")


# -- our own -----------------------------------------------------------------------------------------------------------
def test_a_sampler_without_its_libraries_says_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rlbuffer.worker.samplers.decoding", None)
    with pytest.raises(ConfigError):
        make_sampler(WorkerSettings(env="vcopy"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has what the test wants to miss")
def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError):
        Decoder(seed=0, device="cuda")
