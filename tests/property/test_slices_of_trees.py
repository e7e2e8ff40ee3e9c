"""However a step of trees of sequences is cut, over slices, micro-batches and ranks, an update divides by its weights.

TREES=200 draws as many trees for every loss, three to eight a step; a few are drawn without it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
import pytest
import torch
import trees
from samples import sample_of
from torch import Tensor, nn

from rlbuffer.config.losses import BUILT_IN_LOSSES, LOSSES, LossChoice, corrections_of, uses_old
from rlbuffer.config.trainer import OptimizerSettings, TrainerSettings
from rlbuffer.packing.assembly import PackItem, assemble
from rlbuffer.packing.planner import plan
from rlbuffer.process.ranks import Ranks
from rlbuffer.records.micro_batch import Step
from rlbuffer.records.rollout import Rollout, TokenSequence
from rlbuffer.records.states import ClosedBy
from rlbuffer.records.step_header import StepHeader
from rlbuffer.records.step_plan import Normalizers
from rlbuffer.trainer.losses import CORRECTIONS, TrainedTokens, per_token_of
from rlbuffer.trainer.losses.total import token_weights
from rlbuffer.trainer.update.token_choice import choose, draws
from rlbuffer.trainer.update.update import Updates, trained_tokens

TREES = int(os.environ.get("TREES", "10"))
ROW_TOKENS, LONGEST = 48, 64
"""Tokens of a row, unless a sequence is longer; the constant of dr_grpo."""


class Bigram(nn.Module):
    """Logits of the next token by the last one, with the call of a packed policy."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = nn.Parameter(table.clone())

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor, chosen: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        rows = self.table[input_ids[chosen - 1].long()].log_softmax(-1)
        return rows.gather(1, input_ids[chosen].long()[:, None])[:, 0], -(rows.exp() * rows).sum(-1)


class Together(Ranks):
    """One of several ranks, each in a thread."""

    def __init__(self, rank: int, said: dict[int, Tensor], meeting: threading.Barrier) -> None:
        super().__init__(rank, meeting.parties, torch.device("cpu"))
        self._said, self._meeting = said, meeting

    def gather(self, values: Tensor, *, meanwhile: object = None) -> Tensor:
        self._said[self.rank] = values
        self._meeting.wait(60)
        everybody = torch.stack([self._said[rank] for rank in range(self.world_size)])
        self._meeting.wait(60)
        return everybody


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """Rollouts of a step; nothing of the masked ones is trained."""

    rollouts: list[Rollout]
    masked: set[int]
    advantages: list[float]

    def items(self) -> list[tuple[int, int, TokenSequence]]:
        """Rollout, sequence and its tokens."""
        return [(r, s, its) for r, rollout in enumerate(self.rollouts) for s, its in enumerate(rollout.sequences)]


def drawn(seed: int) -> Drawn:
    rng = np.random.default_rng(seed)
    rollouts = [trees.rollout(rng) for _ in range(int(rng.integers(3, 9)))]
    masked = {i for i in range(1, len(rollouts)) if rng.random() < 0.2}
    return Drawn(rollouts=rollouts, masked=masked, advantages=rng.normal(size=len(rollouts)).tolist())


def steps(count: int) -> Iterator[Drawn]:
    """Steps of `count` trees in all, or a few more."""
    seed = 0
    while count > 0:
        yield (step := drawn(seed))
        seed, count = seed + 1, count - len(step.rollouts)


def parts_of(step: Drawn, world_size: int) -> list[Step]:
    """The step as each rank pulls it."""
    items = [
        PackItem(
            rollout=None if r in step.masked else its,
            sample=sample_of(
                str(r),
                length=len(its.tokens),
                sequence=s,
                sequences=len(step.rollouts[r].sequences),
                rollout_loss_tokens=step.rollouts[r].loss_tokens,
                is_truncated=r in step.masked,
                advantage=step.advantages[r],
            ),
        )
        for r, s, its in step.items()
    ]
    lengths = [item.sample.length for item in items]
    row_tokens = max(ROW_TOKENS, *lengths)
    rows = plan(lengths, row_tokens=row_tokens, world_size=world_size).rows
    counts = Normalizers(
        loss_tokens=sum(r.loss_tokens for i, r in enumerate(step.rollouts) if i not in step.masked),
        rollouts=len(step.rollouts),
        groups=1,
    )
    header = StepHeader(
        step=1,
        epoch=1,
        digest="",
        previous_digest="",
        world_size=world_size,
        normalizers={},
        rollouts=len(step.rollouts),
        sequences=len(items),
        tokens=sum(lengths),
        group_ids=("g",),
        closed_by=ClosedBy.GROUPS,
        fill=1.0,
        envs={},
        reward=None,
        age=0.0,
        max_age=0,
        committed_ms=1,
        columns={},
        masks_truncated=True,
    )
    return [
        Step(
            number=1,
            epoch=1,
            digest="",
            world_size=world_size,
            normalizers=counts,
            rollouts=len(step.rollouts),
            groups=1,
            micro_batches=assemble(
                [dealt[rank] for dealt in rows], items, row_tokens=row_tokens, normalizers=counts, pad_to_multiple_of=8
            ),
            header=header,
        )
        for rank in range(world_size)
    ]


BEFORE = 0.4 * torch.randn((trees.VOCABULARY,) * 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
AFTER = BEFORE + 0.1 * torch.randn(BEFORE.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
"""The policy that the step starts from, and the one that each update is made of."""


def updated(steps: Sequence[Step], choice: LossChoice, slices: int) -> list[tuple[Tensor, list[set[tuple[str, int]]]]]:
    """The gradient of each update over all ranks, as the trainer makes them; and what lay in it, rank by rank."""
    settings = TrainerSettings(loss=choice, optimizer=OptimizerSettings(updates_per_pass=slices))
    said: dict[int, Tensor] = {}
    meeting = threading.Barrier(len(steps))

    def rank(number: int) -> list[tuple[Tensor, set[tuple[str, int]]]]:
        policy = Bigram(BEFORE)
        updates = Updates(policy, steps[number], settings, Together(number, said, meeting), longest=LONGEST)
        policy.table.data.copy_(AFTER)
        out = []
        for part in updates.parts:
            policy.zero_grad(set_to_none=True)
            updates.accumulate(part)
            assert policy.table.grad is not None
            held = {(s.rollout_id, s.sequence) for m in part.micro_batches for s in m.samples}
            out.append((policy.table.grad, held))
            weights = torch.zeros(1, dtype=torch.float64)
            for micro_batch in part.micro_batches:
                tokens = trained_tokens(policy, micro_batch.to("cpu"))
                weights += token_weights("rollouts", tokens).double().sum().detach()
            untrained = sum(Fraction(1, s.sequences) for m in part.micro_batches for s in m.samples if s.is_truncated)
            total = float(updates._ranks.sum(weights + float(untrained)))
            assert total == pytest.approx(part.normalizers.rollouts, abs=1e-12)
        return out

    with ThreadPoolExecutor(len(steps)) as threads:
        made = [*threads.map(rank, range(len(steps)))]
    return [
        (torch.stack([grad for grad, _ in update]).mean(0), [held for _, held in update])
        for update in zip(*made, strict=True)
    ]


def in_one_process(step: Drawn, places: set[tuple[str, int]], choice: LossChoice, *, is_whole: bool) -> Tensor:
    """The gradient of the same tokens in one pass, each weighed by hand."""
    weights = AFTER.clone().requires_grad_()
    held = [(r, s, its) for r, s, its in step.items() if (str(r), s) in places]
    trained = [(r, s, its) for r, s, its in held if r not in step.masked]
    if not trained:
        return torch.zeros_like(weights)
    logprobs, old, entropy, inference, advantages, owner, of_rollout = [], [], [], [], [], [], []
    for n, (r, _, its) in enumerate(trained):
        at = np.flatnonzero(its.loss_mask)
        before, sampled = (torch.tensor(its.tokens[i], dtype=torch.int64) for i in (at - 1, at))
        rows = weights[before].log_softmax(-1)
        logprobs.append(rows.gather(1, sampled[:, None])[:, 0])
        old.append(BEFORE[before].log_softmax(-1).gather(1, sampled[:, None])[:, 0])
        entropy.append(-(rows.exp() * rows).sum(-1))
        inference.append(torch.tensor(its.logprobs[at], dtype=torch.float64))
        advantages.append(torch.full((len(at),), float(np.float32(step.advantages[r])), dtype=torch.float64))
        owner.append(torch.full((len(at),), n, dtype=torch.int64))
        of_rollout += [Fraction(1, step.rollouts[r].loss_tokens)] * len(at)
    tokens = TrainedTokens(
        logprobs=torch.cat(logprobs),
        entropy=torch.cat(entropy),
        inference_logprobs=torch.cat(inference),
        advantages=torch.cat(advantages),
        rollout=torch.cat(owner),
    )
    if uses_old(choice):
        tokens = replace(tokens, old_logprobs=tokens.logprobs.detach() if is_whole else torch.cat(old))
    if LOSSES[choice.name].function.endswith("_cov"):
        alone = [
            PackItem(rollout=its, sample=sample_of(str(r), length=len(its.tokens), sequence=s)) for r, s, its in trained
        ]
        (packed,) = assemble(
            [[tuple(range(len(alone)))]],
            alone,
            row_tokens=10**5,
            normalizers=Normalizers(loss_tokens=1, rollouts=1, groups=1),
        )
        tokens = replace(tokens, draws=draws(packed, torch.device("cpu")))
        tokens = replace(tokens, **choose([tokens], choice, lambda values: values)[0])
    per_token = per_token_of(tokens, choice)
    for name, options in corrections_of(choice).items():
        per_token = per_token * CORRECTIONS[name](tokens, options)
    by = LOSSES[choice.name].divisor if choice.normalizer == "auto" else choice.normalizer
    none_trained = sum(
        (Fraction(1, len(step.rollouts[r].sequences)) for r, _, _ in held if r in step.masked), Fraction(0)
    )
    rollouts = sum(of_rollout, none_trained)
    divisor = {"rollouts": rollouts, "tokens": len(of_rollout), "longest": rollouts * LONGEST}[by]
    each = torch.tensor([float(w) if by == "rollouts" else 1.0 for w in of_rollout], dtype=torch.float64)
    bonus = choice.entropy_bonus * tokens.entropy.mean()
    (out,) = torch.autograd.grad((per_token * each).sum() / float(divisor) - bonus, weights)
    return out


@pytest.mark.parametrize("name", BUILT_IN_LOSSES)
def test_an_update_is_the_mean_over_what_it_holds_however_a_step_is_cut(name: str) -> None:
    for seed, step in enumerate(steps(TREES)):
        for normalizer in ("auto", *(n for n in ("rollouts", "tokens", "longest") if seed % 4 == len(n) % 4)):
            choice = LossChoice(name=name, normalizer=normalizer, entropy_bonus=0.01 * (seed % 2))
            whole = {(str(r), s) for r, s, _ in step.items()}
            for world_size in (1, 2, 4):
                parts = parts_of(step, world_size)
                for slices in (1, 2, 3):
                    made = updated(parts, choice, slices)
                    assert set().union(*(held for _, ranks in made for held in ranks)) == whole
                    for gradient, ranks in made:
                        places = set().union(*ranks)
                        expected = in_one_process(step, places, choice, is_whole=len(made) == 1)
                        assert float((gradient - expected).abs().max()) < 1e-12, (seed, normalizer, world_size, slices)
