"""Packed equals separate, for logprobs and gradients; and the check can see when it does not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from model_families import (
    COHERE,
    EVERY,
    GEMMA2,
    GPT_NEO,
    GRANITE,
    HYBRIDS,
    LLAMA,
    LOOKS_AHEAD,
    MISTRAL,
    QWEN3,
    QWEN3_MOE,
    gradients,
    made,
    pieces,
    row,
)
from torch import Tensor

from rlbuffer.config.settings import RunSettings
from rlbuffer.errors import PackedForwardError
from rlbuffer.process.signals import StopRequest
from rlbuffer.trainer.checkpoints.resuming import Place
from rlbuffer.trainer.model.attention import ATTENTION, SegmentPlan
from rlbuffer.trainer.model.logprobs import LogitShape
from rlbuffer.trainer.model.packed_policy import PackedPolicy, packed_forward, prepare
from rlbuffer.trainer.model.selftest import TOLERANCES, acting_window, self_test, separate_logprobs
from rlbuffer.trainer.reports.reports import Reports


@pytest.mark.parametrize("config", EVERY, ids=lambda c: c["model_type"])
def test_packed_logprobs_and_gradients_equal_separate_ones(config: Mapping[str, Any]) -> None:
    model = made(config)
    policy = prepare(model)
    assert policy.attention == ATTENTION
    ids, positions, cu_seqlens = row()
    weights = torch.randn(len(ids))
    packed = packed_forward(policy)(ids, positions, cu_seqlens)
    separate = torch.cat([separate_logprobs(model, piece) for piece in pieces(ids, cu_seqlens)])
    torch.testing.assert_close(packed, separate, rtol=0, atol=2e-5)
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

    with pytest.raises(PackedForwardError):
        self_test(model, by_default)


def test_a_leak_too_small_to_change_a_fresh_models_logprobs_is_still_found() -> None:
    model = made(QWEN3)
    policy = prepare(model)
    honest = packed_forward(policy)

    def leaking(input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        return honest(input_ids, position_ids, cu_seqlens) + 5e-5 * (input_ids[int(cu_seqlens[1]) - 1] % 2)

    with pytest.raises(PackedForwardError):
        self_test(model, leaking)


@pytest.mark.parametrize("config", [QWEN3, QWEN3_MOE, GEMMA2], ids=lambda c: c["model_type"])
def test_products_in_bfloat16_train_weights_in_float32(config: Mapping[str, Any]) -> None:
    model = made(config)
    policy = prepare(model, compute=torch.bfloat16)
    assert policy.attention == ATTENTION
    ids, positions, cu_seqlens = row()
    narrow = packed_forward(policy)(ids, positions, cu_seqlens)
    policy.compute = None
    wide = packed_forward(policy)(ids, positions, cu_seqlens)
    assert narrow.dtype == torch.float32
    assert 0 < float((narrow - wide).detach().abs().mean()) < 0.05
    assert {g.dtype for g in gradients(model, narrow.sum()).values()} == {torch.float32}


@pytest.mark.parametrize("config", [LLAMA, QWEN3, MISTRAL, QWEN3_MOE], ids=lambda c: c["model_type"])
def test_a_model_that_16_bit_moves_far_keeps_the_segment_attention(config: Mapping[str, Any]) -> None:
    """Trained models are moved by tenths of a nat. One whose rollouts see each other is refused all the same."""
    model = made(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.5)
    policy = prepare(model, compute=torch.bfloat16)
    assert policy.attention == ATTENTION
    ids, positions, cu_seqlens = row()
    narrow = packed_forward(policy)(ids, positions, cu_seqlens)
    policy.compute = None
    moved = float((narrow - packed_forward(policy)(ids, positions, cu_seqlens)).detach().abs().max())
    assert moved > TOLERANCES[torch.bfloat16]
    policy.compute = torch.bfloat16
    one_rollout = packed_forward(policy)

    def leaking(input_ids: Tensor, position_ids: Tensor, bounds: Tensor) -> Tensor:
        return one_rollout(input_ids, position_ids, bounds[[0, -1]])

    with pytest.raises(PackedForwardError):
        self_test(model, leaking, compute=torch.bfloat16)


def test_experts_of_a_trained_models_size_keep_the_segment_attention() -> None:
    """They sum in another order when other tokens come to them: more than an ulp of a dense model in float32."""
    deep = dict(QWEN3_MOE) | {"num_hidden_layers": 16, "num_experts": 32, "num_experts_per_tok": 8, "hidden_size": 128}
    model = made(deep | {"vocab_size": 2000, "initializer_range": 0.3})
    policy = prepare(model)
    assert policy.attention == ATTENTION
    one_rollout = packed_forward(policy)

    def leaking(input_ids: Tensor, position_ids: Tensor, bounds: Tensor) -> Tensor:
        return one_rollout(input_ids, position_ids, bounds[[0, -1]])

    with pytest.raises(PackedForwardError):
        self_test(model, leaking)


@pytest.mark.parametrize("config", [MISTRAL, GEMMA2], ids=lambda c: c["model_type"])
def test_a_forward_pass_that_ignores_the_window_fails_the_self_test(config: Mapping[str, Any]) -> None:
    """Also when the window is longer than the self-test's usual segments: there is one more, longer than it."""
    model = made(dict(config) | {"sliding_window": 40})
    policy = prepare(model)
    assert policy.attention == ATTENTION

    def ignoring(self: SegmentPlan, *args: Any, window: int | None = None, **options: Any) -> Tensor:
        return attend(self, *args, **options)

    attend = SegmentPlan.attend
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SegmentPlan, "attend", ignoring)
        with pytest.raises(PackedForwardError, match="packed logprobs differ from separate ones"):
            self_test(model, packed_forward(policy))
        self_test(model, packed_forward(policy), longest=40)  # no rollout exceeds the window: it cannot act


def test_a_policy_says_why_it_got_a_dearer_attention(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    def warnings_at_start(policy: PackedPolicy) -> list[str]:
        session: Any = SimpleNamespace(
            is_first=True,
            stop=StopRequest(),
            policy=policy,
            settings=RunSettings(home=tmp_path),
            ranks=SimpleNamespace(device=torch.device("cpu"), world_size=1),
            buffer=SimpleNamespace(store=SimpleNamespace(meta=lambda: SimpleNamespace(created=0))),
        )
        with Reports(session) as reports:
            reports.start(Place())
        return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]

    policy = prepare(made(QWEN3))
    assert not policy.refused
    assert not warnings_at_start(policy)
    monkeypatch.setattr(SegmentPlan, "attend", lambda self, query, key, value, **_: torch.zeros_like(query))
    policy = prepare(made(QWEN3))
    assert policy.attention != ATTENTION
    assert ATTENTION in policy.refused
    [warning] = warnings_at_start(policy)
    assert policy.refused in warning


def test_a_window_that_the_self_test_cannot_see_is_refused() -> None:
    with pytest.raises(PackedForwardError, match="window of 8 tokens"):
        prepare(made(GPT_NEO))
    assert acting_window(made(GPT_NEO), 8) is None
    assert prepare(made(GPT_NEO), layout="padded").attention == "sdpa"


def test_a_model_that_looks_ahead_is_refused_in_both_layouts() -> None:
    for layout in ("packed", "padded"):
        with pytest.raises(PackedForwardError):
            prepare(made(LOOKS_AHEAD), layout=layout)


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (GRANITE, LogitShape(scale=1 / 3.0)),
        (COHERE, LogitShape(scale=0.25)),
        (GEMMA2, LogitShape(cap=3.0)),
        (QWEN3, LogitShape()),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, Mapping) else None,
)
def test_what_a_model_does_to_its_logits_is_found(config: Mapping[str, Any], shape: LogitShape) -> None:
    assert prepare(made(config)).shape == shape


def test_a_head_that_does_more_is_refused() -> None:
    model = made(COHERE)
    model.config.logit_scale = 1.0  # the model keeps a copy of its own
    with pytest.raises(PackedForwardError):
        prepare(model)


def test_activations_that_are_computed_again_give_the_same_gradients() -> None:
    ids, positions, cu_seqlens = row()
    both = []
    for recompute in (False, True):
        model = made(QWEN3)
        policy = prepare(model, recompute=recompute)
        saved: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, saved=saved: (saved.append(t.numel()), t)[1], lambda t: t
        ):
            total = packed_forward(policy)(ids, positions, cu_seqlens).sum()
        both.append((gradients(model, total), sum(saved)))
    for name, expected in both[0][0].items():
        torch.testing.assert_close(both[1][0][name], expected, msg=name)
    assert both[1][1] < both[0][1] / 3


@pytest.mark.parametrize("config", HYBRIDS, ids=lambda c: c["model_type"])
def test_a_model_with_state_across_tokens_is_refused_packed_and_trains_padded(config: Mapping[str, Any]) -> None:
    model = made(config)
    with pytest.raises(PackedForwardError, match=r'trainer\.layout = "padded"'):
        prepare(model)
    model = made(config)
    policy = prepare(model, layout="padded")
    ids, positions, cu_seqlens = row(lengths=(9, 1, 12, 33, 5))
    for in_one_batch in (False, True):
        policy.in_one_batch = in_one_batch
        padded = packed_forward(policy)(ids, positions, cu_seqlens)
        separate = torch.cat([separate_logprobs(model, piece) for piece in pieces(ids, cu_seqlens)])
        torch.testing.assert_close(padded, separate, rtol=0, atol=2e-5)
        ours = gradients(model, padded.sum())
        for name, expected in gradients(model, separate.sum()).items():
            scale = 1e-5 + 1e-5 * float(expected.abs().max())
            torch.testing.assert_close(ours[name], expected, rtol=1e-4, atol=scale, msg=name)


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


@pytest.mark.parametrize("window", [1, 3, 16, 40, 2000])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_windows_and_soft_caps_are_those_of_the_definition(window: int, softcap: float | None) -> None:
    lengths = (17, 5, 33, 1, 40)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(sum(lengths), 4, 8, generator=generator)
    k, v = (torch.randn(sum(lengths), 2, 8, generator=generator) for _ in range(2))
    bounds = np.concatenate(([0], np.cumsum(lengths)))
    ours = SegmentPlan(bounds).attend(q, k, v, scale=0.3, window=window, softcap=softcap)
    for t in range(sum(lengths)):
        start = int(bounds[bounds <= t].max())
        seen = slice(max(start, t - window + 1), t + 1)
        scores = torch.einsum("hd,nhd->hn", q[t], k[seen].repeat_interleave(2, dim=1)) * 0.3
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        expected = torch.einsum("hn,nhd->hd", scores.softmax(-1), v[seen].repeat_interleave(2, dim=1))
        torch.testing.assert_close(ours[t], expected, rtol=1e-5, atol=1e-5)
