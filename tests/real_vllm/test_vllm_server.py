"""Workers and their openai sampler on real vLLM servers: versions that change, servers killed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from sampler_ratios import RATIO_TOLERANCE, SETTINGS, check_name, ratios_to_the_trainer
from vllm_server import VllmServer, with_tokenizer
from worker_run import VERSIONS, WorkerRun, versions_change_under_running_rollouts

from rlbuffer.config.settings import WorkerSettings
from rlbuffer.worker.samplers import make_sampler
from rlbuffer.worker.samplers.conformance import (
    CHECKS,
    CONTEXT,
    OF_THE_MODEL,
    PLAIN,
    PROMPTS,
    Check,
    Stage,
    policies,
)
from rlbuffer.worker.samplers.openai import OpenAIOptions, OpenAISampler


@dataclass
class Servers:
    """Two servers that started with version 3's weights, and a sampler of the first.

    The second gives raw logprobs, as one for workers with a nucleus must. At temperature 1 both give the same.
    """

    first: VllmServer
    second: VllmServer
    stage: Stage
    runner: asyncio.Runner

    def wait(self, server: VllmServer) -> None:
        """Waits until it answers."""
        self.runner.run(server.until_ready())


@pytest.fixture(scope="module")
def servers(runner: asyncio.Runner, folder: Path) -> Iterator[Servers]:
    models, published = policies(folder / "weights")
    served = with_tokenizer(published[3].location, folder / "served")  # not the version that is loaded first
    (served / "generation_config.json").write_text(json.dumps(OF_THE_MODEL))
    sampler = None
    with VllmServer(served, folder / "1.log", context=CONTEXT) as first:
        try:
            runner.run(first.until_ready())
            with VllmServer(
                served, folder / "2.log", context=CONTEXT, mode="raw_logprobs"
            ) as second:  # ready when it is wanted
                sampler = make_sampler(
                    WorkerSettings(env="vcopy", sampler="openai", sampler_options={"servers": first.url})
                )
                yield Servers(first, second, Stage(sampler, models, published, folder), runner)
        finally:
            if sampler is not None:
                runner.run(sampler.close())


@pytest.mark.parametrize("check", CHECKS, ids=check_name)
def test_the_openai_sampler(check: Check, servers: Servers) -> None:
    stage = servers.stage

    async def run() -> None:
        await stage.sampler.load(stage.policies[0])
        await check(stage)

    servers.runner.run(run())


@pytest.mark.parametrize("name", SETTINGS)
def test_ratios_at_age_0_are_1_whatever_the_models_generation_config_says(name: str, servers: Servers) -> None:
    server = servers.second if name == "top_p" else servers.first
    servers.wait(server)

    async def run() -> np.ndarray:
        sampler = OpenAISampler(OpenAIOptions(servers=(server.url,)))
        try:
            await sampler.load(servers.stage.policies[0])
            return await ratios_to_the_trainer(sampler, servers.stage.models[0], SETTINGS[name])
        finally:
            await sampler.close()

    assert np.abs(servers.runner.run(run()) - 1).max() <= RATIO_TOLERANCE


def test_every_token_of_a_worker_is_from_the_version_that_its_span_names(servers: Servers, tmp_path: Path) -> None:
    models, published = policies(tmp_path, VERSIONS)
    versions_change_under_running_rollouts(WorkerRun("openai", {"servers": servers.first.url}, published), models)


def test_a_server_that_is_started_again_draws_other_tokens(servers: Servers) -> None:
    server, long = servers.first, replace(PLAIN, max_new_tokens=32, stop_token_ids=())

    async def drawn(life: int) -> set[tuple[int, ...]]:
        server.kill()
        server.start()
        await server.until_ready()
        sampler = OpenAISampler(OpenAIOptions(servers=(server.url,)), seed=life)
        try:
            await sampler.load(servers.stage.policies[0])
            return {tuple(c.tokens.tolist()) for c in await sampler.sample(PROMPTS[0], n=4, sampling=long)}
        finally:
            await sampler.close()

    first, second = servers.runner.run(drawn(1)), servers.runner.run(drawn(2))
    assert (len(first), len(second)) == (4, 4)
    assert not first & second


def test_killed_servers_are_gone_round_and_waited_for_and_no_group_is_lost_or_doubled(servers: Servers) -> None:
    first, second = servers.first, servers.second
    servers.wait(second)
    with WorkerRun("openai", {"servers": [first.url, second.url]}, servers.stage.policies, temperature=1.0) as run:
        run.until_groups(6, seconds=120, why="six groups of both servers")

        first.kill()
        run.until_groups(12, seconds=120, why="groups of the server that is left")
        first.start()  # with the weights of its start, which are version 3's

        second.kill()

        def told(sentence: str) -> bool:
            return any(sentence in event["text"] for event in run.told("trouble"))

        run.until(lambda: told("no server can sample: "), seconds=60, why="the sentence that nobody can sample")
        assert told(f"{second.url}/inference/v1/generate cannot be reached: ")
        assert told("; asked again in 1 s")
        run.announce(1)
        run.until(lambda: told("; version 0 goes on sampling"), seconds=60, why="a load that meets no server")
        groups = len(run.told("group"))

        servers.wait(first)
        run.until_version(1, seconds=120)
        run.until_groups(6, seconds=120, why="groups after a server is back")
        assert len(run.told("group")) > groups
        run.stop()
        run.compare(servers.stage.models)
        run.account()
