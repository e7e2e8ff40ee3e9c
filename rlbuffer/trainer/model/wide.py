"""float64 throughout: what the library rounds to float32 in between stays as it is.

float64 is there to show that sums over ranks agree, and that what is trained is what was sampled. Norms, routers,
rotary angles and softmaxes that round to float32 turn differences of 1e-16 into 1e-7; and the fused product of experts,
the library's first choice, takes no float64 at all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from rlbuffer.weights.blocks import backbone_of, decoder_layers

_SOFTMAXES = (torch.softmax, torch.nn.functional.softmax, Tensor.softmax)


class Wide(TorchFunctionMode):
    """Inside, nothing of float64 is rounded to float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            if func in (Tensor.to, Tensor.type):
                args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
            if func in (Tensor.to, Tensor.type, *_SOFTMAXES) and kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def in_float64(model: PreTrainedModel) -> None:
    """Lets a model of float64 compute in it from its embedding to its last norm, what is computed again included."""
    model.double()  # its tables, too
    if getattr(model.config, "_experts_implementation", None) is not None:
        model.set_experts_implementation("eager")
    for module in (*decoder_layers(model), backbone_of(model)):
        module.forward = partial(_widely, module.forward)


def _widely(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with Wide():
        return forward(*args, **kwargs)
