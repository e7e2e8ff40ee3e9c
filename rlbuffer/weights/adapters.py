"""LoRA adapters as policy versions: the model that one is for, and the weights that both make together.

An engine that knows LoRA takes an adapter's directory as it is. Where there is none it is merged: W + scale * B @ A for
every matrix W [out, in] that has a pair A [r, in], B [out, r]; ``fan_in_fan_out`` says that W is [in, out].

Source: arXiv 2106.09685; PEFT's ``adapter_config.json`` and ``adapter_model.safetensors``. Imports torch and
safetensors: import this module lazily.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from rlbuffer.config.adapters import beyond_lora
from rlbuffer.config.addresses import is_url
from rlbuffer.errors import WeightsError
from rlbuffer.weights.files import load_state, open_weights
from rlbuffer.weights.fit import DOWN, UP, require_adapter
from rlbuffer.weights.layout import ADAPTER_CONFIG_FILE, ADAPTER_FILE, base_of, is_adapter

_PREFIX = "base_model.model."
"""Prefix that PEFT puts before the names of a model's modules."""


def require_base(directory: Path, checksum: str) -> None:
    """Compares the base of an adapter with the model that an engine was started with; whole models have none.

    Raises:
        WeightsError: it is another one.
    """
    base_checksum = base_of(directory).checksum if is_adapter(directory) else ""
    if base_checksum != checksum:
        raise WeightsError(
            f"the adapter at {directory} is for the base model with sha256 {base_checksum[:12]}, "
            f"the engine runs the one with {checksum[:12]}"
        )


def model_directory(directory: Path) -> Path:
    """A directory with config and weights of a whole model: `directory`, or that of its base, verified.

    The base of an adapter that was downloaded lies beside it.

    Raises:
        WeightsError: the base is not there, or not the one that the adapter is for.
    """
    if not is_adapter(directory):
        return directory
    base = base_of(directory)
    if is_url(base.location):
        beside = directory.parent / base.location.rstrip("/").rpartition("/")[2]
        base = replace(base, location=str(beside)) if beside.is_dir() else base
    try:
        return open_weights(base)
    except WeightsError as error:
        raise WeightsError(f"the base model of the adapter at {directory}: {error}") from error


def state_of(directory: Path, *, base: Mapping[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    """The tensors of a version, on the CPU; an adapter's are merged into those of its base.

    Args:
        base: the base's tensors, where they have been read already; they are left as they are. An adapter has the
            names of the model's own modules: where checkpoints have others, so must these.

    Raises:
        WeightsError: a file is missing or damaged; the adapter does not fit its base, or is more than LoRA.
    """
    if not is_adapter(directory):
        return load_state(directory)
    state = dict(load_state(model_directory(directory)) if base is None else base)
    rank, scale = rank_and_scale(directory)
    is_transposed = bool(_read_config(directory).get("fan_in_fan_out"))
    path = directory / ADAPTER_FILE
    try:
        factors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"{path} cannot be loaded: {error}") from error
    try:
        require_adapter(factors, rank)
    except WeightsError as error:
        raise WeightsError(f"{path}: {error}") from error
    for name, down in factors.items():
        if name.endswith(UP):
            continue  # met with the other one
        up = factors[name.removesuffix(DOWN) + UP]
        target = f"{name.removeprefix(_PREFIX).removesuffix(DOWN)}.weight"
        weight = state.get(target)
        shape = (up.shape[0], down.shape[1])[:: -1 if is_transposed else 1]
        if weight is None or weight.shape != shape:
            raise WeightsError(f"the weights do not fit the model: {name} of the adapter at {directory}")
        # In float32 at least, and left there: bfloat16 has no room for what an adapter adds to its base.
        wide = torch.promote_types(weight.dtype, torch.float32)
        product = up.to(wide) @ down.to(wide)
        state[target] = weight.to(wide) + scale * (product.T if is_transposed else product)
    return state


def rank_and_scale(directory: Path) -> tuple[int, float]:
    """An adapter's rank, and what its product is multiplied by.

    Raises:
        WeightsError: ``adapter_config.json`` cannot be read, or the adapter is more than LoRA.
    """
    path = directory / ADAPTER_CONFIG_FILE
    try:
        config = _read_config(directory)
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        more = beyond_lora(config)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise WeightsError(f"{path} cannot be read: {error!r}") from error
    if more:
        raise WeightsError(f"{path}: {more} is more than LoRA, which is all that is served")
    return rank, scale


def _read_config(directory: Path) -> Mapping[str, Any]:
    config: Mapping[str, Any] = json.loads((directory / ADAPTER_CONFIG_FILE).read_text("utf-8"))
    return config
