"""Policy versions that are LoRA adapters, written as a trainer writes them, and the models that they make."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from samplers_conformance import CONFIG
from transformers import PreTrainedModel

from rlbuffer.records import PolicyVersion
from rlbuffer.settings import ModelSettings
from rlbuffer.weights.disk import sha256_of
from rlbuffer.weights.files import publish
from rlbuffer.weights.model import build_model, config_of

RANK, ALPHA = 4, 8
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def published_base(directory: Path, *, seed: int = 0) -> tuple[PreTrainedModel, PolicyVersion]:
    """A model and where it lies: what adapters are for."""
    model = build_model(ModelSettings(config=dict(CONFIG)), seed=seed).eval()
    return model, publish(directory / f"base-{seed}", 0, state=model.state_dict(), config=config_of(model), keep=1)


def write_adapter(
    directory: Path, version: int, base: PolicyVersion, factors: dict[str, torch.Tensor]
) -> PolicyVersion:
    """Writes an adapter's directory and says what a trainer would announce."""
    directory.mkdir(parents=True)
    file = directory / "adapter_model.safetensors"
    save_file(factors, file, metadata={"format": "pt"})
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
    (directory / "adapter_config.json").write_text(json.dumps(config))
    told = {"location": base.location, "size": base.size, "checksum": base.checksum}
    (directory / "base.json").write_text(json.dumps(told))
    return PolicyVersion(version=version, location=str(directory), size=file.stat().st_size, checksum=sha256_of(file))


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


def adapters(directory: Path, count: int = 4) -> tuple[list[PreTrainedModel], list[PolicyVersion]]:
    """Versions that differ in every adapted matrix, and for each the model that it is together with its base."""
    base, where = published_base(directory)
    models, versions = [], []
    for version in range(count):
        factors = drawn_factors(base, version)
        versions.append(write_adapter(directory / f"v{version:08d}", version, where, factors))
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
    return PolicyVersion(version=version.version, location=str(to), size=version.size, checksum=version.checksum)
