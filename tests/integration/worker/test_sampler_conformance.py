"""The samplers that run without vLLM do what every sampler must do; those of vLLM are in tests/real_vllm."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sampler_ratios import RATIO_TOLERANCE, SETTINGS, check_name, ratios_to_the_trainer

from rlbuffer.config.settings import WorkerSettings
from rlbuffer.worker.samplers import make_sampler
from rlbuffer.worker.samplers.conformance import CHECKS, PLAIN, Check, Stage, policies


@pytest.mark.parametrize("check", CHECKS, ids=check_name)
def test_the_transformers_sampler(check: Check, tmp_path: Path) -> None:
    async def run() -> None:
        models, published = policies(tmp_path)
        sampler = make_sampler(WorkerSettings(env="vcopy"))
        try:
            await sampler.load(published[0])
            samplings = [replace(PLAIN, temperature=t, top_p=p) for t in (1.0, 0.7) for p in (1.0, 0.9)]
            samplings += [replace(PLAIN, temperature=t, top_k=5, top_p=0.9, min_p=0.05) for t in (1.0, 0.7)]
            await check(Stage(sampler, models, published, tmp_path, tuple(samplings)))
        finally:
            await sampler.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    "changed",
    [*SETTINGS.values(), {"temperature": 0.7, "top_p": 0.8}, {"temperature": 0.7, "top_k": 5, "top_p": 0.8}],
    ids=[*SETTINGS, "temperature and top_p", "top_k"],
)
def test_ratios_at_age_0_are_1_whatever_the_models_generation_config_says(
    changed: dict[str, Any], tmp_path: Path
) -> None:
    async def run() -> None:
        models, published = policies(tmp_path, 1)
        sampler = make_sampler(WorkerSettings(env="vcopy", **changed))
        try:
            await sampler.load(published[0])
            ratios = await ratios_to_the_trainer(sampler, models[0], changed)
        finally:
            await sampler.close()
        assert np.abs(ratios - 1).max() <= RATIO_TOLERANCE

    asyncio.run(run())
