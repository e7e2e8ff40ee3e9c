"""The whole tensors of a language model that ranks may share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from rlbuffer.errors import WeightsError
from rlbuffer.weights.fit import require_fit, tied_names
from rlbuffer.weights.model import made_again

_WRAPPED = "_orig_mod."
"""What torch.compile puts into the names of a module that is compiled inside of a model."""


def is_sharded(module: nn.Module) -> bool:
    """Ranks hold parts of its parameters."""
    return isinstance(module, FSDPModule) or any(isinstance(p, DTensor) for p in module.parameters())


def model_state(
    module: nn.Module, *, inside: str = "", dtype: torch.dtype | None = None, only_trained: bool = False
) -> dict[str, Tensor]:
    """name -> whole tensor of the language model, as a checkpoint of its family has it. Sharded: all ranks call it.

    A tied tensor stands under its first name only: gathered or converted, nobody could tell any more that it is one.
    Names are those of published checkpoints, which engines know: the library's models stack experts, for example.
    Only rank 0 gets a sharded model's tensors, on the CPU. Weights that the model's config does not describe, or that
    are not finite, are refused there: nobody could load them.

    Args:
        inside: name of the attribute of `module` that is the language model; "": it is the module itself.
        dtype: floating-point tensors are given in this one.
        only_trained: a sharded model's frozen parameters are neither gathered nor given.

    Raises:
        WeightsError: see :func:`rlbuffer.weights.fit.require_fit`; not with `only_trained`, which gives a part.
    """
    model = module.get_submodule(inside)
    if is_sharded(module):
        options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=only_trained)
        named: dict[str, Any] = get_model_state_dict(module, options=options)
        state: dict[str, Tensor] = {name.removeprefix(f"{inside}."): tensor for name, tensor in named.items()}
    else:
        state = model.state_dict()
    tied = tied_names(model)
    kept = {name.replace(_WRAPPED, ""): tensor for name, tensor in state.items() if name not in tied}
    if kept and not only_trained and isinstance(model, PreTrainedModel):
        try:
            require_fit(made_again(model), kept, to="its config")
        except WeightsError as error:
            raise WeightsError(f"the model cannot be published: {error}") from error
    if dtype is not None or not only_trained:
        # To the CPU one by one: a GPU that trains has no room for all of them once more, nor for experts in pieces.
        kept = {name: t.to("cpu", dtype if dtype and t.is_floating_point() else t.dtype) for name, t in kept.items()}
    return kept if only_trained else _as_published(model, kept)


def detached(state: Mapping[str, Tensor], module: nn.Module) -> dict[str, Tensor]:
    """`state` on the CPU, in memory that is not the module's: its next step changes nothing here.

    ``Tensor.to("cpu", dtype)`` gives the parameter itself where it is on the CPU in this dtype, and a gather of one
    rank's parts may. What shares memory among `state`, as tied tensors do, still does.
    """
    parameters = (*module.parameters(), *module.buffers())
    places = {_place(p.to_local() if isinstance(p, DTensor) else p) for p in parameters}
    copies: dict[int, torch.UntypedStorage] = {}
    out = {}
    for name, tensor in state.items():
        here = tensor.detach().to("cpu")
        place = _place(here)
        if place in places:
            if place not in copies:
                copies[place] = here.untyped_storage().clone()  # type: ignore[no-untyped-call]
            where = here.storage_offset(), here.size(), here.stride()
            here = torch.empty(0, dtype=here.dtype).set_(copies[place], *where)
        out[name] = here
    return out


def _place(tensor: Tensor) -> int:
    """Where the memory of a tensor begins."""
    return tensor.untyped_storage().data_ptr()


def _as_published(model: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under the names, and in the pieces, that the library reads and ``save_pretrained`` writes."""
    if not isinstance(model, PreTrainedModel) or not state:
        return state
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return state
    converted: dict[str, Tensor] = revert_weight_conversion(model, state)
    return converted
