"""A model whose weights stay in their file, for one forward pass of a model that is larger than memory.

The file is mapped, not read. A layer's weights are made float32 just before the layer is called and let go after it, so
that a pass takes memory for one layer, the embedding and the head. Nothing of it is drawn or initialised.

Imports torch and transformers: import this module lazily.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from rlbuffer.errors import ConfigError, WeightsError
from rlbuffer.weights.model import model_from_config


class _WithoutMemory(TorchFunctionMode):
    """Tensors that are made to be filled later take no memory; all others are what they are (frequencies, masks)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if func is torch.empty:
            given["device"] = "meta"
        return func(*args, **given)


def streamed_model(config: Mapping[str, Any], state: Mapping[str, torch.Tensor]) -> PreTrainedModel:
    """A model of this Hugging Face config, in eval mode, that takes its weights from `state` while it computes.

    Raises:
        ConfigError: as :func:`rlbuffer.weights.model.model_from_config`.
        WeightsError: `state` lacks a weight of the model, or has it in another shape.
    """
    with torch.random.fork_rng(devices=[]):
        model = _empty(config)
        if model is None or any(buffer.is_meta and name not in state for name, buffer in model.named_buffers()):
            model = model_from_config(config)  # it looks at what it has made, or fills a buffer that no file has
    model.train(False).requires_grad_(False)
    own = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    known: dict[int, str] = {}
    for name, tensor in own:
        if name in state:
            known.setdefault(id(tensor), name)  # a tied weight stands in the file once
    for name, tensor in own:
        stored_name = known.get(id(tensor))
        if stored_name is None and isinstance(tensor, nn.Parameter):
            raise WeightsError(f"the weights do not fit the model: they lack {name}")
        if stored_name is not None and state[stored_name].shape != tensor.shape:
            raise WeightsError(
                f"the weights do not fit the model: {stored_name} has shape {list(state[stored_name].shape)}, "
                f"the model's is {list(tensor.shape)}"
            )
    for unit, parts in _units(model):
        weights = _Weights(parts, known, state)
        unit.register_forward_pre_hook(weights.take)
        unit.register_forward_hook(weights.let_go)
    return model


def _empty(config: Mapping[str, Any]) -> PreTrainedModel | None:
    try:
        with _WithoutMemory():
            return model_from_config(config)
    except ConfigError:
        return None


class _Weights:
    """Those of what is called as one."""

    def __init__(self, parts: list[nn.Module], known: Mapping[int, str], state: Mapping[str, torch.Tensor]) -> None:
        self._state = state
        self._places: list[tuple[dict[str, Any], str, torch.Tensor, str]] = [
            (tensors, key, tensor, known[id(tensor)])
            for part in parts
            for tensors in (part._parameters, part._buffers)
            for key, tensor in tensors.items()
            if tensor is not None and id(tensor) in known
        ]

    def take(self, *_: Any) -> None:
        """Before the call."""
        for tensors, key, tensor, name in self._places:
            filled = self._state[name].to(tensor.dtype)
            tensors[key] = nn.Parameter(filled, False) if isinstance(tensor, nn.Parameter) else filled

    def let_go(self, *_: Any) -> None:
        """After it."""
        for tensors, key, tensor, _name in self._places:
            tensors[key] = tensor


def _units(module: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Module]]]:
    """The units that are called as one, with the modules whose weights each needs: whole layers, and single modules.

    A layer may use a weight of a module in it without calling that module.
    """
    yield module, [module]
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            for layer in child:
                yield layer, list(layer.modules())
        else:
            yield from _units(child)
