"""Every kind of model trains three steps or is refused with the reason; what is published is what was trained."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from model_families import GEMMA2, GPT2, QWEN3, QWEN3_MOE, row
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rlbuffer.config.settings import RunSettings
from rlbuffer.errors import ConfigError
from rlbuffer.trainer.checkpoints.checkpoint import path_of, restore
from rlbuffer.trainer.fake import FakeRun
from rlbuffer.trainer.loop import train
from rlbuffer.trainer.model.packed_policy import packed_forward, prepare
from rlbuffer.trainer.model.selftest import separate_logprobs
from rlbuffer.trainer.update.update import make_optimizer
from rlbuffer.weights.layout import versions
from rlbuffer.weights.model import build_model, model_from_config


def settings(output: Path, config: Mapping[str, Any], *, dtype: str = "float32", **trainer: Any) -> RunSettings:
    values = {"steps": 3, "checkpoint": {"every": 3}, "output": output, "device": "cpu"} | trainer
    return RunSettings(
        home=output, batcher={"row_tokens": 128}, model={"config": dict(config), "dtype": dtype}, trainer=values
    )


def run(wanted: RunSettings) -> list[dict[str, Any]]:
    """Trains; -> a record per step."""
    assert train(wanted, rank=0, world_size=1, source=FakeRun)
    lines = (wanted.output_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def published(output: Path, version: int) -> Path:
    (directory,) = versions(output / "weights")[version]
    return directory


def test_a_model_that_asks_for_the_router_auxiliary_loss_is_refused_by_its_name(tmp_path: Path) -> None:
    asking = dict(QWEN3_MOE) | {"output_router_logits": True, "router_aux_loss_coef": 0.01}
    with pytest.raises(ConfigError) as refused:
        run(settings(tmp_path, asking))
    assert refused.value.setting == "model"


@pytest.mark.parametrize("config", [QWEN3, GEMMA2, GPT2, QWEN3_MOE], ids=lambda c: c["model_type"])
def test_a_model_trains_three_steps_and_its_published_version_gives_the_trainers_logprobs(
    tmp_path: Path, config: Mapping[str, Any]
) -> None:
    wanted = settings(tmp_path, config)
    records = run(wanted)
    assert [record["step"] for record in records] == [1, 2, 3]
    assert all(record["grad_norm"] > 0 for record in records)

    policy = prepare(build_model(wanted.model, seed=1))
    restore(path_of(tmp_path / "checkpoints", 3), policy, make_optimizer(policy, wanted.trainer.optimizer))
    ids, positions, cu_seqlens = row(lengths=(40, 9, 33))
    with torch.no_grad():
        trained = packed_forward(policy)(ids, positions, cu_seqlens)
        loaded = AutoModelForCausalLM.from_pretrained(published(tmp_path, 3), local_files_only=True).eval()
        theirs = torch.cat([separate_logprobs(loaded, piece) for piece in ids.split([40, 9, 33])])
    torch.testing.assert_close(theirs, trained, rtol=0, atol=1e-5)
    is_tied = loaded.config.tie_word_embeddings
    assert ("lm_head.weight" in load_file(published(tmp_path, 3) / "model.safetensors")) is not is_tied
    fresh = AutoModelForCausalLM.from_pretrained(published(tmp_path, 0), local_files_only=True).eval()
    with torch.no_grad():
        assert float((separate_logprobs(fresh, ids[:40]) - trained[:40]).abs().max()) > 1e-3


def test_padded_rows_and_recomputed_activations_train_what_packed_rows_do(tmp_path: Path) -> None:
    ways: dict[str, dict[str, Any]] = {
        "packed": {},
        "padded": {"layout": "padded"},
        "again": {"gradient_checkpointing": True},
    }
    records = {name: run(settings(tmp_path / name, QWEN3, dtype="float64", **way)) for name, way in ways.items()}
    for name in ("padded", "again"):
        for ours, theirs in zip(records[name], records["packed"], strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-6)


def test_bfloat16_keeps_small_updates_and_publishes_what_samplers_compute_in(tmp_path: Path) -> None:
    """A learning rate whose updates are below what bfloat16 can add to a weight."""
    wanted = settings(tmp_path, QWEN3, dtype="bfloat16", optimizer={"learning_rate": 1e-6})
    run(wanted)
    state = load_file(published(tmp_path, 3) / "model.safetensors")
    assert {tensor.dtype for tensor in state.values()} == {torch.bfloat16}
    assert json.loads((published(tmp_path, 3) / "config.json").read_text())["dtype"] == "bfloat16"
    fresh = build_model(wanted.model, seed=0)
    policy = prepare(build_model(wanted.model, seed=0), compute=torch.bfloat16)
    restore(path_of(tmp_path / "checkpoints", 3), policy, make_optimizer(policy, wanted.trainer.optimizer))
    moved = [
        float((ours - theirs).abs().max().detach())
        for ours, theirs in zip(policy.model.parameters(), fresh.parameters(), strict=True)
    ]
    assert all(0 < value < 1e-5 for value in moved)
    assert {parameter.dtype for parameter in policy.parameters()} == {torch.float32}
    loaded = AutoModelForCausalLM.from_pretrained(published(tmp_path, 3), local_files_only=True)
    assert loaded.dtype == torch.bfloat16


def test_a_fresh_model_gets_the_attention_that_its_library_has_for_it() -> None:
    assert model_from_config(GEMMA2).config._attn_implementation == "eager"
    assert model_from_config(QWEN3).config._attn_implementation == "sdpa"
