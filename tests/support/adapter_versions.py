"""Policy versions that are LoRA adapters, written as a trainer writes them, and the models that they make."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from rlbuffer.config.settings import ModelSettings
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.weights.files import publish_adapter, publish_base
from rlbuffer.weights.model import build_model, config_of
from rlbuffer.weights.state import model_state
from rlbuffer.worker.samplers.conformance import CONFIG

RANK, ALPHA = 4, 8
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def published_base(directory: Path, config: Mapping[str, Any] = CONFIG) -> tuple[PreTrainedModel, PolicyVersion]:
    """A model and where it lies: what adapters are for."""
    model = build_model(ModelSettings(config=dict(config)), seed=0).eval()
    return model, publish_base(directory, state=model_state(model), config=config_of(model))


def write_adapter(
    directory: Path, version: int, base: PolicyVersion, factors: dict[str, torch.Tensor], *, keep: int = 10
) -> PolicyVersion:
    """Writes an adapter of these factors and says what a trainer would announce."""
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.location,
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": list(TARGETS),
        "bias": "none",
        "use_dora": False,
        "use_rslora": False,
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "inference_mode": True,
    }
    return publish_adapter(directory, version, state=factors, config=config, base=base, keep=keep)


def drawn_factors(model: PreTrainedModel, seed: int) -> dict[str, torch.Tensor]:
    """A and B of every matrix that is adapted, under PEFT's names."""
    generator = torch.Generator().manual_seed(seed)
    factors = {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in TARGETS:
            out, into = module.weight.shape
            factors[f"base_model.model.{name}.lora_A.weight"] = 0.2 * torch.randn(RANK, into, generator=generator)
            factors[f"base_model.model.{name}.lora_B.weight"] = 0.2 * torch.randn(out, RANK, generator=generator)
    return factors


def adapters(
    directory: Path, count: int = 4, *, config: Mapping[str, Any] = CONFIG
) -> tuple[list[PreTrainedModel], list[PolicyVersion]]:
    """Versions that differ in every adapted matrix, and for each the model that it is together with its base."""
    base, where = published_base(directory, config)
    models, versions = [], []
    for version in range(count):
        factors = drawn_factors(base, version)
        versions.append(write_adapter(directory, version, where, factors))
        model = copy.deepcopy(base)
        for name, module in model.named_modules():
            if name.rpartition(".")[2] in TARGETS:
                down, up = (factors[f"base_model.model.{name}.lora_{half}.weight"] for half in "AB")
                module.weight.data += (ALPHA / RANK) * (up @ down)
        models.append(model)
    return models, versions


def changed(version: PolicyVersion, to: Path, **config: object) -> PolicyVersion:
    """A copy of an adapter with other options in its config."""
    shutil.copytree(version.location, to)
    path = to / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return replace(version, location=str(to))
