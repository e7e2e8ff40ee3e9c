"""vLLM in this process does what every sampler must do, alone and under a worker."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from samplers_conformance import (
    CHECKS,
    CONTEXT,
    PLAIN,
    Check,
    Stage,
    check_name,
    logprobs_are_those_that_a_trainer_computes,
    policies,
)
from vllm_server import ENGINE
from worker_run import VERSIONS, WorkerRun, versions_change_under_running_rollouts

from rlbuffer.errors import ConfigError
from rlbuffer.settings import WorkerSettings
from rlbuffer.worker.samplers import make_sampler

OPTIONS = {**ENGINE, "max_model_len": CONTEXT}


@pytest.fixture(scope="module")
def stage(runner: asyncio.Runner, folder: Path) -> Iterator[Stage]:
    models, published = policies(folder)
    sampler = make_sampler(WorkerSettings(env="vcopy", sampler="vllm", sampler_options=OPTIONS))
    runner.run(sampler.load(published[0]))
    yield Stage(sampler, models, published, folder)
    runner.run(sampler.close())


@pytest.mark.parametrize("check", CHECKS, ids=check_name)
def test_the_vllm_sampler(check: Check, stage: Stage, runner: asyncio.Runner) -> None:
    if stage.sampler.version != 0:
        runner.run(stage.sampler.load(stage.policies[0]))
    runner.run(check(stage))


def test_logprobs_under_a_nucleus_are_those_that_a_trainer_computes(tmp_path: Path, runner: asyncio.Runner) -> None:
    models, published = policies(tmp_path)
    sampler = make_sampler(WorkerSettings(env="vcopy", sampler="vllm", sampler_options=OPTIONS, top_p=0.8))
    runner.run(sampler.load(published[0]))
    try:
        stage = Stage(sampler, models, published, tmp_path, (replace(PLAIN, top_p=0.8),))
        runner.run(logprobs_are_those_that_a_trainer_computes(stage))
    finally:
        runner.run(sampler.close())


def test_every_token_of_a_worker_with_vllm_is_from_the_version_that_its_span_names(tmp_path: Path) -> None:
    models, published = policies(tmp_path, VERSIONS)
    versions_change_under_running_rollouts(WorkerRun("vllm", dict(OPTIONS), published), models)


def test_options_that_the_sampler_sets_itself_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"sampler_options\.logprobs_mode is set by the sampler itself"):
        make_sampler(WorkerSettings(env="vcopy", sampler="vllm", sampler_options={"logprobs_mode": "raw_logprobs"}))
