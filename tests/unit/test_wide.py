"""Models that compute in float64 throughout."""

from __future__ import annotations

import copy
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from rlbuffer.trainer.model.wide import Wide, in_float64
from rlbuffer.weights.blocks import decoder_layers
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
    torch.manual_seed(0)
    model = model_from_config(CONFIG, dtype=torch.float64)
    in_float64(model)
    return model


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = model(input_ids=torch.arange(9)[None], use_cache=False).logits
    return out


def test_a_norm_computes_what_its_formula_says_without_rounding_in_between() -> None:
    model, seen = made(), []
    norm = model.get_submodule("model.norm")
    norm.register_forward_hook(lambda module, given, out: seen.append((given[0], out)))
    logits(model)
    ((x, out),) = seen
    expected = norm.weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + norm.variance_epsilon)
    assert torch.allclose(out, expected, rtol=0, atol=1e-14)


def test_nothing_is_rounded_to_float32_inside() -> None:
    x = torch.rand(8, dtype=torch.float64)
    with Wide():
        kept = [x.float(), x.to(torch.float32), x.to(dtype=torch.float32), x.type(torch.float32)]
        kept += [x.softmax(0, dtype=torch.float32), torch.nn.functional.softmax(x, 0, dtype=torch.float32)]
        assert torch.arange(3).float().dtype == torch.float32
        assert x.to(torch.bfloat16).dtype == torch.bfloat16
    assert {tensor.dtype for tensor in kept} == {torch.float64}
    assert all(torch.equal(tensor, x) for tensor in kept[:4])


def test_what_is_computed_again_in_the_backward_pass_rounds_no_more_than_the_first_time() -> None:
    plain, again = made(), made()
    for layer in decoder_layers(again):
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    for model in (plain, again):
        model(input_ids=torch.arange(9)[None], use_cache=False).logits.square().sum().backward()
    for ours, theirs in zip(again.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, rtol=0, atol=1e-13)


def test_a_copy_of_a_model_computes_with_weights_of_its_own() -> None:
    model = made()
    before, other = logits(model), copy.deepcopy(model)
    with torch.no_grad():
        other.get_submodule("model.norm").weight.mul_(2)
    assert torch.equal(logits(model), before)
    assert torch.allclose(logits(other), 2 * before, rtol=0, atol=1e-14)
