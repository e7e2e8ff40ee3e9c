"""`truncated = "mask"` from the push to the loss: what was cut is pulled masked at any world size."""

from __future__ import annotations

import uuid
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from daemon_runs import pulled
from torch import Tensor, nn

import rlbuffer
from rlbuffer.config.losses import LossChoice
from rlbuffer.process.ranks import Ranks
from rlbuffer.testing import make_group
from rlbuffer.trainer.losses import loss_of
from rlbuffer.trainer.reports.mfu import Utilization
from rlbuffer.trainer.reports.tally import Tally
from rlbuffer.trainer.update.slices import slices_of
from rlbuffer.trainer.update.stopwatch import Stopwatch
from rlbuffer.trainer.update.update import trained_tokens

ALONE = Ranks(0, 1, torch.device("cpu"))
EMBEDDING = SimpleNamespace(weight=torch.zeros(1))
WORK = SimpleNamespace(
    config=SimpleNamespace(get_text_config=lambda: None),
    get_input_embeddings=lambda: EMBEDDING,
    get_output_embeddings=lambda: EMBEDDING,
)
CUT = {"a.1/3", "a.2/0", "a.2/1", "a.2/2", "a.2/3"}
"""One rollout of a group, and all of another one."""


class Policy(nn.Module):
    """Gives logprob -2 for every token."""

    def forward(
        self, ids: Tensor, positions: Tensor, seqlens: Tensor, chosen: Tensor, scale: float
    ) -> tuple[Tensor, ...]:
        return torch.full((len(chosen),), -2.0), torch.zeros(len(chosen))


@pytest.fixture
def buffer() -> rlbuffer.Buffer:
    with rlbuffer.connect(f"memory://{uuid.uuid4().hex}", run="cut") as made:
        yield made


def made_groups() -> list[rlbuffer.Group]:
    groups = []
    for seed in range(4):
        group = make_group(seed=seed, rewards=[1.0, 0.0, 0.5, 0.0], lengths=[8, 12, 6, 10])
        rollouts = tuple(replace(r, is_truncated=r.rollout_id in CUT) for r in group.rollouts)
        groups.append(replace(group, rollouts=rollouts))
    return groups


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_was_truncated_trains_nothing_and_divides_nothing(buffer: rlbuffer.Buffer, world_size: int) -> None:
    groups = made_groups()
    pulled(buffer, rlbuffer.BatcherConfig(64, step_groups=4, advantage="dr_grpo", truncated="mask"), *groups)
    settings, total, seen = LossChoice(name="dapo"), 0.0, {}
    for rank in range(world_size):
        step = buffer.reader(rank, world_size, timeout_seconds=20).pull(1)
        for micro_batch in step:
            tokens = trained_tokens(Policy(), micro_batch.to("cpu"), version=0)
            total += float(loss_of(tokens, settings, micro_batch.normalizers, longest=64))
            masks = micro_batch.unpack(micro_batch.loss_mask)
            seen |= {s.rollout_id: int(m.sum()) for s, m in zip(micro_batch.samples, masks, strict=True)}
    assert seen == {r.rollout_id: 0 if r.rollout_id in CUT else r.loss_tokens for g in groups for r in g.rollouts}

    # DAPO with its overlong filter, written out: the sum over the tokens that are kept, over their number.
    loss, count = 0.0, 0
    for group in groups:
        rewards = np.array([rollout.reward for rollout in group.rollouts])
        for rollout, advantage in zip(group.rollouts, rewards - rewards.mean(), strict=True):
            if rollout.rollout_id not in CUT:
                ratio = np.exp(-2.0 - rollout.logprobs[rollout.loss_mask].astype(np.float64))
                loss -= np.minimum(ratio * advantage, ratio.clip(0.8, 1.28) * advantage).sum()
                count += rollout.loss_tokens
    assert total == pytest.approx(loss / count, rel=1e-5)
    assert (step.normalizers.loss_tokens, step.normalizers.rollouts) == (count, 16)
    assert buffer.verify().ok, buffer.verify()
    if world_size == 1:
        slices = slices_of(step, ALONE, 3)
        assert [len(part.micro_batches) for part in slices] == [1] * len(step)
        assert sum(part.normalizers.loss_tokens for part in slices) == count
        assert sum(part.normalizers.rollouts for part in slices) == 16
        cut = sum(r.loss_tokens for g in groups for r in g.rollouts if r.rollout_id in CUT)
        record = Tally(ALONE, step, settings).record(Stopwatch(), Utilization(WORK, 0, ALONE.device, passes=1))
        assert record.masked_by["truncated"] == pytest.approx(cut / (cut + count))
