"""vLLM in this process does what every sampler must do."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from samplers_conformance import CHECKS, CONTEXT, Check, Stage, check_name, policies
from vllm_server import ENGINE

from rlbuffer.errors import ConfigError
from rlbuffer.settings import WorkerSettings
from rlbuffer.worker.samplers import make_sampler


@pytest.fixture(scope="module")
def stage(runner: asyncio.Runner, folder: Path) -> Iterator[Stage]:
    models, published = policies(folder)
    options = {**ENGINE, "max_model_len": CONTEXT}
    sampler = make_sampler(WorkerSettings(env="vcopy", sampler="vllm", sampler_options=options))
    runner.run(sampler.load(published[0]))
    yield Stage(sampler, models, published, folder)
    runner.run(sampler.close())


@pytest.mark.parametrize("check", CHECKS, ids=check_name)
def test_the_vllm_sampler(check: Check, stage: Stage, runner: asyncio.Runner) -> None:
    if stage.sampler.version != 0:
        runner.run(stage.sampler.load(stage.policies[0]))
    runner.run(check(stage))


def test_options_that_the_sampler_sets_itself_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"sampler_options\.logprobs_mode is set by the sampler itself"):
        make_sampler(WorkerSettings(env="vcopy", sampler="vllm", sampler_options={"logprobs_mode": "raw_logprobs"}))
