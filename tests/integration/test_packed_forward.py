"""Packed equals separate, for logprobs and gradients; and the check can see when it does not."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rlbuffer.errors import PackedForwardError
from rlbuffer.trainer.attention import NAME, SegmentPlan
from rlbuffer.trainer.model import packed_forward, prepare, self_test, separate_logprobs
from rlbuffer.weights.model import model_from_config

LLAMA: Mapping[str, Any] = MappingProxyType(
    {
        "model_type": "llama",
        "vocab_size": 50,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.1,
        "tie_word_embeddings": False,
    }
)
QWEN3 = MappingProxyType(dict(LLAMA) | {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True})
MISTRAL = MappingProxyType(dict(LLAMA) | {"model_type": "mistral", "sliding_window": 8})
LENGTHS = (9, 1, 40, 17, 16, 3, 33, 5, 64)


def made(config: Mapping[str, Any], dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(0)
    return model_from_config(config, dtype=dtype)


def row(vocabulary: int = 50, lengths: tuple[int, ...] = LENGTHS) -> tuple[Tensor, Tensor, Tensor]:
    rng = np.random.default_rng(1)
    ids = torch.from_numpy(rng.integers(0, vocabulary, sum(lengths)))
    positions = torch.cat([torch.arange(n) for n in lengths])
    return ids, positions, torch.from_numpy(np.concatenate(([0], np.cumsum(lengths))))


def pieces(ids: Tensor, cu_seqlens: Tensor) -> list[Tensor]:
    return [ids[a:b] for a, b in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True)]


def gradients(model: PreTrainedModel, total: Tensor) -> dict[str, Tensor]:
    names = [name for name, _ in model.named_parameters()]
    return dict(zip(names, torch.autograd.grad(total, list(model.parameters())), strict=True))


@pytest.mark.parametrize("config", [LLAMA, QWEN3], ids=lambda c: c["model_type"])
def test_packed_logprobs_and_gradients_equal_separate_ones(config: Mapping[str, Any]) -> None:
    model = made(config)
    policy = prepare(model)
    assert policy.attention == NAME
    ids, positions, cu_seqlens = row()
    weights = torch.randn(len(ids))
    packed = packed_forward(policy)(ids, positions, cu_seqlens)
    separate = torch.cat([separate_logprobs(model, piece) for piece in pieces(ids, cu_seqlens)])
    torch.testing.assert_close(packed, separate, rtol=0, atol=1e-5)
    ours = gradients(model, (packed * weights).sum())
    for name, expected in gradients(model, (separate * weights).sum()).items():
        torch.testing.assert_close(ours[name], expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()), msg=name)


@pytest.mark.parametrize("config", [LLAMA, QWEN3], ids=lambda c: c["model_type"])
def test_the_librarys_default_cache_and_attention_fail_the_self_test(config: Mapping[str, Any]) -> None:
    """The trap: without `use_cache=False` stock attention looks across rollouts, and says nothing."""
    model = made(config)
    model.eval()

    def by_default(input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        logits = model(input_ids=input_ids[None], position_ids=position_ids[None]).logits[0]
        log_p = torch.log_softmax(logits[:-1], -1).gather(1, input_ids[1:, None])[:, 0]
        out = torch.cat((log_p.new_zeros(1), log_p))
        return torch.where(position_ids > 0, out, torch.zeros_like(out))

    with pytest.raises(
        PackedForwardError, match=r"^packed logprobs differ from separate ones by \d\.?\d* nats \(at most "
    ):
        self_test(model, by_default)


def test_a_leak_too_small_to_change_a_fresh_models_logprobs_is_still_found() -> None:
    model = made(QWEN3)
    policy = prepare(model)
    honest = packed_forward(policy)

    def leaking(input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        return honest(input_ids, position_ids, cu_seqlens) + 5e-5 * (input_ids[0] % 2)

    with pytest.raises(PackedForwardError, match=r"^changing one rollout moves the logprobs of another by 5e-05 nats$"):
        self_test(model, leaking)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_pass_the_self_test(dtype: torch.dtype) -> None:
    assert prepare(made(QWEN3, dtype)).attention == NAME


def test_a_sliding_window_falls_back_to_stock_attention_with_a_dense_mask() -> None:
    model = made(MISTRAL)
    policy = prepare(model)
    assert policy.attention == "sdpa"
    ids, positions, cu_seqlens = row()
    packed = packed_forward(policy)(ids, positions, cu_seqlens)
    separate = torch.cat([separate_logprobs(model, piece) for piece in pieces(ids, cu_seqlens)])
    torch.testing.assert_close(packed, separate, rtol=0, atol=1e-5)


def test_a_model_with_state_across_tokens_is_refused() -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model("mamba", vocab_size=50, hidden_size=32, num_hidden_layers=1, state_size=4)
    with pytest.raises(PackedForwardError) as caught:
        prepare(AutoModelForCausalLM.from_config(config))
    reasons = str(caught.value).removeprefix("MambaForCausalLM cannot be trained on packed rows. ")
    assert reasons.startswith(f"{NAME}: ")
    assert "; sdpa: " in reasons
    assert str(caught.value) == (
        f"MambaForCausalLM cannot be trained on packed rows. {reasons.partition('. Models that')[0]}. "
        "Models that keep state across tokens, or scale or cap their logits, are not supported"
    )


def test_a_head_that_scales_its_logits_is_refused() -> None:
    config = dict(LLAMA) | {"model_type": "granite", "logits_scaling": 3.0}
    with pytest.raises(PackedForwardError, match="packed logprobs differ from separate ones"):
        prepare(made(config))


@pytest.mark.parametrize(
    "lengths",
    [(1,), (16,), (17,), (1, 1, 1), (5, 16, 17, 32, 33), (1025, 3, 1024, 1024), (64, 64, 7)],
    ids=str,
)
def test_segments_of_any_length_attend_to_themselves_only(lengths: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(sum(lengths), 4, 8, generator=generator)
    k, v = (torch.randn(sum(lengths), 2, 8, generator=generator) for _ in range(2))
    bounds = np.concatenate(([0], np.cumsum(lengths)))
    ours = SegmentPlan(bounds).attend(q, k, v, scale=0.3)
    for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        part = slice(start, end)
        expected = torch.nn.functional.scaled_dot_product_attention(
            *(x[part].transpose(0, 1)[None] for x in (q, k, v)), is_causal=True, scale=0.3, enable_gqa=True
        )
        torch.testing.assert_close(ours[part], expected[0].transpose(0, 1), rtol=1e-5, atol=1e-5)


def test_empty_segments_are_skipped() -> None:
    plan = SegmentPlan([0, 3, 3, 5])
    assert plan.cu_seqlens.tolist() == [0, 3, 5]
    assert plan.longest == 3
