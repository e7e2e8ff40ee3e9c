"""Losses over rollouts of several sequences: whichever rank has which, each sampled token counts once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
import trees
from samples import sample_of
from torch import Tensor

from rlbuffer.config.losses import BUILT_IN_LOSSES, LossChoice
from rlbuffer.records.rollout import Rollout
from rlbuffer.records.step_plan import Normalizers
from rlbuffer.trainer.losses import TrainedTokens, loss_of, per_token_of
from rlbuffer.trainer.update.token_choice import choose

Place = tuple[int, int]
"""Rollout and sequence."""


def policy() -> Tensor:
    """Logits of the next token by the last one."""
    generator = torch.Generator().manual_seed(3)
    shape = (trees.VOCABULARY, trees.VOCABULARY)
    return (0.3 * torch.randn(shape, generator=generator, dtype=torch.float64)).requires_grad_()


def tokens_of(weights: Tensor, rollouts: Sequence[Rollout], places: Sequence[Place]) -> TrainedTokens:
    """The trained tokens of these sequences, as a micro-batch of them would give."""
    logprobs, entropy, inference, advantages, owner, samples = [], [], [], [], [], []
    for n, (r, s) in enumerate(places):
        rollout = rollouts[r]
        its = rollout.sequences[s]
        trained = np.flatnonzero(its.loss_mask)
        rows = weights[torch.tensor(its.tokens[trained - 1], dtype=torch.int64)].log_softmax(-1)
        logprobs.append(rows.gather(1, torch.tensor(its.tokens[trained], dtype=torch.int64)[:, None])[:, 0])
        entropy.append(-(rows.exp() * rows).sum(-1))
        inference.append(torch.tensor(its.logprobs[trained], dtype=torch.float64))
        advantages.append(torch.full((len(trained),), (rollout.reward or 0.0) - 0.5, dtype=torch.float64))
        owner.append(torch.full((len(trained),), n, dtype=torch.int64))
        samples.append(
            sample_of(
                str(r),
                length=len(its.tokens),
                sequence=s,
                sequences=len(rollout.sequences),
                rollout_loss_tokens=rollout.loss_tokens,
            )
        )
    return TrainedTokens(
        logprobs=torch.cat(logprobs),
        entropy=torch.cat(entropy),
        inference_logprobs=torch.cat(inference),
        advantages=torch.cat(advantages),
        rollout=torch.cat(owner),
        samples=tuple(samples),
    )


def gradient(rollouts: Sequence[Rollout], dealt: Sequence[Sequence[Place]], choice: LossChoice) -> Tensor:
    """Of the loss over all micro-batches, which choose their tokens together."""
    weights = policy()
    parts = [tokens_of(weights, rollouts, places) for places in dealt if places]
    chosen = choose(parts, choice, lambda values: values)
    counts = Normalizers(loss_tokens=sum(r.loss_tokens for r in rollouts), rollouts=len(rollouts), groups=1)
    losses = [
        loss_of(replace(part, **fields), choice, counts, longest=64) for fields, part in zip(chosen, parts, strict=True)
    ]
    (out,) = torch.autograd.grad(torch.stack(losses).sum(), weights)
    return out


@pytest.mark.parametrize("normalizer", ["auto", "rollouts", "tokens"])
@pytest.mark.parametrize("name", [name for name in BUILT_IN_LOSSES if not name.endswith("_cov")])
def test_sequences_on_four_ranks_train_as_on_one(name: str, normalizer: str) -> None:
    rng = np.random.default_rng(11)
    rollouts = [trees.rollout(rng) for _ in range(12)]
    places = [(r, s) for r, rollout in enumerate(rollouts) for s in range(len(rollout.sequences))]
    ranks = rng.integers(0, 4, len(places))
    dealt = [[place for place, rank in zip(places, ranks, strict=True) if rank == n] for n in range(4)]
    choice = LossChoice(name=name, normalizer=normalizer)
    difference = gradient(rollouts, dealt, choice) - gradient(rollouts, [places], choice)
    assert float(difference.abs().max()) < 1e-12


def test_a_tree_trains_as_token_by_token_in_one_process() -> None:
    """The mean over rollouts of the mean over the tree's sampled tokens, each once, by their paths from the root."""
    rng = np.random.default_rng(5)
    choice = LossChoice(name="clip", normalizer="rollouts")
    weights, rollouts, expected = policy(), [], torch.zeros((), dtype=torch.float64)
    for _ in range(20):
        leaves = trees.ways(rng, int(rng.integers(1, 6)))
        rollout = Rollout.from_sequences([trees.sequence(way) for way in leaves], reward=float(rng.random()))
        rollouts.append(rollout)
        nodes: dict[tuple[tuple[int, float], ...], tuple[int, int, float]] = {}
        for way in leaves:
            path: list[tuple[int, float]] = []
            for _, tokens, logprobs in way:
                for i, token in enumerate(tokens):
                    path.append((token, logprobs[i] if logprobs else 0.0))
                    if logprobs:
                        nodes[tuple(path)] = (path[-2][0], token, logprobs[i])
        assert rollout.loss_tokens == len(nodes)
        before, sampled, inference = (torch.tensor(its) for its in zip(*nodes.values(), strict=True))
        rows = weights[before].log_softmax(-1)
        tokens = TrainedTokens(
            logprobs=rows.gather(1, sampled[:, None])[:, 0],
            entropy=torch.zeros(len(nodes), dtype=torch.float64),
            inference_logprobs=inference.double(),
            advantages=torch.full((len(nodes),), (rollout.reward or 0.0) - 0.5, dtype=torch.float64),
            rollout=torch.zeros(len(nodes), dtype=torch.int64),
        )
        expected = expected + per_token_of(tokens, choice).mean() / 20
    (oracle,) = torch.autograd.grad(expected, weights)
    places = [(r, s) for r, rollout in enumerate(rollouts) for s in range(len(rollout.sequences))]
    assert len(places) > 45
    assert float((gradient(rollouts, [places[::2], places[1::2]], choice) - oracle).abs().max()) < 1e-12
