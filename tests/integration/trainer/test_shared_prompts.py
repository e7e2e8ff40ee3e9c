"""Tokens with which rollouts begin alike are computed once, and logprobs and gradients are the plain row's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_families import GEMMA2, GPT2, LLAMA, QWEN3, QWEN3_MOE, gradients, made
from torch import Tensor

from rlbuffer.config.settings import RunSettings
from rlbuffer.errors import PackedForwardError
from rlbuffer.trainer.loop import train
from rlbuffer.trainer.model import packed_policy
from rlbuffer.trainer.model.packed_policy import PackedPolicy, packed_forward, prepare
from rlbuffer.trainer.model.selftest import self_test
from rlbuffer.trainer.model.shared_prompts import SharedTokens, shared_tokens

LLAMA4 = dict(LLAMA) | {
    "model_type": "llama4_text",
    "intermediate_size_mlp": 96,
    "head_dim": 16,
    "num_local_experts": 2,
    "attention_chunk_size": 8,
}
"""Its attention chunks are the library's own affair: it is packed with a dense mask."""

Row = tuple[Tensor, Tensor, Tensor]


def groups_row(*, prompts: tuple[int, ...] = (40, 12), own: tuple[int, ...] = (9, 1, 30, 4), pad: int = 5) -> Row:
    """A row in which the rollouts of two groups take turns, and padding."""
    rng = np.random.default_rng(3)
    made = [rng.integers(1, 50, n) for n in prompts]
    pieces = [np.concatenate((prompt, rng.integers(1, 50, n))) for n in own for prompt in made]
    pieces.append(np.zeros(pad, np.int64))
    lengths = [len(piece) for piece in pieces]
    positions = torch.cat([torch.arange(n) for n in lengths])
    return torch.from_numpy(np.concatenate(pieces)), positions, torch.tensor([0, *np.cumsum(lengths)])


def computed(policy: PackedPolicy, row: Row) -> tuple[Tensor, int]:
    """Logprobs of all tokens, and how many tokens went through the model."""
    seen: list[int] = []
    hook = policy.model.get_input_embeddings().register_forward_hook(lambda _, args, out: seen.append(args[0].numel()))
    try:
        return packed_forward(policy)(*row), seen[0]
    finally:
        hook.remove()


@pytest.mark.parametrize("config", [QWEN3, GEMMA2, GPT2, QWEN3_MOE], ids=lambda c: c["model_type"])
def test_logprobs_and_gradients_are_those_of_the_plain_row(config: Mapping[str, Any]) -> None:
    model = made(config)
    policy = prepare(model, share_prompts=True)
    row = groups_row()
    shared, tokens = computed(policy, row)
    policy.shares_prompts = False
    plain, all_tokens = computed(policy, row)
    assert all_tokens == len(row[0]) == 4 * (40 + 12) + 2 * 44 + 5
    assert tokens <= 40 + 12 + 2 * 44 + 5  # a completion that begins like another is shared a little further
    torch.testing.assert_close(shared, plain, rtol=0, atol=2e-6)
    weights = torch.randn(len(plain))
    ours, expected = (gradients(model, (logprobs * weights).sum()) for logprobs in (shared, plain))
    for name, gradient in expected.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-5, atol=1e-5 * float(gradient.abs().max()), msg=name)


def test_what_stands_for_a_token_has_the_same_tokens_before_it_and_nothing_is_computed_twice() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        lengths = rng.integers(0, 7, 6)
        bounds = [0, *np.cumsum(lengths).tolist()]
        ids = torch.from_numpy(rng.integers(0, 2, bounds[-1]).astype(np.int32))
        starts = np.repeat(bounds[:-1], lengths)
        prefixes = [tuple(ids[start : place + 1].tolist()) for place, start in enumerate(starts)]
        shared = shared_tokens(ids, torch.tensor(bounds))
        if shared is None:
            assert len(set(prefixes)) > 0.95 * len(ids)
            continue
        assert [prefixes[place] for place in shared.kept[shared.source]] == prefixes
        assert len(shared.kept) == len(set(prefixes))
        assert all(a < b for a, b in pairwise(shared.kept.tolist()))


def test_a_row_in_which_little_is_shared_is_computed_plain() -> None:
    policy = prepare(made(QWEN3), share_prompts=True)
    row = groups_row(prompts=(1, 1), own=(30, 31, 32))
    assert computed(policy, row)[1] == len(row[0])


def test_a_forward_pass_that_shares_too_much_fails_the_self_test() -> None:
    model = made(QWEN3)
    honest = packed_forward(prepare(model, share_prompts=True))

    def off(input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        ids = input_ids.clone()
        ids[int(cu_seqlens[3])] = ids[0] + 1  # a prompt that is not quite the others'
        return honest(ids, position_ids, cu_seqlens)

    with pytest.raises(PackedForwardError):
        self_test(model, off)


def test_what_cannot_share_is_refused() -> None:
    for layout in ("packed", "padded"):
        with pytest.raises(PackedForwardError, match=r"trainer\.share_prompts needs the segment attention"):
            prepare(made(LLAMA if layout == "padded" else LLAMA4), layout=layout, share_prompts=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_other_dtypes_share(dtype: torch.dtype) -> None:
    assert prepare(made(QWEN3, dtype), share_prompts=True).shares_prompts
    assert prepare(made(QWEN3), compute=torch.bfloat16, share_prompts=True).shares_prompts


def test_a_trainer_that_shares_prompts_trains_what_the_plain_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares: list[float] = []

    def spy(input_ids: Tensor, cu_seqlens: Tensor) -> SharedTokens | None:
        found = shared_tokens(input_ids, cu_seqlens)
        shares.append(1.0 if found is None else len(found.kept) / len(found.source))
        return found

    monkeypatch.setattr(packed_policy, "shared_tokens", spy)
    records = []
    for share in (False, True):
        wanted = RunSettings(
            home=tmp_path / str(share),
            batcher={"row_tokens": 128, "rows_per_micro_batch": 4},
            model={"config": dict(QWEN3), "dtype": "float64"},
            trainer={"steps": 2, "device": "cpu", "share_prompts": share},
        )
        assert bool(shares) is False
        assert train(wanted, rank=0, world_size=1, fake_data=True)
        records.append([json.loads(line) for line in (wanted.output_dir / "metrics.jsonl").read_text().splitlines()])
    assert min(shares) < 0.95
    for ours, theirs in zip(*records, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-6)
        assert ours["tokens"] == theirs["tokens"]
