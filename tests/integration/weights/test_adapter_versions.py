"""Policy versions that are LoRA adapters: merged into their base, and refused when they are something else."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from adapter_versions import adapters, changed, drawn_factors, published_base, write_adapter
from answering_server import answering
from model_families import GEMMA3_SEES
from safetensors.torch import load_file, save_file
from sampler_ratios import check_name

from rlbuffer.config.settings import WorkerSettings
from rlbuffer.errors import ConfigError, WeightsError
from rlbuffer.weights.adapters import rank_and_scale, require_base, state_of
from rlbuffer.weights.files import open_weights
from rlbuffer.weights.layout import base_of
from rlbuffer.weights.shapes import names_and_shapes
from rlbuffer.worker.samplers import make_sampler
from rlbuffer.worker.samplers.conformance import (
    CHECKS,
    PLAIN,
    PROMPTS,
    TOLERANCE,
    Check,
    Stage,
    policies,
)
from rlbuffer.worker.samplers.decoding import Decoder
from rlbuffer.worker.samplers.endpoint import NAME_ADAPTER, Endpoint
from rlbuffer.worker.samplers.selfcheck import check_sampler, logprobs_of, model_of
from rlbuffer.worker.samplers.vllm_extension import WeightsExtension


@pytest.mark.parametrize("check", CHECKS, ids=check_name)
def test_the_transformers_sampler_with_adapters(check: Check, tmp_path: Path) -> None:
    async def run() -> None:
        models, published = adapters(tmp_path)
        sampler = make_sampler(WorkerSettings(env="vcopy"))
        try:
            await sampler.load(published[0])
            await check(Stage(sampler, models, published, tmp_path))
        finally:
            await sampler.close()

    asyncio.run(run())


def test_the_self_check_merges_an_adapter_too(tmp_path: Path) -> None:
    models, published = adapters(tmp_path, 2)
    tokens = np.array([3, 4, 12], np.int32)
    for model, version in zip(models, published, strict=True):
        told = logprobs_of(model_of(Path(version.location)), PROMPTS[0], tokens, PLAIN)
        assert np.abs(told - logprobs_of(model, PROMPTS[0], tokens, PLAIN)).max() < TOLERANCE

    async def run() -> float:
        sampler = make_sampler(WorkerSettings(env="vcopy"))
        await sampler.load(published[1])
        try:
            return await check_sampler(sampler, published[1], PROMPTS[0], PLAIN)
        finally:
            await sampler.close()

    assert asyncio.run(run()) < TOLERANCE


def test_an_adapter_is_merged_where_checkpoints_have_other_names_than_the_model(tmp_path: Path) -> None:
    models, published = adapters(tmp_path, 2, config=GEMMA3_SEES)
    decoder, prompt = Decoder(seed=0), np.arange(9, dtype=np.int32)
    for model, version in zip(models, published, strict=True):
        decoder.load(version)
        told = decoder.sample([prompt], n=1, sampling=PLAIN)[0][0]
        for same in (model, model_of(Path(version.location))):
            assert np.abs(told.logprobs - logprobs_of(same, prompt, told.tokens, PLAIN)).max() < TOLERANCE


def test_the_base_is_left_as_it_is_by_a_merge(tmp_path: Path) -> None:
    models, published = adapters(tmp_path, 2)
    base = state_of(Path(base_of(Path(published[0].location)).location))
    before = {name: tensor.clone() for name, tensor in base.items()}
    merged = state_of(Path(published[1].location), base=base)
    assert all(torch.equal(base[name], before[name]) for name in before)
    name = "model.layers.0.self_attn.q_proj.weight"
    torch.testing.assert_close(merged[name], models[1].state_dict()[name])
    assert not torch.equal(merged[name], base[name])


def test_a_small_adapter_is_not_rounded_away_in_a_narrow_base(tmp_path: Path) -> None:
    model, base = published_base(tmp_path)
    factors = {name: 1e-3 * factor for name, factor in drawn_factors(model, 0).items()}
    directory = Path(write_adapter(tmp_path, 0, base, factors).location)
    narrow = {name: tensor.bfloat16() for name, tensor in state_of(Path(base.location)).items()}
    merged = state_of(directory, base=narrow)
    name = "model.layers.0.self_attn.q_proj"
    down, up = (factors[f"base_model.model.{name}.lora_{half}.weight"] for half in "AB")
    added = merged[f"{name}.weight"] - narrow[f"{name}.weight"].float()
    torch.testing.assert_close(added, 2.0 * (up @ down), rtol=0, atol=1e-7)


def test_rank_stabilised_scaling_is_known(tmp_path: Path) -> None:
    _, (version,) = adapters(tmp_path, 1)
    assert rank_and_scale(Path(version.location)) == (4, 2.0)
    assert rank_and_scale(Path(changed(version, tmp_path / "rs", use_rslora=True).location)) == (4, 4.0)


def test_an_adapter_is_checked_like_whole_weights(tmp_path: Path) -> None:
    _, (version,) = adapters(tmp_path, 1)
    with pytest.raises(WeightsError, match=rf"adapter_model\.safetensors has {version.size} bytes, announced were 1"):
        open_weights(replace(version, size=1))
    with pytest.raises(WeightsError, match=r"adapter_model\.safetensors has sha256 "):
        open_weights(replace(version, checksum="0" * 64))


def said(directory: Path) -> str:
    with pytest.raises(WeightsError) as caught:
        state_of(directory)
    return str(caught.value)


def test_an_adapter_that_is_more_than_lora_is_refused(tmp_path: Path) -> None:
    _, (version,) = adapters(tmp_path, 1)
    for name, value in (("use_dora", True), ("rank_pattern", {"q_proj": 8})):
        changed(version, tmp_path / name, **{name: value})
        assert f"{name} = {value!r}" in said(tmp_path / name)


def test_an_adapter_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    _, (version,) = adapters(tmp_path, 1)
    whole = Path(version.location)

    folder = shutil.copytree(whole, tmp_path / "config")
    (folder / "adapter_config.json").write_text("{}")
    assert said(folder) == f"{folder}/adapter_config.json cannot be read: KeyError('r')"

    folder = shutil.copytree(whole, tmp_path / "file")
    (folder / "adapter_model.safetensors").write_bytes(b"short")
    assert said(folder).startswith(f"{folder}/adapter_model.safetensors cannot be loaded: Error while deserializing")

    folder = shutil.copytree(whole, tmp_path / "base")
    (folder / "base.json").write_text("{}")
    text = f"{folder}/base.json does not say which model the adapter is for: KeyError('location')"
    assert said(folder) == text

    told = json.loads((whole / "base.json").read_text()) | {"size": 7}
    (folder / "base.json").write_text(json.dumps(told))
    assert said(folder).startswith(f"the base model of the adapter at {folder}: version 0: ")


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    model, base = published_base(tmp_path)
    factors = drawn_factors(model, 0)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    wrong = {**factors, name: factors[name][:, :-1].contiguous()}
    folder = Path(write_adapter(tmp_path, 0, base, wrong).location)
    assert said(folder) == f"the weights do not fit the model: {name} of the adapter at {folder}"
    elsewhere = {"base_model.model.elsewhere.lora_B.weight": torch.zeros(2, 4)}
    save_file(elsewhere, folder / "adapter_model.safetensors")
    text = "the adapter is no LoRA adapter: base_model.model.elsewhere.lora_B.weight is no half of a pair"
    assert said(folder).startswith(f"{folder}/adapter_model.safetensors: {text}")


def test_an_engine_takes_adapters_of_the_model_that_it_runs(tmp_path: Path) -> None:
    _, (version,) = adapters(tmp_path, 1)
    _, (whole,) = policies(tmp_path / "whole", 1)
    directory = Path(version.location)
    base = base_of(directory).checksum
    require_base(directory, base)
    require_base(Path(whole.location), "")
    with pytest.raises(WeightsError) as caught:
        require_base(directory, "f" * 64)
    assert base[:12] in str(caught.value)


def test_a_server_that_was_not_started_for_adapters_says_how_to(tmp_path: Path) -> None:
    _, (version,) = adapters(tmp_path, 1)

    async def ask(url: str) -> None:
        endpoint = Endpoint(url, timeout_seconds=60.0)
        try:
            await endpoint.load(Path(version.location), {}, 0, seed=1)
        finally:
            await endpoint.close()

    with (
        answering(lambda path: (404 if path == NAME_ADAPTER else 200, "{}")) as url,
        pytest.raises(ConfigError) as caught,
    ):
        asyncio.run(ask(url))
    assert "--max-lora-rank" in str(caught.value)


class WorkerOfVllm(WeightsExtension):
    """Stand-in for vLLM's worker, with the parts that the extension needs."""

    def list_loras(self) -> set[int]:
        return set()


def test_the_extension_looks_at_an_adapter_before_it_touches_the_engine(tmp_path: Path) -> None:
    _, (version,) = adapters(tmp_path, 1)
    directory = version.location
    shapes = names_and_shapes(directory)
    worker = WorkerOfVllm()
    assert worker.rlbuffer_load_adapter(directory, {"q": [1]}).startswith(
        "the weights do not fit the model: base_model."
    )
    assert worker.rlbuffer_load_adapter(directory, shapes).startswith("the engine has 0 LoRA adapters")
    file = Path(directory) / "adapter_model.safetensors"
    save_file({name: torch.full_like(factor, torch.nan) for name, factor in load_file(file).items()}, file)
    assert worker.rlbuffer_load_adapter(directory, shapes).startswith("the weights are not finite: base_model")
