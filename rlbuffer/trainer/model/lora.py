"""LoRA: low-rank adapters in the place of trained weights, through PEFT.

The adapter's matrices are put into the model's own modules and are all that trains. PEFT is imported only when
``[trainer.lora]`` asks for it; what is published is its own layout, which engines load as it is.

Source: LoRA, arXiv 2106.09685; PEFT's ``adapter_config.json`` and ``adapter_model.safetensors``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlbuffer.config.adapters import adapter_config as adapter_config_at
from rlbuffer.config.adapters import beyond_lora, wrong_start
from rlbuffer.config.trainer import LoraSettings
from rlbuffer.errors import ConfigError, WeightsError, installed_by
from rlbuffer.weights.blocks import text_model
from rlbuffer.weights.fit import require_same
from rlbuffer.weights.layout import ADAPTER_FILE

_ADAPTER = "default"
_SIGN = ".lora_"
_TAKEN = ("r", "lora_alpha", "target_modules", "layers_to_transform", "layers_pattern", "use_rslora")
"""Options that an adapter which training begins with decides."""
_PREFIX = "base_model.model."
"""Prefix that PEFT puts before the names of a model's modules in an adapter's file."""


def add_adapter(model: PreTrainedModel, settings: LoraSettings, *, seed: int) -> None:
    """Puts an adapter into the model, in place; only its matrices train from then on.

    A fresh one changes nothing yet, since one of its two factors is zero. The same seed gives the same adapter
    everywhere, and the global random state is left as it was. With ``path`` it has that adapter's weights.

    Raises:
        ConfigError: PEFT is not installed; no module has a name of `targets`; the head is one of them, or experts that
            are fused into one parameter; the adapter at `path` is more than LoRA, or does not fit the model.
    """
    setting = "trainer.lora.path" if settings.path else "trainer.lora.targets"
    try:
        import peft
    except ImportError as error:
        name = "trainer.lora.path" if settings.path else "trainer.lora.rank"
        raise ConfigError(f"{name} needs PEFT ({error}): {installed_by('lora')}", setting=name) from error
    why, wrong = wrong_start(settings)
    if why:
        raise ConfigError(why, setting=wrong)
    made: Any = peft.LoraConfig  # declares alpha as int; any number does
    config = made(
        **_chosen(model, settings),
        exclude_modules=_beside_texts(model) or None,
        lora_dropout=0.0,
        fan_in_fan_out=any(type(module).__name__ == "Conv1D" for module in model.modules()),  # GPT-2's linear layers
        bias="none",
        task_type="CAUSAL_LM",
    )
    what = f"{setting} = {settings.path or list(settings.targets)}"
    outside: list[Any] = [model.get_output_embeddings(), model.get_input_embeddings()]  # type: ignore[no-untyped-call]
    dtype = next(model.parameters()).dtype
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            peft.inject_adapter_in_model(config, model, _ADAPTER)
    except ValueError as error:
        raise ConfigError(f"{what}: {error}", setting=setting) from error
    beyond = beyond_lora(adapter_config(model, base=""))
    if beyond or [model.get_output_embeddings(), model.get_input_embeddings()] != outside:  # type: ignore[no-untyped-call]
        parts = f"experts, of which PEFT makes {beyond}" if beyond else "the embeddings or the head"
        raise ConfigError(
            f"{what} names {parts}: no sampler serves an adapter of experts, and none would act in the head, which is "
            "computed in chunks of its own matrix. Leave them out",
            setting=setting,
        )
    for name, parameter in model.named_parameters():
        parameter.requires_grad = _SIGN in name
        parameter.data = parameter.data.to(dtype)
    if settings.path:
        _load(model, Path(settings.path).expanduser())


def _chosen(model: PreTrainedModel, settings: LoraSettings) -> dict[str, Any]:
    """What decides rank, scale and modules: the settings, or the config of the adapter that training begins with."""
    begun = adapter_config_at(settings.path) if settings.path else None
    if begun:
        return {name: begun[name] for name in _TAKEN if begun.get(name) is not None}
    targets = list(settings.targets)
    return {
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "target_modules": _linear_layers(model) if targets == ["all-linear"] else targets,
    }


def _load(model: PreTrainedModel, directory: Path) -> None:
    """Copies the weights of the adapter in a directory into that of the model.

    Raises:
        ConfigError: the file cannot be read; its tensors are not those of the model's modules, or not finite.
    """
    weights = adapter_state(model.state_dict())
    try:
        begun = load_file(directory / ADAPTER_FILE)
        require_same(weights, begun, to="the model")
    except (OSError, SafetensorError, WeightsError) as error:
        raise ConfigError(f"trainer.lora.path: {directory}: {error}", setting="trainer.lora.path") from error
    with torch.no_grad():
        for name, tensor in weights.items():
            tensor.copy_(begun[name])


def _linear_layers(model: PreTrainedModel) -> str | list[str]:
    """The targets of `all-linear`: as PEFT reads it, without the blocks that hold experts, their routers included.

    PEFT would adapt fused experts as parameters of a rank of their own, and no sampler serves those.
    """
    paths = [name.split(".") for name, _ in model.named_modules()]
    blocks = {path[-2] for path in paths if path[-1] == "experts" and len(path) > 1}
    if not blocks:
        return "all-linear"
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head and not blocks & set(name.split("."))
    ]


def _beside_texts(model: PreTrainedModel) -> list[str]:
    """Modules that no text goes through, such as those of a tower for images: nothing would train there."""
    parts = (text_model(model), model.get_output_embeddings())  # type: ignore[no-untyped-call]
    used = {id(module) for part in parts if part is not None for module in part.modules()}
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and id(module) not in used]


def adapter_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The adapter's tensors among a model's, under the names that PEFT's files have."""
    return {f"{_PREFIX}{name.replace(f'.{_ADAPTER}.', '.')}": t for name, t in state.items() if _SIGN in name}


def adapter_config(model: PreTrainedModel, *, base: str) -> dict[str, Any]:
    """``adapter_config.json``, JSON types; `base` is the location of the model that the adapter is for."""
    peft_model: Any = model
    values = dict(peft_model.peft_config[_ADAPTER].to_dict())
    values |= {"base_model_name_or_path": base, "inference_mode": True}
    plain: dict[str, Any] = json.loads(json.dumps(values, default=_plain))
    return plain


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, set | frozenset) else getattr(value, "value", str(value))
