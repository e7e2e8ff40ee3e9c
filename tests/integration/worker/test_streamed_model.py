"""A model whose weights stay in their file computes what one that holds them computes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from model_families import EVERY, GPT_NEO, HYBRIDS, LLAMA, made
from torch import nn

from rlbuffer.errors import WeightsError
from rlbuffer.weights.model import unaliased
from rlbuffer.weights.streamed import streamed_model

IDS = torch.arange(30)[None] * 7 % 50


@pytest.mark.parametrize("config", [*EVERY, GPT_NEO, *HYBRIDS], ids=lambda c: c["model_type"])
def test_the_logits_are_the_same_bit_for_bit(config: Mapping[str, Any]) -> None:
    whole = made(config).eval()
    streamed = streamed_model(config, unaliased(whole.state_dict()))
    with torch.inference_mode():
        for _ in range(2):
            told = streamed(input_ids=IDS, use_cache=False).logits
            assert torch.equal(told, whole(input_ids=IDS, use_cache=False).logits)


def test_no_two_layers_are_in_memory_at_a_time() -> None:
    config = dict(LLAMA) | {"num_hidden_layers": 5}
    model = streamed_model(config, unaliased(made(config).state_dict()))
    layers: list[nn.Module] = list(model.model.layers)
    seen = []

    def look(*_: Any) -> None:
        seen.append([not layer.mlp.up_proj.weight.is_meta for layer in layers])

    for layer in layers:
        layer.mlp.register_forward_hook(look)
    with torch.inference_mode():
        model(input_ids=IDS, use_cache=False)
    assert seen == [[n == at for n in range(5)] for at in range(5)]
    assert [p.shape for p in model.parameters() if not p.is_meta and p.dim() > 1] == []


def test_weights_that_do_not_fit_are_refused() -> None:
    state = unaliased(made(LLAMA).state_dict())
    name = "model.layers.1.mlp.up_proj.weight"
    lacking = {key: tensor for key, tensor in state.items() if key != name}
    with pytest.raises(WeightsError, match=f"the weights do not fit the model: they lack {re.escape(name)}"):
        streamed_model(LLAMA, lacking)
    with pytest.raises(WeightsError, match=re.escape(f"{name} has shape [2, 2], the model's is [96, 64]")):
        streamed_model(LLAMA, state | {name: torch.zeros(2, 2)})
