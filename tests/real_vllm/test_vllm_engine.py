"""vLLM in this process does what every sampler must do, alone and under a worker."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sampler_ratios import RATIO_TOLERANCE, SETTINGS, check_name, ratios_to_the_trainer
from vllm_server import ENGINE
from worker_run import VERSIONS, WorkerRun, versions_change_under_running_rollouts

from rlbuffer.config.settings import WorkerSettings
from rlbuffer.errors import ConfigError
from rlbuffer.worker.samplers import make_sampler
from rlbuffer.worker.samplers.conformance import (
    CHECKS,
    CONTEXT,
    PLAIN,
    PROMPTS,
    Check,
    Stage,
    logprobs_are_those_that_a_trainer_computes,
    policies,
)

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


def ratios_are_1(runner: asyncio.Runner, stage: Stage, changed: dict[str, Any]) -> None:
    ratios = runner.run(ratios_to_the_trainer(stage.sampler, stage.models[stage.sampler.version], changed))
    assert np.abs(ratios - 1).max() <= RATIO_TOLERANCE


@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "top_p"])
def test_ratios_at_age_0_are_1_whatever_the_models_generation_config_says(
    name: str, stage: Stage, runner: asyncio.Runner
) -> None:
    ratios_are_1(runner, stage, SETTINGS[name])


def test_ratios_at_age_0_are_1_under_a_nucleus(tmp_path: Path, runner: asyncio.Runner) -> None:
    models, published = policies(tmp_path)
    settings = WorkerSettings(env="vcopy", sampler="vllm", sampler_options=OPTIONS, **SETTINGS["top_p"])
    sampler = make_sampler(settings)
    runner.run(sampler.load(published[0]))
    try:
        stage = Stage(sampler, models, published, tmp_path, (replace(PLAIN, top_p=settings.top_p),))
        runner.run(logprobs_are_those_that_a_trainer_computes(stage))
        ratios_are_1(runner, stage, SETTINGS["top_p"])
    finally:
        runner.run(sampler.close())


def test_on_a_cpu_vllm_says_itself_that_it_cannot_tell_which_tokens_top_k_leaves(
    tmp_path: Path, runner: asyncio.Runner
) -> None:
    """Its second model runner does, which needs Triton. With one the ratio on policy is 1."""
    _, published = policies(tmp_path, 1)
    sampler = make_sampler(WorkerSettings(env="vcopy", sampler="vllm", sampler_options=OPTIONS, top_k=5))
    with pytest.raises(ConfigError, match="sampling distribution replay requires Model Runner V2") as refused:
        runner.run(sampler.load(published[0]))
    runner.run(sampler.close())
    assert refused.value.setting == "top_k"


def test_every_token_of_a_worker_with_vllm_is_from_the_version_that_its_span_names(tmp_path: Path) -> None:
    models, published = policies(tmp_path, VERSIONS)
    versions_change_under_running_rollouts(WorkerRun("vllm", dict(OPTIONS), published), models)


def test_an_engine_that_is_started_again_draws_other_tokens(stage: Stage, runner: asyncio.Runner) -> None:
    long = replace(PLAIN, max_new_tokens=32, stop_token_ids=())

    async def drawn() -> set[tuple[int, ...]]:
        await stage.sampler.close()  # the next request starts an engine, as after one that died
        return {tuple(c.tokens.tolist()) for c in await stage.sampler.sample(PROMPTS[0], n=4, sampling=long)}

    first, second = runner.run(drawn()), runner.run(drawn())
    assert (len(first), len(second)) == (4, 4)
    assert not first & second


def test_an_option_that_vllm_does_not_have_is_a_mistake_in_the_settings(tmp_path: Path, runner: asyncio.Runner) -> None:
    _, published = policies(tmp_path, 1)
    sampler = make_sampler(WorkerSettings(env="vcopy", sampler="vllm", sampler_options={"max_model_lem": 3}))
    with pytest.raises(ConfigError, match=r"sampler_options: vLLM refuses them: .*max_model_lem"):
        runner.run(sampler.load(published[0]))


def test_options_that_the_sampler_sets_itself_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"sampler_options\.logprobs_mode is set by the sampler itself"):
        make_sampler(WorkerSettings(env="vcopy", sampler="vllm", sampler_options={"logprobs_mode": "raw_logprobs"}))
