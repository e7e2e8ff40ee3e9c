"""Norms that compute in float64."""

from __future__ import annotations

import copy

import torch
from transformers import PreTrainedModel

from rlbuffer.trainer.model.norms import norms_in_float64
from rlbuffer.weights.model import model_from_config

CONFIG = {
    "model_type": "llama",
    "vocab_size": 16,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def made() -> PreTrainedModel:
    model = model_from_config(CONFIG, dtype=torch.float64)
    norms_in_float64(model)
    return model


def test_a_norm_computes_what_its_formula_says_without_rounding_in_between() -> None:
    norm = made().get_submodule("model.norm")
    x = torch.linspace(-1, 2, 16, dtype=torch.float64)
    expected = norm.weight * x / torch.sqrt((x * x).mean() + norm.variance_epsilon)
    assert torch.allclose(norm(x), expected, rtol=0, atol=1e-15)


def test_a_copy_of_a_model_has_norms_of_its_own() -> None:
    model = made()
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.get_submodule("model.norm").weight.mul_(2)
    x = torch.linspace(-1, 2, 16, dtype=torch.float64)
    assert torch.equal(other.get_submodule("model.norm")(x), 2 * model.get_submodule("model.norm")(x))
