"""The model that trainer and samplers share: from a directory, or fresh from a config.

Imports torch and transformers: import this module lazily.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch.distributed.fsdp import FSDPModule
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from rlbuffer.config.adapters import instead_of_a_model
from rlbuffer.config.models import NO_MODEL_TYPE, which_model
from rlbuffer.config.settings import ModelSettings
from rlbuffer.errors import ConfigError, WeightsError
from rlbuffer.weights.fit import require_fit, some

TINY_QWEN3: Mapping[str, Any] = MappingProxyType(
    {
        "model_type": "qwen3",
        "vocab_size": 13,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "initializer_range": 0.1,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 12,
        "pad_token_id": None,
    }
)
"""The demo's policy: 83,136 parameters over the 13 symbols of the built-in envs.

`initializer_range` matters: with the usual 0.02 a model this small starts so flat that it does not learn in time.
"""

_DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.float32}
"""Type of the trained weights, by the type of the passes. They stay in float32 under bfloat16: its 8 bits of mantissa
lose every update that is smaller than 1/256 of its weight, which at the learning rates of post-training is nearly all
of them."""


def narrow_dtype(settings: ModelSettings) -> torch.dtype | None:
    """The dtype of products and of published weights, where it is not that of the trained weights."""
    return torch.bfloat16 if settings.dtype == "bfloat16" else None


def build_model(settings: ModelSettings, *, seed: int) -> PreTrainedModel:
    """The policy as training begins: the weights at `settings.path`, or fresh ones from `settings.config`.

    The same seed gives the same fresh weights in every process, and the global random state is left as it was.
    The model is in train mode, on the CPU.

    Raises:
        ConfigError: neither or both of path and config are set; the config or directory is not a causal LM.
    """
    dtype, make = _DTYPES[settings.dtype], cast(Any, AutoModelForCausalLM)  # its methods carry no types
    if bool(settings.path) == bool(settings.config):
        raise ConfigError(which_model(settings.path), setting="model")
    if settings.path:
        directory = Path(settings.path).expanduser()
        if not directory.is_dir():
            raise ConfigError(f"model.path: {directory} is not a directory", setting="model.path")
        what, fix = instead_of_a_model("model.path", settings.path)
        if what:  # the library would load the base that it names, with the adapter in it
            raise ConfigError(f"{what}. {fix}", setting="model.path")
        try:
            with _without_progress():
                model, told = make.from_pretrained(
                    directory,
                    dtype=dtype,
                    local_files_only=True,
                    trust_remote_code=False,
                    use_safetensors=True,
                    output_loading_info=True,
                )
            if told["missing_keys"]:  # the library would draw them: a model that nobody has trained
                raise ValueError(f"its files lack {some(sorted(told['missing_keys']))}")
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            raise ConfigError(f"model.path: {directory}: {error}", setting="model.path") from error
        trained: PreTrainedModel = model.train()
        return trained
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed every GPU too
        return model_from_config(settings.config, dtype=dtype)


def model_from_config(config: Mapping[str, Any], *, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A model of this Hugging Face config with freshly drawn weights, from torch's global random state.

    Raises:
        ConfigError: the config has no known `model_type`, or its values make no causal LM.
    """
    values = dict(config)
    model_type = values.pop("model_type", None)
    if not isinstance(model_type, str) or not model_type:
        raise ConfigError(NO_MODEL_TYPE, setting="model.config.model_type")
    values = {name: value for name, value in values.items() if name not in ("architectures", "dtype", "torch_dtype")}
    try:
        parsed: PretrainedConfig = AutoConfig.for_model(model_type, **values)
        make: Any = AutoModelForCausalLM  # its methods carry no types
        model: PreTrainedModel = make.from_config(parsed, dtype=dtype, trust_remote_code=False)
    except Exception as error:  # of the library, its checks of a config, and torch
        raise ConfigError(f"model.config: {error}", setting="model.config") from error
    model.train()
    return model


def config_of(model: PreTrainedModel, *, dtype: torch.dtype | None = None) -> dict[str, Any]:
    """The model's Hugging Face config as JSON types: what `publish` writes as ``config.json`` beside the weights.

    ``architectures`` is filled in: engines choose their implementation by it.

    Args:
        dtype: of the weights beside it, when it is not the model's own.
    """
    values: dict[str, Any] = json.loads(model.config.to_json_string(use_diff=False))
    values["architectures"] = [class_of(model).__name__]
    values.setdefault("model_type", model.config.model_type)
    if dtype is not None:
        values["dtype"] = str(dtype).removeprefix("torch.")
    return values


def class_of(model: PreTrainedModel) -> type[PreTrainedModel]:
    """The model's class in the library: FSDP2 gives a model that it shares one of its own."""
    kinds = (kind for kind in type(model).__mro__ if issubclass(kind, PreTrainedModel))
    return next(kind for kind in kinds if not issubclass(kind, FSDPModule))


def made_again(model: PreTrainedModel) -> PreTrainedModel:
    """A model of the same class and config without values, on the meta device: what whoever loads its weights makes.

    Raises:
        WeightsError: its config alone makes none.
    """
    kind = class_of(model)
    try:
        with torch.device("meta"):
            return kind(copy.deepcopy(model.config))
    except Exception as error:  # of the library, its checks of a config, and torch
        raise WeightsError(f"no {kind.__name__} can be made of its config alone: {error}") from error


def unaliased(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state without names that are another name's tensor (tied weights): the first name stays.

    A safetensors file holds no shared tensors, and a loader ties them again.
    """
    seen: set[tuple[Any, ...]] = set()
    kept = {}
    for name, tensor in state.items():
        place = (tensor.device, tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape)
        if tensor.numel() and place in seen:
            continue
        seen.add(place)
        kept[name] = tensor
    return kept


def load_into(model: PreTrainedModel, state: Mapping[str, torch.Tensor]) -> None:
    """Copies `state` into the model's weights, in place, converting the dtype. Its names are the model's own, or those
    of its family's checkpoints, which :func:`rlbuffer.weights.state.model_state` gives.

    Raises:
        WeightsError: a name is missing or unknown, a shape or dtype is another one, or a value is not finite.
            Everything is checked first: the model is then as it was.
    """
    state = in_own_names(model, state)
    require_fit(model, state)
    weights = model.state_dict()
    with torch.no_grad():
        for name in unaliased(weights):
            weights[name].copy_(state[name])


def in_own_names(model: PreTrainedModel, state: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """A checkpoint's tensors as the library puts them into such a model; as they are where they have its names, or are
    not all of it. The global random state is left as it was."""
    if state.keys() <= model.state_dict().keys():
        return state
    dtype, make = next(model.parameters()).dtype, cast(Any, type(model))  # its methods carry no types
    try:
        with torch.random.fork_rng(devices=[]), _without_progress():
            loaded, told = make.from_pretrained(
                None,
                config=model.config,
                state_dict=dict(state),
                dtype=dtype,
                output_loading_info=True,
                trust_remote_code=False,
                use_safetensors=True,
            )
    except (RuntimeError, ValueError, KeyError, TypeError):
        return state
    return state if any(told.values()) else unaliased(loaded.state_dict())


@contextmanager
def _without_progress() -> Iterator[None]:
    """No bar on stderr: workers would show one at every version, and the semaphore of a rank's would outlive it."""
    bars: Any = logging  # its functions carry no types
    if not bars.is_progress_bar_enabled():
        yield
        return
    bars.disable_progress_bar()
    try:
        yield
    finally:
        bars.enable_progress_bar()
