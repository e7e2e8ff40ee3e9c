"""LoRA adapters as policy versions in real vLLM: in process, and on a server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from adapter_versions import adapters
from sampler_ratios import check_name
from vllm_server import ENGINE, VllmServer, with_tokenizer
from worker_run import VERSIONS, WorkerRun, versions_change_under_running_rollouts

from rlbuffer.config.settings import WorkerSettings
from rlbuffer.weights.layout import base_of
from rlbuffer.worker.samplers import make_sampler
from rlbuffer.worker.samplers.conformance import CHECKS, CONTEXT, Check, Stage


@dataclass
class Places:
    """Versions with their models, and a server of their base that starts."""

    server: VllmServer
    stage: Stage
    """Without a sampler."""


@pytest.fixture(scope="module")
def places(folder: Path) -> Iterator[Places]:
    models, published = adapters(folder / "weights", VERSIONS)
    served = with_tokenizer(base_of(Path(published[0].location)).location, folder / "served")
    with VllmServer(served, folder / "server.log", context=CONTEXT, lora_rank=8) as server:  # ready when it is wanted
        yield Places(server, Stage(None, models, published, folder))  # type: ignore[arg-type]


def sampler_stage(places: Places, runner: asyncio.Runner, settings: WorkerSettings) -> Iterator[Stage]:
    """A sampler that has loaded version 0."""
    sampler = make_sampler(settings)
    stage = Stage(sampler, places.stage.models, places.stage.policies, places.stage.tmp)
    runner.run(sampler.load(stage.policies[0]))
    yield stage
    runner.run(sampler.close())


@pytest.fixture(scope="module")
def engine(places: Places, runner: asyncio.Runner) -> Iterator[Stage]:
    options = {**ENGINE, "max_model_len": CONTEXT}
    yield from sampler_stage(places, runner, WorkerSettings(env="vcopy", sampler="vllm", sampler_options=options))


@pytest.fixture(scope="module")
def client(places: Places, runner: asyncio.Runner) -> Iterator[Stage]:
    runner.run(places.server.until_ready())
    options = {"servers": places.server.url}
    yield from sampler_stage(places, runner, WorkerSettings(env="vcopy", sampler="openai", sampler_options=options))


@pytest.mark.parametrize("check", CHECKS, ids=check_name)
def test_the_vllm_sampler_with_adapters(check: Check, engine: Stage, runner: asyncio.Runner) -> None:
    if engine.sampler.version != 0:
        runner.run(engine.sampler.load(engine.policies[0]))
    runner.run(check(engine))


@pytest.mark.parametrize("check", CHECKS, ids=check_name)
def test_the_openai_sampler_with_adapters(check: Check, client: Stage, runner: asyncio.Runner) -> None:
    if client.sampler.version != 0:
        runner.run(client.sampler.load(client.policies[0]))
    runner.run(check(client))


def test_adapters_change_under_the_running_rollouts_of_a_worker(client: Stage, places: Places) -> None:
    run = WorkerRun("openai", {"servers": places.server.url}, client.policies)
    versions_change_under_running_rollouts(run, client.models)
