"""What takes the gradient from a step's tokens, by hand: every stage takes it from none, half and all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from samples import sample_of
from step_headers import header_of, step_of
from torch import Tensor, nn

from rlbuffer.config.losses import LossChoice
from rlbuffer.config.trainer import TrainerSettings
from rlbuffer.packing.assembly import PackItem, assemble
from rlbuffer.process.ranks import Ranks
from rlbuffer.records.info import RolloutInfo
from rlbuffer.records.rollout import Rollout
from rlbuffer.records.step_plan import Normalizers
from rlbuffer.state.metric import metrics_of
from rlbuffer.state.step_record import StepRecord, scalars
from rlbuffer.trainer.losses import register_loss
from rlbuffer.trainer.reports.mfu import Utilization
from rlbuffer.trainer.reports.reports import step_lines
from rlbuffer.trainer.reports.tally import Tally
from rlbuffer.trainer.update.stopwatch import Stopwatch
from rlbuffer.trainer.update.update import Updates

POLICY = -2.0
"""Logprob of every token under the policy."""
ALONE = Ranks(0, 1, torch.device("cpu"))
EMBEDDING = SimpleNamespace(weight=torch.zeros(1))
WORK: Any = SimpleNamespace(
    config=SimpleNamespace(get_text_config=lambda: None),
    get_input_embeddings=lambda: EMBEDDING,
    get_output_embeddings=lambda: EMBEDDING,
)


class Given(nn.Module):
    """A policy whose logprobs are its parameters: of token 1 in rollout 0, of token 2 in rollout 1."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.full((3,), POLICY, dtype=torch.float64))

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor, chosen: Tensor, temperature: Any
    ) -> tuple[Tensor, Tensor]:
        tokens = input_ids[chosen].long()
        return self.table[tokens], tokens.double()


def recorded(
    choice: LossChoice,
    *,
    advantages: tuple[float, float] = (1.0, 1.0),
    drift: tuple[float, float] = (0.0, 0.0),
    weights: tuple[float, float] | None = None,
    truncated: tuple[int, ...] = (),
    damaged: tuple[int, ...] = (),
) -> tuple[StepRecord, float]:
    """The record of a step of two rollouts of four trained tokens, and the largest gradient.

    `drift` is logprob less inference logprob, of each rollout's tokens.
    """
    items = []
    for i in range(2):
        rollout = Rollout.from_completion(
            prompt_ids=[0], token_ids=[i + 1] * 4, logprobs=[POLICY - drift[i]] * 4, reward=1.0, policy_version=0
        )
        if weights is not None:
            rollout = replace(rollout, columns={"weights": np.full(5, weights[i], np.float32)})
        info = RolloutInfo(
            rollout_id=str(i), length=5, prompt_tokens=1, loss_tokens=4, reward=1.0, min_version=0, max_version=0
        )
        sample = sample_of(
            str(i), length=5, advantage=advantages[i], is_truncated=i in truncated, rollout_loss_tokens=4, info=info
        )
        held = None if i in truncated or i in damaged else rollout
        items.append(PackItem(rollout=held, sample=sample))
    counts = Normalizers(loss_tokens=4 * (2 - len(truncated)), rollouts=2, groups=1)
    columns = () if weights is None else ("weights",)
    micro_batches = assemble([[(0,)], [(1,)]], items, row_tokens=8, normalizers=counts, columns=columns)
    header = header_of(masks_truncated=bool(truncated), tokens=10, reward=1.0)
    step = step_of(*micro_batches, header=header)
    policy, tally = Given(), Tally(ALONE, step, choice)
    tally.damaged_tokens = 4 * len(damaged)
    updates = Updates(policy, step, TrainerSettings(loss=choice), ALONE, longest=8)
    for part in updates.parts:
        tally.sums += updates.accumulate(part)
    assert policy.table.grad is not None
    record = tally.record(Stopwatch(), Utilization(WORK, 0, ALONE.device, passes=1))
    return record, float(policy.table.grad.abs().max())


Case = tuple[str, dict[str, Any], Callable[[int], dict[str, Any]]]


def first(count: int, taken: float, other: float) -> tuple[float, float]:
    """`taken` for as many of the rollouts, `other` for the rest."""
    return (taken if count > 0 else other, taken if count > 1 else other)


def drifting(nats: float, **fields: Any) -> Callable[[int], dict[str, Any]]:
    return lambda count: {"drift": first(count, nats, 0.0), **fields}


BAD = (-1.0, -1.0)
CASES: list[Case] = [
    ("clip", {"name": "clip"}, drifting(1.0)),  # r = e, above 1.28
    ("clip", {"name": "dapo"}, drifting(-1.0, advantages=BAD)),  # r = 1 / e, below 0.8, and A < 0
    ("clip", {"name": "dr_grpo"}, drifting(1.0)),
    ("clip", {"name": "ratio"}, drifting(3.0)),  # r = 20, above 8
    ("clip", {"name": "gspo", "old_logprobs": "inference"}, drifting(0.01)),
    ("clip", {"name": "masked_ratio"}, drifting(3.0)),
    ("clip", {"name": "masked_ratio"}, drifting(-1.5)),
    # In probability: exp(-2) less exp(-3) is 0.086. The penalty's gradient is none by the advantage.
    ("clip", {"name": "dppo_tv", "options": {"tv_high": 0.05}}, drifting(1.0)),
    ("clip", {"name": "tests_capped"}, drifting(1.0)),
    ("advantage", {"name": "clip"}, lambda count: {"advantages": first(count, 0.0, 1.0)}),
    ("advantage", {"name": "dppo_tv"}, lambda count: {"advantages": first(count, 0.0, 1.0), "drift": (0.1, 0.1)}),
    ("advantage", {"name": "kl_cov"}, lambda count: {"advantages": first(count, 0.0, 1.0), "drift": (0.1, 0.1)}),
    ("advantage", {"name": "cispo"}, lambda count: {"advantages": first(count, 0.0, 1.0)}),
    ("weights", {"name": "dapo"}, lambda count: {"weights": first(count, 0.0, 3.0)}),
    ("icepop", {"name": "icepop"}, drifting(2.0)),  # w = 7.4, above 5
    ("icepop", {"name": "dapo", "correction": {"icepop": {}}}, drifting(-2.0)),
    ("sequence_mask", {"name": "clip", "correction": {"sequence_mask": {}}}, drifting(-0.2)),  # exp(-0.8), below 0.5
    ("geometric_mask", {"name": "tis", "correction": {"geometric_mask": {}}}, drifting(1.0)),
    ("negative_mask", {"name": "clip", "correction": {"negative_mask": {}}}, drifting(-0.15, advantages=BAD)),
    ("truncated", {"name": "clip"}, lambda count: {"truncated": tuple(range(count))}),
    ("damaged", {"name": "clip"}, lambda count: {"damaged": tuple(range(count))}),
]


@pytest.fixture(scope="module", autouse=True)
def own_loss() -> None:
    def capped(tokens: Any, options: Any) -> Tensor:
        return torch.where(tokens.ratio < 2, -tokens.ratio * tokens.advantages, torch.zeros_like(tokens.ratio))

    register_loss("tests_capped", capped)


@pytest.mark.parametrize("count", [0, 1, 2])
@pytest.mark.parametrize(
    ("stage", "loss", "fields"), CASES, ids=[f"{c[0]}-{c[1]['name']}-{i}" for i, c in enumerate(CASES)]
)
def test_what_a_stage_takes_is_in_the_metrics_and_in_the_line(
    stage: str, loss: dict[str, Any], fields: Callable[[int], dict[str, Any]], count: int
) -> None:
    record, gradient = recorded(LossChoice(**loss), **fields(count))
    share = count / 2
    line, *further = step_lines(record).splitlines()
    assert record.masked_fraction == pytest.approx(share)
    assert {name: value for name, value in record.masked_by.items() if value} == ({stage: share} if share else {})
    assert record.clip_fraction == (share if stage == "clip" else 0.0)
    assert f"clipped {record.clip_fraction:.1%}" in line
    assert (f"masked {share:.1%} ({stage} {share:.1%})" in line) == bool(share and stage != "clip")
    said = f"  step 1 trains nothing: its tokens are masked by {stage} 100.0%"
    assert further == ([said] if share == 1 and stage != "advantage" else []), "flat groups are no fault of the loss"
    if loss["name"] not in ("dppo_tv", "kl_cov"):  # whose penalty has a gradient of its own
        assert (gradient == 0) == (share == 1)


def test_the_share_of_top_entropy_is_what_it_leaves_out() -> None:
    record, _ = recorded(LossChoice(name="dapo", top_entropy=0.5))
    assert (record.masked_by["top_entropy"], record.masked_fraction) == (0.5, 0.5)
    assert "masked 50.0% (top_entropy 50.0%)" in step_lines(record)
    assert "top_entropy" not in recorded(LossChoice(name="dapo"))[0].masked_by


def test_stages_that_take_the_same_tokens_are_each_told_and_counted_once_in_all() -> None:
    choice = LossChoice(name="tis", correction={"geometric_mask": {}})
    record, _ = recorded(choice, advantages=(0.0, 1.0), drift=(1.0, 0.0), truncated=())
    shares = {"damaged": 0.0, "advantage": 0.5, "clip": 0.0, "tis": 0.0, "geometric_mask": 0.5}
    assert (record.masked_fraction, record.masked_by) == (0.5, shares)
    record, _ = recorded(choice, drift=(0.0, 1.0), truncated=(0,))
    assert record.masked_by == {**shares, "truncated": 0.5, "advantage": 0.0, "geometric_mask": 1.0}
    assert record.masked_fraction == 1.0
    said = "trains nothing: its tokens are masked by geometric_mask 100.0%, truncated 50.0%"
    assert said in step_lines(record)


@pytest.mark.parametrize(
    ("name", "drift", "mean"),
    [
        ("tis", (np.log(0.5), np.log(3.0)), (0.5 + 2.0) / 2),  # the cap is 2
        ("icepop", (np.log(0.6), np.log(6.0)), (0.6 + 0.0) / 2),
        ("sequence_tis", (np.log(0.5), np.log(1.1)), (0.5**4 + 1.1**4) / 2),
        ("sequence_mask", (np.log(0.5), np.log(1.1)), (0.0 + 1.1**4) / 2),
        ("geometric_mask", (np.log(0.4), np.log(1.1)), 0.5),
    ],
)
def test_the_mean_weight_of_a_correction_is_told(name: str, drift: tuple[float, float], mean: float) -> None:
    record, _ = recorded(LossChoice(name="dapo", correction={name: {}}), drift=drift)
    assert record.correction_weight == {name: pytest.approx(mean, rel=1e-6)}
    assert f"weight {name} {mean:.2f}" in step_lines(record)


def test_each_share_is_a_metric_by_stage_and_each_weight_by_correction() -> None:
    metrics = {field: (each.name, each.labels) for field, each in metrics_of(StepRecord)}
    assert metrics["masked_fraction"] == ("train_masked_ratio", ())
    assert metrics["masked_by"] == ("train_masked_by_ratio", ("stage",))
    assert metrics["correction_weight"] == ("train_correction_weight_mean", ("correction",))
    record, _ = recorded(LossChoice(name="icepop"), drift=(2.0, 0.0))
    paths = scalars(record.as_object())
    assert (paths["masked_by/icepop"], paths["masked_fraction"], paths["correction_weight/icepop"]) == (0.5, 0.5, 0.5)


def test_a_loss_that_needs_no_advantage_is_not_said_to_be_masked() -> None:
    register_loss("tests_teacher", lambda tokens, options: -tokens.logprobs)
    record, gradient = recorded(LossChoice(name="tests_teacher"), advantages=(0.0, 0.0))
    assert (record.masked_fraction, record.masked_by["advantage"]) == (0.0, 0.0)
    assert gradient > 0
