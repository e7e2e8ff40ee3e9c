"""The openai sampler against vLLM's real server, over both of its endpoints, and when the server goes away."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from samplers_conformance import CHECKS, CONTEXT, PLAIN, PROMPTS, Check, Stage, check_name, policies, worst_error
from vllm_server import VllmServer, with_tokenizer

from rlbuffer.errors import SamplerUnavailable
from rlbuffer.settings import WorkerSettings
from rlbuffer.worker.samplers import make_sampler
from rlbuffer.worker.samplers.openai import OpenAISampler


@pytest.fixture(scope="module")
def server(runner: asyncio.Runner, folder: Path) -> Iterator[tuple[VllmServer, Stage]]:
    models, published = policies(folder / "weights")
    started_with = with_tokenizer(published[3].location, folder / "served")  # not the version that is loaded first
    server = VllmServer(started_with, folder / "server.log", context=CONTEXT)
    stack = AsyncExitStack()
    runner.run(stack.enter_async_context(server.ready()))
    sampler = sampler_of(server)
    yield server, Stage(sampler, models, published, folder)
    runner.run(sampler.close())
    runner.run(stack.aclose())


def sampler_of(server: VllmServer) -> OpenAISampler:
    options = {"servers": [server.url], "timeout_seconds": 120}
    sampler = make_sampler(WorkerSettings(env="vcopy", sampler="openai", sampler_options=options))
    assert isinstance(sampler, OpenAISampler)
    return sampler


@pytest.mark.parametrize("endpoint", ["generate", "completions"])
@pytest.mark.parametrize("check", CHECKS, ids=check_name)
def test_the_openai_sampler(
    endpoint: str, check: Check, server: tuple[VllmServer, Stage], runner: asyncio.Runner
) -> None:
    _, stage = server

    async def run() -> None:
        await stage.sampler.load(stage.policies[0])
        for used in stage.sampler._endpoints:  # type: ignore[attr-defined]
            used.gives_versions = endpoint == "generate"
        await check(stage)

    runner.run(run())


def test_a_killed_server_is_waited_for_and_loaded_again_before_it_is_used(
    server: tuple[VllmServer, Stage], runner: asyncio.Runner
) -> None:
    vllm, stage = server
    sampler = sampler_of(vllm)

    async def run() -> None:
        await sampler.load(stage.policies[2])
        vllm.kill()
        with pytest.raises(SamplerUnavailable, match=f"no server can sample: {vllm.url}.* cannot be reached"):
            await sampler.sample(PROMPTS[0], n=1, sampling=PLAIN)
        vllm.start()  # with the weights of its start, which are version 3's
        for _ in range(600):
            try:
                completions = await sampler.sample(PROMPTS[0], n=2, sampling=PLAIN)
                break
            except SamplerUnavailable:
                await asyncio.sleep(0.5)
        for c in completions:
            assert {span.policy_version for span in c.version_spans} == {2}
            assert worst_error(stage, PROMPTS[0], c, PLAIN) < 1e-4
        await sampler.close()

    runner.run(run())
