"""A server that does not say which version sampled a token is never asked while its weights change."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import numpy as np

from rlbuffer.worker.samplers import Sampling
from rlbuffer.worker.samplers.endpoint import COMPLETIONS, Endpoint

PROMPT = np.array([1, 2], np.int32)
ONE = Sampling(max_new_tokens=1)


class Server:
    """Answers like vLLM without --enable-scale-out; a completion takes until the test lets it go."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.weights = -1
        self.answering = asyncio.Event()

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        self.calls.append(path)
        if path == "/update_weight_version":
            self.weights += 1
        if path != COMPLETIONS:
            return httpx.Response(200, json={})
        await self.answering.wait()
        # The token is the version that samples it.
        choice = {"token_ids": [self.weights], "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": "length"}
        return httpx.Response(200, json={"choices": [choice]})


def test_a_load_waits_for_what_was_sent_and_what_comes_meanwhile_waits_for_the_load(tmp_path: Path) -> None:
    async def run() -> list[str]:
        server = Server()
        client = httpx.AsyncClient(base_url="http://vllm:8000", transport=httpx.MockTransport(server))
        endpoint = Endpoint("http://vllm:8000", timeout_seconds=3.0, client=client)
        endpoint.gives_versions = False
        await endpoint.load(tmp_path, {}, 0)
        server.calls.clear()

        before = asyncio.create_task(endpoint.sample(PROMPT, n=1, sampling=ONE))
        while COMPLETIONS not in server.calls:
            await asyncio.sleep(0)
        load = asyncio.create_task(endpoint.load(tmp_path, {}, 1))
        await asyncio.sleep(0.05)
        after = asyncio.create_task(endpoint.sample(PROMPT, n=1, sampling=ONE))
        given_up = asyncio.create_task(endpoint.sample(PROMPT, n=1, sampling=ONE))
        await asyncio.sleep(0.05)
        given_up.cancel()
        assert server.calls == [COMPLETIONS], "the load and what comes after it must wait"
        server.answering.set()
        await load
        for task in (before, after):
            (completion,) = await task
            assert [span.policy_version for span in completion.version_spans] == completion.tokens.tolist()
        await endpoint.close()
        return server.calls

    calls = asyncio.run(run())
    assert calls[0] == calls[-1] == COMPLETIONS
    assert calls[1:-1] == ["/pause", "/collective_rpc", "/update_weight_version", "/reset_prefix_cache", "/resume"]


def test_a_load_that_fails_lets_requests_pass_again(tmp_path: Path) -> None:
    async def run() -> None:
        server = Server()
        server.answering.set()
        client = httpx.AsyncClient(base_url="http://vllm:8000", transport=httpx.MockTransport(server))
        endpoint = Endpoint("http://vllm:8000", timeout_seconds=3.0, client=client)
        endpoint.gives_versions = False
        load = asyncio.create_task(endpoint.load(tmp_path, {}, 0))
        await asyncio.sleep(0)
        load.cancel()
        await asyncio.gather(load, return_exceptions=True)
        assert len(await endpoint.sample(PROMPT, n=1, sampling=ONE)) == 1
        await endpoint.close()

    asyncio.run(run())
