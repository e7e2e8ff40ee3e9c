"""The proof, at every start, that packed rollouts get the logprobs that they get alone.

The reference is the library's own model run on one rollout at a time with its plainest attention (``eager``, which
refuses nothing and ignores nothing), and its own head. Everything faster has to agree with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlbuffer.errors import PackedForwardError
from rlbuffer.trainer.model.logprobs import LogitShape
from rlbuffer.weights.blocks import backbone_of
from rlbuffer.weights.experts import Experts

LENGTHS = (23, 1, 5, 17, 33)
"""Tokens of the self-test's rollouts in the order of their row: a lone token among them, and both sides of the smallest
batch of the segment attention."""
END = 5
"""Tokens at the end of the first rollout that are changed."""
BEYOND_WINDOW = 33
"""Tokens by which one more rollout is longer than a sliding window."""

TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Nats that packed and separate logprobs may differ by at most. float64 is not tighter because a family's own code may
hold float32 inside."""
ROUNDING = 3.0
"""How far products in 16 bit may move packed logprobs from separate ones, in what they move the separate ones: a
trained model is moved by far more than a fresh one, one with experts most, as a choice among them turns over."""
COMPANY = 30.0
"""How far other rollouts may move one, in what a change in a second row moves the first in the library's own pass. In
a dense model that is nothing; experts sum in another order when other tokens come to them, which moves a trained model
by 1e-3 nats in float32."""


class PackedForward(Protocol):
    """A forward pass over a packed row."""

    def __call__(
        self, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor, routed: Tensor | None = None
    ) -> Tensor:
        """(input_ids [T], position_ids [T], cu_seqlens [S + 1], recorded experts [T, layers, K]) -> [T] logprob of each
        token, 0 for the first of a segment."""


@torch.no_grad()
def self_test(
    model: PreTrainedModel,
    forward: PackedForward,
    *,
    longest: int | None = None,
    compute: torch.dtype | None = None,
    keeps_rows: bool = False,
) -> float:
    """Runs a few rollouts packed by `forward` and one by one by the library, and compares.

    Then puts other tokens to the end of the first rollout and of the row, and looks whether what lies between notices:
    that finds a leak even in a model whose weights are still too small for attention to matter.

    With a sliding window one rollout is longer than it, and the window must be seen: without it the library's own
    logprobs must be others, or nothing would have been proven. -> nats by which packed and separate logprobs
    may differ.

    Args:
        longest: tokens of the longest rollout that will come; None: unknown.
        compute: dtype of the products in both, when it is another one than the parameters'.
        keeps_rows: `forward` gives the model one rollout per row, so windows are the library's own affair.

    Raises:
        PackedForwardError: with the largest difference and what it means.
    """
    parameter = next(model.parameters())
    device, tolerance = parameter.device, TOLERANCES[compute or parameter.dtype]
    vocabulary, window, rng = vocabulary_of(model), acting_window(model, longest), np.random.default_rng(0)
    lengths = [*LENGTHS, *([] if window is None else [tested_tokens(model, window, longest)])]
    tokens = torch.from_numpy(rng.integers(0, vocabulary, sum(lengths))).to(device)
    positions = torch.cat([torch.arange(n) for n in lengths]).to(device)
    cu_seqlens = torch.from_numpy(np.concatenate(([0], np.cumsum(lengths)))).to(device)
    packed = forward(tokens, positions, cu_seqlens)
    pieces = torch.split(tokens, lengths)
    separate = torch.cat([separate_logprobs(model, piece, compute=compute) for piece in pieces])
    company = COMPANY * _moved_by_company(model, pieces[: len(LENGTHS)], vocabulary, compute)
    least = max(tolerance / 100, company)
    tolerance = max(tolerance, company)
    if compute is not None:
        exact = torch.cat([separate_logprobs(model, piece) for piece in pieces])
        tolerance = max(tolerance, ROUNDING * float((separate - exact).abs().max()))
    difference = float((packed - separate).abs().max())
    if not difference <= tolerance:
        raise PackedForwardError(
            f"packed logprobs differ from separate ones by {difference:.2g} nats (at most {tolerance:g})"
        )
    changed = tokens.clone()
    others = [*range(lengths[0] - END, lengths[0]), -1]
    changed[others] = (tokens[others] + 1) % vocabulary
    leak = float((forward(changed, positions, cu_seqlens) - packed).abs()[lengths[0] : -1].max())
    if not leak <= least:
        raise PackedForwardError(
            f"changing a rollout, or a later token, moves other logprobs by {leak:.2g} nats: rollouts see each other, "
            "or the model is not causal"
        )
    if window is not None and compute is None and not keeps_rows:
        with _without_window(model):
            seen = float((separate_logprobs(model, pieces[-1]) - separate[-lengths[-1] :]).abs().max())
        if not seen > tolerance:
            raise PackedForwardError(
                f"the self-test cannot see the model's window of {window} tokens: without it logprobs of "
                f"{lengths[-1]} tokens move by {seen:.2g} nats only, so nothing proves that packed rows honour it"
            )
    return tolerance


@torch.no_grad()
def replay_test(
    model: PreTrainedModel,
    experts: Experts,
    forward: PackedForward,
    *,
    tolerance: float,
    compute: torch.dtype | None = None,
) -> None:
    """Runs a few rollouts with drawn experts packed by `forward` and one by one by the library, and compares.

    Raises:
        PackedForwardError: they differ by more than `tolerance`: the record does not reach the tokens that it is of.
    """
    device, rng = next(model.parameters()).device, np.random.default_rng(0)
    tokens = torch.from_numpy(rng.integers(0, vocabulary_of(model), sum(LENGTHS))).to(device)
    draws = rng.random((len(tokens), experts.layers, experts.num_experts))
    record = torch.from_numpy(draws.argsort(-1)[..., : experts.top_k]).int().to(device)
    positions = torch.cat([torch.arange(n) for n in LENGTHS]).to(device)
    cu_seqlens = torch.from_numpy(np.concatenate(([0], np.cumsum(LENGTHS)))).to(device)
    separate = []
    for piece, rows in zip(torch.split(tokens, [*LENGTHS]), torch.split(record, [*LENGTHS]), strict=True):
        with experts.replaying(rows):
            separate.append(separate_logprobs(model, piece, compute=compute))
    difference = float((forward(tokens, positions, cu_seqlens, record) - torch.cat(separate)).abs().max())
    if not difference <= tolerance:
        raise PackedForwardError(
            f"with recorded experts packed logprobs differ from separate ones by {difference:.2g} nats (at most "
            f"{tolerance:g})"
        )


def vocabulary_of(model: PreTrainedModel) -> int:
    """Symbols that the model has an embedding for."""
    embeddings: Any = model.get_input_embeddings()
    return len(embeddings.weight)


def _moved_by_company(
    model: PreTrainedModel, pieces: Sequence[Tensor], vocabulary: int, compute: torch.dtype | None
) -> float:
    """Largest change of a logprob when the tokens of another row change, which the library keeps apart."""

    def beside(shift: int) -> Tensor:
        rows = ((piece, (piece + shift) % vocabulary) for piece in pieces)
        return torch.cat([separate_logprobs(model, a, compute=compute, beside=b) for a, b in rows])

    return float((beside(1) - beside(2)).abs().max())


def separate_logprobs(
    model: PreTrainedModel, tokens: Tensor, *, compute: torch.dtype | None = None, beside: Tensor | None = None
) -> Tensor:
    """[L] logprobs of one rollout on its own by the library's own attention and head; 0 for the first token.

    `beside`: [L] tokens of a second row, which the first one cannot see.
    """
    rows = torch.stack([tokens] if beside is None else [tokens, beside])
    with (
        _attention(model, "eager"),
        torch.autocast(tokens.device.type, dtype=compute or torch.bfloat16, enabled=compute is not None),
    ):
        logits = model(input_ids=rows.long(), use_cache=False).logits[0]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    log_p = torch.log_softmax(logits[:-1], dim=-1)
    picked: Tensor = log_p.gather(1, tokens[1:, None].long())[:, 0]
    return torch.cat((picked.new_zeros(1), picked))


@torch.no_grad()
def logit_shape_of(model: PreTrainedModel) -> LogitShape:
    """Finds the change that the model makes to its logits: of those that its config names, by comparing with the model.

    The same name means a factor in one library model and a divisor in another, so the name alone decides nothing.

    Raises:
        PackedForwardError: none of them gives the model's own logits.
    """
    config: Any = model.config.get_text_config()
    scales = {1.0}
    for name in ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier"):
        value = getattr(config, name, None)
        if isinstance(value, int | float) and value:
            scales |= {float(value), 1.0 / float(value)}
    caps = {0.0}
    for name in ("final_logit_softcapping", "logits_soft_cap"):
        value = getattr(config, name, None)
        caps |= {float(value)} if isinstance(value, int | float) else set()
    parameter = next(model.parameters())
    tokens = torch.arange(min(16, vocabulary_of(model)), device=parameter.device)
    with _attention(model, "eager"):
        expected = model(input_ids=tokens[None], use_cache=False).logits[0]
        hidden = backbone_of(model)(input_ids=tokens[None], use_cache=False).last_hidden_state[0]
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if head is None:
        raise PackedForwardError(f"{type(model).__name__} has no output embeddings: it is not a causal LM")
    logits = torch.nn.functional.linear(hidden, head.weight, getattr(head, "bias", None))
    shapes = [LogitShape(scale=scale, cap=cap) for scale in sorted(scales) for cap in sorted(caps)]
    differences = [float((shape.apply(logits) - expected).abs().max()) for shape in shapes]
    best = int(np.argmin(differences))
    # The bound is on logits, not on logprobs: a part in 1e4 of the largest, in 16 bit as much as the self-test allows.
    tolerance = TOLERANCES[parameter.dtype] * max(1.0, float(expected.abs().max()))
    if not differences[best] <= tolerance:
        raise PackedForwardError(
            f"its logits are not those of its head's matrix, scaled and capped as its config says: they differ by "
            f"{differences[best]:.2g}"
        )
    return shapes[best]


def acting_window(model: PreTrainedModel, longest: int | None) -> int | None:
    """Tokens of the shortest sliding window (or attention chunk) that a rollout can exceed; None for none."""
    config: Any = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None)
    windows = []
    for name, kind in WINDOWS.items():
        value = getattr(config, name, None)
        acts = kinds is None or any(kind in str(k) for k in kinds)
        if isinstance(value, int) and acts and getattr(config, "use_sliding_window", True):
            windows.append(value)
    shortest = min(windows, default=0)
    return shortest if shortest and all(shortest < limit for limit in _limits(config, longest)) else None


WINDOWS = {"sliding_window": "sliding", "attention_chunk_size": "chunked", "window_size": "local"}
"""Setting of a config -> what the layers that it holds for are called in its list of layers."""


def tested_tokens(model: PreTrainedModel, window: int, longest: int | None) -> int:
    """Tokens of the self-test's segment that exceeds the window, as far as rollouts and the model allow."""
    return min([window + BEYOND_WINDOW, *_limits(model.config.get_text_config(), longest)])


def _limits(config: Any, longest: int | None) -> list[int]:
    """Tokens that no rollout exceeds: the longest that will come, and what the model has positions for."""
    return [int(limit) for limit in (longest, getattr(config, "max_position_embeddings", None)) if limit]


@contextmanager
def _without_window(model: PreTrainedModel) -> Iterator[None]:
    """Lets the library's own model attend to everything before a token, for comparison."""
    config: Any = model.config.get_text_config()
    old = {name: getattr(config, name) for name in WINDOWS if isinstance(getattr(config, name, None), int)}
    for name in old:
        setattr(config, name, 1 << 30)
    try:
        yield
    finally:
        for name, value in old.items():
            setattr(config, name, value)


@contextmanager
def _attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    """The library's own attention of this name, for a while."""
    ours = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(ours)
