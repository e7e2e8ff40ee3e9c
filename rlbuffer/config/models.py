"""A model as its files and its config tell of it. Nothing is imported."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
