"""The parts of a Hugging Face model: what texts go through, and the blocks that it stacks."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel


def backbone_of(model: PreTrainedModel) -> Any:
    """The model without its head: what gives ``last_hidden_state``."""
    candidates = (model.base_model, model.get_decoder(), getattr(model, "model", model))  # type: ignore[no-untyped-call]
    return next((base for base in candidates if base is not model), model)


def text_model(model: PreTrainedModel) -> nn.Module:
    """The part that texts go through: a model of images has towers beside it."""
    decoder: nn.Module | None = model.get_decoder()  # type: ignore[no-untyped-call]
    text: nn.Module = backbone_of(model) if decoder is None or decoder is model else decoder
    return text


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The blocks that the model stacks, in order: what is recomputed, or sharded, as one."""
    base = text_model(model)
    stacks = [list(child) for child in base.children() if isinstance(child, nn.ModuleList)]
    stacks = stacks or [list(module) for module in base.modules() if isinstance(module, nn.ModuleList)][:1]
    return max(stacks, key=len, default=[])
