"""A sampler with wrong logprobs is found before it feeds a trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_families import GEMMA3, GPT2, HYBRIDS, QWEN3_MOE, made

from rlbuffer.errors import WrongLogprobs
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.weights.files import load_state, publish, read_config
from rlbuffer.weights.model import TINY_QWEN3, config_of
from rlbuffer.weights.state import model_state
from rlbuffer.worker.samplers import Completion, Sampling
from rlbuffer.worker.samplers.conformance import PLAIN, PROMPTS, policies
from rlbuffer.worker.samplers.decoding import Decoder
from rlbuffer.worker.samplers.selfcheck import (
    SELFCHECK_TOLERANCES,
    TOKENS,
    check_sampler,
    logprobs_of,
    model_of,
    widened,
)
from rlbuffer.worker.samplers.transformers import Batched

QWEN3_NEXT = dict(HYBRIDS[1]) | {"num_hidden_layers": 4, "layer_types": 2 * HYBRIDS[1]["layer_types"]}
"""A module of a layer takes weights from inside another one."""


class Lying(Batched):
    """Says other logprobs than those that it drew with."""

    def __init__(self, sampler: Decoder, lie: str) -> None:
        super().__init__(sampler)
        self.lie = lie

    async def sample(self, prompt: np.ndarray, *, n: int, sampling: Sampling) -> list[Completion]:
        if self.lie == "raw":  # vLLM gives these unless it is asked for processed ones
            return await super().sample(prompt, n=n, sampling=replace(sampling, temperature=1.0))
        answers = await super().sample(prompt, n=n, sampling=sampling)
        if self.lie == "none":
            return answers
        if self.lie == "token":
            return [replace(c, tokens=np.full_like(c.tokens, 40)) for c in answers]
        return [replace(c, logprobs=np.full_like(c.logprobs, np.nan)) for c in answers]


class Narrow(Decoder):
    """Computes in bfloat16, as engines do."""

    def load(self, policy: PolicyVersion) -> None:
        super().load(policy)
        assert self._model is not None
        torch.nn.Module.to(self._model, torch.bfloat16)


def difference(
    lie: str, serves: PolicyVersion, says: PolicyVersion, sampling: Sampling, decoder: type[Decoder] = Decoder
) -> float:
    async def run() -> float:
        sampler = Lying(decoder(seed=0), lie)
        await sampler.load(serves)
        try:
            return await check_sampler(sampler, says, PROMPTS[0], sampling)
        finally:
            await sampler.close()

    return asyncio.run(run())


def test_a_truthful_sampler_passes(tmp_path: Path) -> None:
    _, published = policies(tmp_path)
    for sampling in (PLAIN, replace(PLAIN, temperature=0.7, top_p=0.9)):
        assert difference("none", published[0], published[0], sampling) < 1e-5


@pytest.mark.parametrize("lie", ["raw", "nan"])
def test_wrong_logprobs_are_refused_with_the_usual_cause(tmp_path: Path, lie: str) -> None:
    _, published = policies(tmp_path)
    with pytest.raises(WrongLogprobs, match="--logprobs-mode processed_logprobs"):
        difference(lie, published[0], published[0], replace(PLAIN, temperature=0.5))


def test_a_model_that_16_bit_moves_far_is_compared_by_how_far(tmp_path: Path) -> None:
    """As trained models are moved, not fresh ones; another model is further away all the same."""
    _, published = policies(tmp_path)
    grown = []
    for policy in published[:2]:
        state = {name: (3 * tensor).bfloat16() for name, tensor in load_state(Path(policy.location)).items()}
        config = read_config(Path(policy.location)) | {"dtype": "bfloat16"}
        grown.append(publish(tmp_path / "grown", policy.version, state=state, config=config, keep=2))
    long = replace(PLAIN, max_new_tokens=TOKENS, stop_token_ids=())
    assert difference("none", grown[0], grown[0], long, Narrow) > SELFCHECK_TOLERANCES["bfloat16"]
    with pytest.raises(WrongLogprobs):
        difference("none", grown[1], grown[0], long, Narrow)


@pytest.mark.parametrize("config", [TINY_QWEN3, QWEN3_MOE, GEMMA3, GPT2, QWEN3_NEXT], ids=lambda c: c["model_type"])
def test_a_model_in_16_bit_computes_in_float32_without_being_there_in_it(
    tmp_path: Path, config: Mapping[str, Any]
) -> None:
    """A whole copy for each worker of a host: 30 GB for 8 billion parameters."""
    fresh = made(config).bfloat16()
    policy = publish(tmp_path, 0, state=model_state(fresh), config=config_of(fresh, dtype=torch.bfloat16), keep=1)
    model = model_of(Path(policy.location))
    assert model.dtype == torch.bfloat16
    wide: list[int] = []

    def count(*_: object) -> None:
        wide.append(sum(p.numel() for p in model.parameters() if p.dtype == torch.float32))

    for module in model.modules():
        module.register_forward_pre_hook(count)
    tokens = np.arange(10, dtype=np.int32)
    with widened(model):
        ours = logprobs_of(model, tokens, tokens, PLAIN)
    assert max(wide) < sum(p.numel() for p in model.parameters()) / 2
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    exact = made(config)
    exact.load_state_dict(fresh.float().state_dict())
    assert np.abs(ours - logprobs_of(exact.eval(), tokens, tokens, PLAIN)).max() < 1e-5


@pytest.mark.parametrize(("lie", "served"), [("none", 1), ("token", 0)])
def test_another_model_and_a_token_that_it_does_not_have_are_the_samplers_fault(
    tmp_path: Path, lie: str, served: int
) -> None:
    _, published = policies(tmp_path)
    with pytest.raises(WrongLogprobs, match="does it serve this model"):
        difference(lie, published[served], published[0], PLAIN)
