"""16-bit segments on a GPU: torch's variable-length kernel where a window acts, else the gathered batches."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from model_families import EVERY, LLAMA, MISTRAL, QWEN2_WINDOWS, QWEN3, WINDOWED, made
from torch import Tensor, nn

from rlbuffer.trainer.model import attention
from rlbuffer.trainer.model.attention import ATTENTION, SegmentPlan, segment_attention
from rlbuffer.trainer.model.packed_policy import packed_forward, prepare

LENGTHS = (7, 1, 19, 5, 33, 12, 130, 16)
BOUNDS = (0, *accumulate(LENGTHS))
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "vocab_size": 50,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "initializer_range": 0.1,
}
"""Values are narrower than queries and keys."""
ODD_HEADS = dict(LLAMA) | {"head_dim": 12}
FAMILIES = (*EVERY, *WINDOWED, DEEPSEEK, ODD_HEADS)


def tensors(heads: int, kv_heads: int, size: int, values: int) -> list[Tensor]:
    made = torch.Generator("cuda").manual_seed(heads * size)
    shapes = [(heads, size), (kv_heads, size), (kv_heads, values)]
    return [
        torch.randn(BOUNDS[-1], *shape, generator=made, device="cuda").bfloat16().requires_grad_() for shape in shapes
    ]


def attend(parts: list[Tensor], window: int | None, scale: float | None = None) -> Tensor:
    plan = SegmentPlan(BOUNDS, "cuda")
    query, key, value = (part.transpose(0, 1)[None] for part in parts)
    out, _ = segment_attention(
        nn.Identity(), query, key, value, None, scaling=scale, segments=plan, sliding_window=window
    )
    return out[0]


def apart(ours: Tensor, expected: Tensor) -> float:
    """L2 norm of the difference over that of `expected`."""
    return float((ours.detach().double().cpu() - expected.detach()).norm() / expected.detach().norm())


@pytest.mark.parametrize("window", [None, 2, 8, 500])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "values"),
    [
        (4, 4, 16, 16),
        (8, 2, 128, 128),
        (4, 2, 64, 64),
        (4, 1, 256, 256),
        (4, 2, 80, 80),
        (4, 2, 12, 12),
        (4, 4, 24, 16),
        (2, 2, 264, 264),
    ],
)
def test_16_bit_segments_attend_as_the_definition_says_and_gradients_stay_in_their_segment(
    heads: int, kv_heads: int, size: int, values: int, window: int | None
) -> None:
    parts = tensors(heads, kv_heads, size, values)
    wide = [part.detach().double().cpu().requires_grad_() for part in parts]
    ours = attend(parts, window, 0.2)
    expected = SegmentPlan(BOUNDS).attend(*wide, scale=0.2, window=window)
    weights = torch.randn(ours.shape, dtype=torch.float64)
    gradients = torch.autograd.grad((ours.double() * weights.cuda()).sum(), parts, retain_graph=True)
    for mine, right in zip(
        (ours, *gradients), (expected, *torch.autograd.grad((expected * weights).sum(), wide)), strict=True
    ):
        assert apart(mine, right) < 1e-2
    for start, end in pairwise(BOUNDS):
        for gradient in torch.autograd.grad(ours[start:end].float().sum(), parts, retain_graph=True):
            assert not gradient[:start].any()
            assert not gradient[end:].any()


@pytest.mark.parametrize("config", FAMILIES, ids=lambda c: f"{c['model_type']}-{c.get('head_dim', '')}")
def test_every_family_trains_packed_rows_in_16_bit_by_segments(config: Mapping[str, Any]) -> None:
    """Not by the library's attention, which would need a dense mask for a packed row."""
    model = made(config).to(device="cuda")
    policy = prepare(model, compute=torch.bfloat16)
    assert policy.attention == ATTENTION
    ids = torch.randint(0, 50, (BOUNDS[-1],), device="cuda")
    positions = torch.cat([torch.arange(length) for length in LENGTHS]).cuda()
    bounds = torch.tensor(BOUNDS, device="cuda")
    narrow = packed_forward(policy)(ids, positions, bounds)
    narrow.sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)
    first, last = BOUNDS[4], BOUNDS[5]
    changed = ids.clone()
    changed[first:last] = (changed[first:last] + 1) % 50
    with torch.no_grad():
        moved = (packed_forward(policy)(changed, positions, bounds) - narrow).abs()
    assert float(moved[first:last].max()) > 0
    assert not moved[:first].any()
    assert not moved[last:].any()


@pytest.mark.parametrize(("config", "layers"), [(LLAMA, 0), (QWEN3, 0), (MISTRAL, 2), (QWEN2_WINDOWS, 2)])
def test_layers_with_a_window_go_through_the_kernel_in_bfloat16(
    monkeypatch: pytest.MonkeyPatch, config: Mapping[str, Any], layers: int
) -> None:
    """Weights stay in float32, so norms and rotary tables give float32, too."""
    calls: list[torch.dtype] = []

    def counted(query: Tensor, *others: Any) -> Tensor:
        calls.append(query.dtype)
        return kernel(query, *others)

    policy = prepare(made(config).to(device="cuda"), compute=torch.bfloat16)
    kernel = attention._varlen
    monkeypatch.setattr(attention, "_varlen", counted)
    packed_forward(policy)(
        torch.randint(0, 50, (BOUNDS[-1],), device="cuda"),
        torch.cat([torch.arange(length) for length in LENGTHS]).cuda(),
        torch.tensor(BOUNDS, device="cuda"),
    )
    assert calls == [torch.bfloat16] * layers


def test_no_kernel_makes_a_plan_for_each_length() -> None:
    """cuDNN's does, for tenths of a second each."""
    policy = prepare(made(QWEN3).to(device="cuda"), compute=torch.bfloat16)
    with torch.profiler.profile() as profile, torch.no_grad():
        packed_forward(policy)(
            torch.randint(0, 50, (BOUNDS[-1],), device="cuda"),
            torch.cat([torch.arange(length) for length in LENGTHS]).cuda(),
            torch.tensor(BOUNDS, device="cuda"),
        )
    called = {event.key for event in profile.key_averages() if "scaled_dot_product" in event.key}
    assert called
    assert not [name for name in called if "cudnn" in name]
