"""A LoRA adapter trains alone, is published alone beside a base that is written once, and loads with PEFT."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from model_families import GEMMA2, GEMMA3_SEES, GPT2, QWEN3, QWEN3_MOE, made, row
from parameters import load_parameters
from test_model_families import published, run, settings
from transformers import AutoConfig, AutoModelForCausalLM

from rlbuffer.config.adapters import beyond_lora
from rlbuffer.config.trainer import LoraSettings
from rlbuffer.errors import ConfigError
from rlbuffer.process.files import sha256_of
from rlbuffer.trainer.checkpoints.checkpoint import path_of, restore
from rlbuffer.trainer.model.lora import adapter_config, adapter_state, add_adapter
from rlbuffer.trainer.model.packed_policy import PackedPolicy, packed_forward, prepare
from rlbuffer.trainer.model.selftest import separate_logprobs
from rlbuffer.trainer.update.update import make_optimizer
from rlbuffer.weights.adapters import state_of
from rlbuffer.weights.files import load_state
from rlbuffer.weights.model import build_model, in_own_names, load_into

LORA = {"rank": 4, "alpha": 8.0}


def policy_of(output: Path, config: Any, step: int) -> PackedPolicy:
    """The policy in a run's checkpoint, made again."""
    wanted = settings(output, config, lora=LORA)
    policy = prepare(build_model(wanted.model, seed=wanted.seed))
    add_adapter(policy.model, wanted.trainer.lora, seed=9)
    restore(path_of(output / "checkpoints", step), policy, make_optimizer(policy, wanted.trainer.optimizer))
    return policy


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("config", [QWEN3, GPT2, GEMMA2, QWEN3_MOE, GEMMA3_SEES], ids=lambda c: c["model_type"])
def test_an_adapter_is_published_in_pefts_layout_and_gives_the_trainers_logprobs(tmp_path: Path, config: Any) -> None:
    records = run(settings(tmp_path, config, lora=LORA))
    assert all(record["grad_norm"] > 0 for record in records)
    assert len({record["grad_norm"] for record in records}) == 3

    directory = published(tmp_path, 3)
    names = {"adapter_config.json", "adapter_model.safetensors", "base.json", "files.json"}
    assert {path.name for path in directory.iterdir()} == names
    base = json.loads((directory / "base.json").read_text())
    assert base.keys() == {"location", "size", "checksum"}
    weights = Path(base["location"]) / "model.safetensors"
    assert (weights.stat().st_size, sha256_of(weights)) == (base["size"], base["checksum"])
    assert [path.name for path in (tmp_path / "weights").glob("base-*")] == [f"base-{base['checksum'][:12]}"]
    described = json.loads((directory / "adapter_config.json").read_text())
    assert (described["peft_type"], described["r"], described["lora_alpha"]) == ("LORA", 4, 8.0)
    assert described["base_model_name_or_path"] == base["location"]

    ids, positions, cu_seqlens = row(lengths=(40, 9, 33))
    plain = AutoModelForCausalLM.from_pretrained(base["location"], local_files_only=True).eval()
    with torch.no_grad():
        untrained = torch.cat([separate_logprobs(plain, piece) for piece in ids.split([40, 9, 33])])
        loaded: Any = peft.PeftModel.from_pretrained(plain, directory).eval()
        theirs = torch.cat([separate_logprobs(loaded.base_model.model, piece) for piece in ids.split([40, 9, 33])])
        trained = packed_forward(policy_of(tmp_path, config, 3))(ids, positions, cu_seqlens)
        sampler = build_model(settings(tmp_path, config).model, seed=0).eval()
        whole = in_own_names(sampler, load_state(Path(base["location"])))
        load_into(sampler, state_of(directory, base=whole))  # as the samplers do that know no LoRA
        ours = torch.cat([separate_logprobs(sampler, piece) for piece in ids.split([40, 9, 33])])
    torch.testing.assert_close(theirs, trained, rtol=0, atol=1e-5)
    torch.testing.assert_close(ours, trained, rtol=0, atol=1e-5)
    assert float((theirs - untrained).abs().max()) > 1e-4


def test_a_checkpoint_holds_the_adapter_alone_and_a_run_goes_on_from_it_exactly(tmp_path: Path) -> None:
    whole = run(settings(tmp_path / "whole", QWEN3, lora=LORA))
    run(settings(tmp_path / "halves", QWEN3, lora=LORA, steps=2))
    halves = run(settings(tmp_path / "halves", QWEN3, lora=LORA))
    assert [record["resumed_from"] for record in halves] == [0, 0, 2]
    assert [record["loss"] for record in halves] == [record["loss"] for record in whole]
    for of in ("policy", "optimizer"):
        ours, theirs = (load_parameters(tmp_path / name, 3, of=of) for name in ("halves", "whole"))
        assert ours
        assert ours.keys() == theirs.keys()
        assert all(".lora_" in name for name in ours)
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    bases = [next((tmp_path / name / "weights").glob("base-*")).name for name in ("halves", "whole")]
    assert bases[0] == bases[1]


def test_an_adapter_names_its_base_where_other_hosts_find_it(tmp_path: Path) -> None:
    """Hosts download both: test_adapter_downloads."""
    wanted = settings(tmp_path, QWEN3, lora=LORA, steps=1)
    run(wanted.model_copy(update={"weights": wanted.weights.model_copy(update={"url": "http://trainer:8"})}))
    base = json.loads((published(tmp_path, 1) / "base.json").read_text())
    assert base["location"] == f"http://trainer:8/base-{base['checksum'][:12]}"


def test_the_own_weights_stay_as_they_are_and_the_random_state_too() -> None:
    model = made(QWEN3)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    add_adapter(model, LoraSettings(**LORA), seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    after = {name.replace(".base_layer", ""): tensor for name, tensor in model.state_dict().items()}
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {name for name in model.state_dict() if ".lora_" in name}


def test_targets_choose_the_modules() -> None:
    model = made(QWEN3)
    add_adapter(model, LoraSettings(rank=2, targets=("q_proj", "v_proj")), seed=0)
    trained = {name.split(".")[4] for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {"q_proj", "v_proj"}


@pytest.mark.parametrize("targets", [("q_proj", "lm_head"), ("q_proj", "embed_tokens"), ("nothing",)])
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_targets_that_are_the_head_the_embeddings_or_not_there_are_refused(targets: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as refused:
        add_adapter(made(QWEN3), LoraSettings(rank=2, targets=targets), seed=0)
    assert refused.value.setting == "trainer.lora.targets"


EXPERTS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
    "gpt_oss": {"num_local_experts": 4},
    "granitemoe": {"num_local_experts": 4},
    "mixtral": {"num_local_experts": 4},
    "olmoe": {"num_experts": 4},
    "phimoe": {"num_local_experts": 4},
    "qwen2_moe": {"num_experts": 4, "shared_expert_intermediate_size": 16},
    "qwen3_moe": {"num_experts": 4},
}


@pytest.mark.parametrize("family", EXPERTS)
def test_the_default_targets_of_a_model_with_experts_are_plain_lora(family: str) -> None:
    model = with_experts(family)
    weights = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    add_adapter(model, LoraSettings(**LORA), seed=0)
    assert beyond_lora(adapter_config(model, base="x")) == ""
    state = adapter_state(model.state_dict())
    targets = {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in state}
    assert len(targets) >= 2 * 3, "attention of both layers"
    for target in targets:
        up, down = (state[f"base_model.model.{target}.lora_{side}.weight"] for side in "BA")
        assert weights[f"{target}.weight"] == (up.shape[0], down.shape[1])


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("mixtral", ("q_proj", "w1", "w2", "w3")),
        ("mixtral", ("w2",)),
        ("qwen3_moe", ("q_proj", "gate_proj", "up_proj", "down_proj")),
        ("qwen3_moe", ("down_proj",)),
        ("qwen3_moe", ("q_proj", "gate")),
    ],
)
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")
def test_targets_that_are_fused_experts_are_refused(family: str, targets: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        add_adapter(with_experts(family), LoraSettings(rank=2, targets=targets), seed=0)
    assert caught.value.setting == "trainer.lora.targets"


def with_experts(family: str) -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "vocab_size": 64}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_experts_per_tok": 2}
    config = AutoConfig.for_model(family, **sizes, **heads, **tokens, **EXPERTS[family])
    return AutoModelForCausalLM.from_config(config)


def test_without_peft_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError):
        add_adapter(made(QWEN3), LoraSettings(rank=2), seed=0)
