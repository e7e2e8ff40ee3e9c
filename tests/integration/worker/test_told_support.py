"""The tokens that an engine says it left, read as vLLM 0.32 publishes them. The answers are made up: on a CPU no engine
gives them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from rlbuffer.config.settings import WorkerSettings
from rlbuffer.errors import ConfigError, RequestFailed
from rlbuffer.worker.samplers import Completion, Sampling
from rlbuffer.worker.samplers.base import logprobs_mode, of_an_engine
from rlbuffer.worker.samplers.endpoint import GENERATE, Endpoint
from rlbuffer.worker.samplers.openai import OpenAIOptions, OpenAISampler
from rlbuffer.worker.samplers.vllm import VllmOptions, VllmSampler, _completion

URL = "http://vllm:8000"
RESTRICTED = Sampling(max_new_tokens=2, temperature=0.7, top_k=3, top_p=0.9, min_p=0.05)
MASK = [[4, 7, 9], [5]]
LEFT = [[4, 7, 9], [5, -1, -1]]


class Server:
    """Answers with two tokens, and what it has left; refuses what vLLM refuses that tells it."""

    def __init__(self, mask: list[list[int]] | None) -> None:
        self.asked: list[dict[str, Any]] = []
        self._mask = mask

    async def _say(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}], "is_paused": False})

    async def _generate(self, request: web.Request) -> web.Response:
        parameters = (await request.json())["sampling_params"]
        self.asked.append(parameters)
        if self._mask is not None and parameters["top_k"] <= 0:
            return web.Response(status=400, text="sampling distribution replay requires top_k > 0")
        if self._mask is not None and parameters["temperature"] <= 0:
            return web.Response(status=400, text="sampling distribution replay requires temperature > 0")
        choice = {
            "token_ids": [4, 5],
            "logprobs": {"token_logprobs": [-0.5, 0.0]},
            "weight_versions": [{"version": "3", "start": 0, "end": 2}],
            "finish_reason": "length",
            "sampling_mask": self._mask,
        }
        return web.json_response({"choices": [choice]})

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_get("/{any:.*}", self._say)
        app.router.add_post(GENERATE, self._generate)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        try:
            yield f"http://{host}:{port}"
        finally:
            await runner.cleanup()


def asked(server: Server, sampling: Sampling, *, top_k: int = 3, probes: bool = False) -> Completion:
    async def ask() -> Completion:
        async with server.listening() as url:
            endpoint = Endpoint(url, timeout_seconds=60.0, top_k=top_k)
            try:
                if probes:
                    await endpoint.probe()
                return (await endpoint.sample(np.array([1, 2], np.int32), n=1, sampling=sampling))[0]
            finally:
                await endpoint.close()

    return asyncio.run(ask())


def test_a_server_is_asked_for_few_tokens_and_what_it_left_of_them_is_read() -> None:
    server = Server(MASK)
    answer = asked(server, RESTRICTED, probes=True)
    assert answer.support is not None
    assert (answer.support.dtype, answer.support.tolist()) == (np.int32, LEFT)
    probe, request = server.asked
    assert probe["top_k"] == 3, "without it such a server refuses"
    assert {name: request[name] for name in ("temperature", "top_k", "top_p", "min_p")} == {
        "temperature": 0.7,
        "top_k": 3,
        "top_p": 0.9,
        "min_p": 0.05,
    }


def test_rows_with_ties_are_kept_and_one_that_is_far_too_wide_is_marked() -> None:
    answer = asked(Server([[*range(15)], [*range(16)]]), RESTRICTED)
    assert answer.support is not None
    assert answer.support.tolist() == [[*range(15)], [-2] + [-1] * 14]


@pytest.mark.parametrize("mask", [None, [[4]], [[4], [5], [6]]])
def test_an_answer_that_does_not_say_what_was_left_is_refused(mask: list[list[int]] | None) -> None:
    with pytest.raises(RequestFailed, match="--return-sampling-mask"):
        asked(Server(mask), RESTRICTED)


def test_a_server_that_was_started_for_something_else_is_named_at_once() -> None:
    with pytest.raises(ConfigError, match="--return-sampling-mask"):
        asked(Server(None), RESTRICTED, probes=True)
    with pytest.raises(ConfigError, match="requires top_k > 0"):
        asked(Server(MASK), Sampling(max_new_tokens=2), top_k=0, probes=True)


def test_a_greedy_answer_of_such_a_server_is_the_likeliest_of_one_token() -> None:
    server = Server(MASK)
    answer = asked(server, Sampling(max_new_tokens=2, temperature=0.0, top_k=3, top_p=0.9))
    assert (answer.support, answer.logprobs.tolist()) == (None, [0.0, 0.0])
    assert [server.asked[0][name] for name in ("temperature", "top_k", "top_p", "min_p")] == [1.0, 1, 1.0, 0.0]
    plain = Sampling(max_new_tokens=2, temperature=0.0)
    assert of_an_engine(plain) == plain


def test_a_worker_s_servers_are_asked_with_its_top_k() -> None:
    settings = WorkerSettings(env="vcopy", sampler="openai", top_k=7)
    sampler = OpenAISampler.make(settings, OpenAIOptions(servers=URL), seed=0)
    assert [endpoint._simplest.top_k for endpoint in sampler._endpoints] == [7]
    asyncio.run(sampler.close())


def test_what_vllm_in_process_left_is_read() -> None:
    choice = SimpleNamespace(
        token_ids=[4, 5],
        logprobs=[{4: SimpleNamespace(logprob=-0.5)}, {5: SimpleNamespace(logprob=0.0)}],
        finish_reason="length",
        weight_versions=[SimpleNamespace(version="3", start=0, end=2)],
        sampling_mask=SimpleNamespace(token_ids=MASK),
    )
    answer = _completion(choice, RESTRICTED)
    assert answer.support is not None
    assert answer.support.tolist() == LEFT
    choice.sampling_mask = None
    assert _completion(choice, Sampling(max_new_tokens=2)).support is None
    with pytest.raises(RequestFailed, match="nothing came for 2 sampled tokens"):
        _completion(choice, RESTRICTED)


@pytest.mark.parametrize(
    ("settings", "mode", "tells"),
    [
        ({}, "processed_logprobs", False),
        ({"top_p": 0.9}, "raw_logprobs", False),
        ({"top_k": 5}, "processed_logprobs", True),
        ({"top_k": 5, "top_p": 0.9, "temperature": 0.7}, "processed_logprobs", True),
    ],
)
def test_an_engine_gives_logprobs_of_what_it_left_once_it_tells_it(
    settings: dict[str, Any], mode: str, tells: bool
) -> None:
    worker = WorkerSettings(env="vcopy", sampler="vllm", **settings)
    assert logprobs_mode(worker.top_p, worker.top_k) == mode
    sampler = VllmSampler.make(worker, VllmOptions(), seed=0)
    assert (sampler._logprobs_mode, sampler._options.get("return_sampling_mask", False)) == (mode, tells)
