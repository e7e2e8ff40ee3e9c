"""vLLM serves models with experts: as they are published, and when a version takes another's place."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm_server import ENGINE

from rlbuffer.config.settings import WorkerSettings
from rlbuffer.errors import ConfigError
from rlbuffer.weights.files import publish
from rlbuffer.weights.model import config_of, model_from_config
from rlbuffer.weights.state import model_state
from rlbuffer.worker.samplers import make_sampler
from rlbuffer.worker.samplers.conformance import CONFIG, CONTEXT, PLAIN, PROMPTS
from rlbuffer.worker.samplers.selfcheck import TOKENS, check_sampler

EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


@pytest.mark.parametrize("family", EXPERTS)
def test_experts_are_loaded_and_take_the_place_of_others(family: str, tmp_path: Path, runner: asyncio.Runner) -> None:
    config = CONFIG | EXPERTS[family] | {"model_type": family, "vocab_size": 64, "tie_word_embeddings": False}
    published = []
    for version in range(2):
        torch.manual_seed(version)
        model = model_from_config(config)
        published.append(publish(tmp_path, version, state=model_state(model), config=config_of(model), keep=2))
    options = {**ENGINE, "max_model_len": CONTEXT}
    sampler = make_sampler(WorkerSettings(env="vcopy", sampler="vllm", sampler_options=options))
    try:
        for policy in published:
            runner.run(sampler.load(policy))
            sampling = replace(PLAIN, max_new_tokens=TOKENS, stop_token_ids=())
            assert runner.run(check_sampler(sampler, policy, PROMPTS[0], sampling)) < 1e-4
    finally:
        runner.run(sampler.close())


def test_an_engine_that_cannot_record_experts_says_why(tmp_path: Path, runner: asyncio.Runner) -> None:
    """On a CPU vLLM 0.32 refuses. Whoever runs this with a GPU gets records, and no error."""
    config = CONFIG | EXPERTS["mixtral"] | {"model_type": "mixtral", "vocab_size": 64, "tie_word_embeddings": False}
    torch.manual_seed(0)
    model = model_from_config(config)
    policy = publish(tmp_path, 0, state=model_state(model), config=config_of(model), keep=2)
    options = {**ENGINE, "max_model_len": CONTEXT}
    settings = WorkerSettings(env="vcopy", sampler="vllm", sampler_options=options, record_experts=True)
    sampler = make_sampler(settings)
    try:
        with pytest.raises(ConfigError, match=r"(?s)record_experts = true: .*Model Runner V2") as refused:
            runner.run(sampler.load(policy))
        assert refused.value.setting == "record_experts"
    finally:
        runner.run(sampler.close())
