"""Do weights fit a model? Asked before they are published and before they are loaded, so that both refuse the same.

Imports torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from rlbuffer.errors import WeightsError

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of weights. Narrower ones mean nothing without scales, which no sampler gets."""
DOWN, UP = ".lora_A.weight", ".lora_B.weight"
"""Ends of the names of an adapter's two factors."""


def require_fit(model: nn.Module, state: Mapping[str, Tensor], *, to: str = "the model") -> None:
    """Compares tensors with those of a model, by their own names; the model may be without values, on the meta device.

    A tied weight may stand under its first name alone.

    Args:
        to: what they shall fit, for the message.

    Raises:
        WeightsError: a name is missing or unknown; a shape or a dtype is another one; a value is not finite.
    """
    first_of = tied_names(model)
    require_same(model.state_dict(), state, may_lack=first_of, to=to)
    for name, first in first_of.items():
        if name in state and not torch.equal(state[name], state[first]):
            raise WeightsError(
                f"the weights do not fit {to}: {name} differs from {first}, to which {to} ties it (tie_word_embeddings)"
            )


def require_same(
    expected: Mapping[str, Tensor], state: Mapping[str, Tensor], *, may_lack: Collection[str] = (), to: str
) -> None:
    """Compares names, shapes and dtypes with those of `expected`, and looks at the values of `state`.

    Raises:
        WeightsError: as :func:`require_fit`.
    """
    missing = [name for name in expected if name not in state and name not in may_lack]
    unknown = [name for name in state if name not in expected]
    if missing or unknown:
        parts = [f"lack {some(missing)}"] * bool(missing) + [f"have unknown {some(unknown)}"] * bool(unknown)
        is_adapted = any(".base_layer." in name for name in unknown)
        why = " (PEFT has put an adapter into the model: merge_and_unload() gives it back)" * is_adapted
        raise WeightsError(f"the weights do not fit {to}: they {' and '.join(parts)}{why}")
    for name, tensor in state.items():
        if tensor.shape != expected[name].shape:
            why = " (it is empty, as ZeRO-3 leaves parameters that are not gathered)" * (not tensor.numel())
            raise WeightsError(
                f"the weights do not fit {to}: {name} has shape {list(tensor.shape)}, "
                f"that of {to} is {list(expected[name].shape)}{why}"
            )
        _require_values(name, tensor, like=expected[name].dtype)


def require_adapter(state: Mapping[str, Tensor], rank: int) -> None:
    """Looks at the tensors of a LoRA adapter of this rank: pairs A [rank, in] and B [out, rank], by PEFT's names.

    Raises:
        WeightsError: there are none; one is without the other, of another rank or dtype, or not finite.
    """
    if not state:
        raise WeightsError("the adapter has no tensors: no module of the model has one")
    for name, tensor in state.items():
        kind, dimension, other = (DOWN, 0, UP) if name.endswith(DOWN) else (UP, 1, DOWN)
        if name.removesuffix(kind) + other not in state or not name.endswith(kind):
            raise WeightsError(f"the adapter is no LoRA adapter: {name} is no half of a pair (lora_A, lora_B)")
        if tensor.dim() != 2 or tensor.shape[dimension] != rank:
            raise WeightsError(f"the adapter does not fit its config: {name} is {list(tensor.shape)} at rank {rank}")
        _require_values(name, tensor, like=torch.float32)


def _require_values(name: str, tensor: Tensor, *, like: torch.dtype) -> None:
    if tensor.is_meta:
        raise WeightsError(f"the weights have no values: {name} is on the meta device")
    if tensor.dtype != like and not (like.is_floating_point and tensor.dtype in _DTYPES):
        what = str(tensor.dtype).removeprefix("torch.")
        raise WeightsError(f"the weights are not plain numbers: {name} is {what}, and nothing scales it back")
    if not is_finite(tensor):
        raise WeightsError(f"the weights are not finite: {name}")


def is_finite(tensor: Tensor) -> bool:
    """No value is infinite or NaN. By the extremes, in which a NaN shows: ``isfinite`` takes fifty times as long."""
    if not tensor.numel() or not tensor.is_floating_point():
        return True
    return bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all())


def tied_names(module: nn.Module) -> dict[str, str]:
    """Names of parameters that are another name's tensor, each with the first name of it."""
    first: dict[int, str] = {}
    named = module.named_parameters(remove_duplicate=False)
    return {name: first[id(p)] for name, p in named if first.setdefault(id(p), name) != name}


def some(names: Sequence[str]) -> str:
    """The first three names, and how many more there are."""
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
