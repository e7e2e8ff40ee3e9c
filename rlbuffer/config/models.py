"""A model as its files and its config tell of it. Nothing is imported."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlbuffer.config.settings import ModelSettings

EXAMPLE = "a file of `rlbuffer config init`"
NO_MODEL_TYPE = 'model.config: model_type is missing, e.g. "qwen3"'


def model_modules(config: Mapping[str, Any]) -> list[str]:
    """The module that makes a model of this config, to be imported before processes are forked that all need it."""
    kind = config.get("model_type")
    return [f"transformers.models.{kind}.modeling_{kind}"] if kind and isinstance(kind, str) else []


def config_of(model: ModelSettings) -> Mapping[str, Any]:
    """The model's Hugging Face config; {} where none can be read."""
    if not model.path:
        return model.config
    try:
        read = json.loads((Path(model.path).expanduser() / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return read if isinstance(read, dict) else {}


def which_model(path: str) -> str:
    """The sentence for when neither or both of path and config are set."""
    how = "both are set" if path else "neither is set"
    return (
        f"model: exactly one of path and config is needed; {how}. Give [model] path = a Hugging Face model's "
        f"directory, or [model.config] for a fresh model ({EXAMPLE} has one)"
    )


def router_loss(config: Mapping[str, Any]) -> str:
    """The reason why a model with this Hugging Face config is not trained as it asks; "" where it does not ask.

    The loss is a product of means over a batch, so no sum over micro-batches and ranks gives it.
    """
    text = config.get("text_config")
    where = next((c for c in (config, text) if isinstance(c, Mapping) and c.get("output_router_logits")), None)
    if where is None:
        return ""
    return (
        f"model: output_router_logits = true asks for the router auxiliary loss of experts (router_aux_loss_coef = "
        f"{where.get('router_aux_loss_coef')}), which rlbuffer train does not compute: set it to false in the model's "
        "config to train without that loss, or compute it in a trainer of your own"
    )


_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TAKEN = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_k", "moe_topk")


class ExpertCounts(NamedTuple):
    """The sizes of a model with experts."""

    layers: int
    """Of the model, those without experts too."""
    taken: int
    """Experts of a token in one layer; 0: the config does not say."""
    experts: int
    """Of one layer."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes that the record of a token takes."""
        return self.layers * self.taken * (1 if self.experts <= 256 else 2)

    @property
    def words(self) -> str:
        """What a record of them takes, for people."""
        return f"{self.bytes_per_token} bytes a token ({self.layers} layers, {self.taken} of {self.experts} experts)"


def experts_in(config: Mapping[str, Any]) -> ExpertCounts | None:
    """What a Hugging Face config says of experts; None of a model without.

    Example:
        >>> experts_in({"num_hidden_layers": 48, "num_experts": 128, "num_experts_per_tok": 8}).words
        '384 bytes a token (48 layers, 8 of 128 experts)'
    """
    text = config.get("text_config")
    config = text if isinstance(text, Mapping) else config
    experts, taken = _first_count(config, _COUNTS), _first_count(config, _TAKEN)
    if experts < 2:
        return None
    return ExpertCounts(_first_count(config, ("num_hidden_layers",)), taken, experts)


def _first_count(config: Mapping[str, Any], names: Sequence[str]) -> int:
    values = (config.get(name) for name in names)
    return next((value for value in values if isinstance(value, int) and value), 0)
