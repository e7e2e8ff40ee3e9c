"""The whole tensors of a language model that ranks may share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule


def is_sharded(module: nn.Module) -> bool:
    """Ranks hold parts of its parameters."""
    return isinstance(module, FSDPModule)


def model_state(
    module: nn.Module, *, inside: str = "", dtype: torch.dtype | None = None, only_trained: bool = False
) -> dict[str, Tensor]:
    """name -> whole tensor of the language model, by the library's own names. Sharded: all ranks must call it.

    A tied tensor stands under its first name only: gathered or converted, nobody could tell any more that it is one.
    Only rank 0 gets a sharded model's tensors, on the CPU.

    Args:
        inside: name of the attribute of `module` that is the language model; "": it is the module itself.
        dtype: floating-point tensors are given in this one.
        only_trained: a sharded model's frozen parameters are neither gathered nor given.
    """
    model = module.get_submodule(inside)
    if is_sharded(module):
        options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=only_trained)
        named: dict[str, Any] = get_model_state_dict(module, options=options)
        state: dict[str, Tensor] = {name.removeprefix(f"{inside}."): tensor for name, tensor in named.items()}
    else:
        state = model.state_dict()
    tied = tied_names(model)
    kept = {name: tensor for name, tensor in state.items() if name not in tied}
    if dtype is None:
        return kept
    return {name: t.to(dtype) if t.is_floating_point() else t for name, t in kept.items()}


def tied_names(module: nn.Module) -> set[str]:
    """Names of parameters that are another name's tensor: every name of it but the first."""
    first: dict[int, str] = {}
    named = module.named_parameters(remove_duplicate=False)
    return {name for name, parameter in named if first.setdefault(id(parameter), name) != name}
