"""Advantages that depend on the whole step: scaled by its deviation, and of truncated rollouts that are masked."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from batcher_calls import ask, batcher, put

from rlbuffer.batcher.advantages import over_batch
from rlbuffer.batcher.batcher import Batcher
from rlbuffer.config.batcher import BatcherConfig
from rlbuffer.records.step_plan import Normalizers, StepPlan
from rlbuffer.testing import make_group

REWARDS = {"g1": [1.0, 0.0, 0.5, 0.25], "g2": [1.0, 1.0, 1.0, 0.0], "g3": [3.0, 2.0, 2.5, 2.0]}

OF_G3 = [0.6354020833969116, -0.38124123215675354, 0.12708041071891785, -0.38124123215675354]
"""Advantages of the last group, by TRL 1.16: its `nanstd` and the lines around it in
`_generate_and_score_completions`."""


def planned(**settings: Any) -> StepPlan:
    made = batcher(step_groups=len(REWARDS), order="oldest_first", **settings)
    for name, rewards in REWARDS.items():
        put(made, name, rewards=rewards)
    plan = ask(made).plan
    assert plan is not None
    return plan


def by_rollout(plan: StepPlan) -> dict[str, float]:
    return {ref.rollout_id: float(a) for ref, a in zip(plan.rollouts, plan.advantages, strict=True)}


def test_batch_scaled_advantages_are_those_of_trl() -> None:
    """``(r - mean of its group) / (std of all rewards of the batch, over n - 1, + 1e-4)``, as GRPOTrainer computes
    them."""
    found = by_rollout(planned(advantage="dr_grpo", advantage_scale="batch"))
    everything = np.concatenate(list(REWARDS.values()))
    std = np.sqrt(np.square(everything - everything.mean()).sum() / (len(everything) - 1))
    for name, rewards in REWARDS.items():
        expected = (np.array(rewards) - np.mean(rewards)) / (std + 1e-4)
        assert [found[f"{name}/{i}"] for i in range(4)] == pytest.approx(expected.tolist(), abs=1e-6)
    assert [found[f"g3/{i}"] for i in range(4)] == pytest.approx(OF_G3, abs=1e-6)


def test_the_batch_is_the_step_and_not_the_pool() -> None:
    made = batcher(step_groups=1, order="oldest_first", advantage="dr_grpo", advantage_scale="batch")
    put(made, "g1", rewards=[1.0, 0.0, 1.0, 0.0])
    put(made, "g2", rewards=[100.0, 0.0, 50.0, 0.0])
    plan = ask(made).plan
    assert plan is not None
    assert plan.advantages.tolist() == pytest.approx([x / (np.sqrt(1 / 3) + 1e-4) for x in (0.5, -0.5, 0.5, -0.5)])


@pytest.mark.parametrize("scale", [1e-9, 1e9])
def test_the_size_of_a_batchs_rewards_decides_nothing(scale: float) -> None:
    rewards = np.array([1.0, 0.0, 0.5, 0.25])
    centred = rewards - rewards.mean()
    np.testing.assert_allclose(over_batch(scale * centred, scale * rewards), over_batch(centred, rewards), rtol=1e-3)
    noise = scale * (1 + rewards * 1e-9)
    assert np.abs(over_batch(noise - noise.mean(), noise)).max() < 1e-3 * scale


def test_each_adapter_is_a_batch_of_its_own() -> None:
    made = batcher(step_groups=2, order="oldest_first", advantage="dr_grpo", advantage_scale="batch")
    put(made, "g1", rewards=[1.0, 0.0, 1.0, 0.0])
    put(made, "g2", rewards=[100.0, 0.0, 100.0, 0.0], adapter="lora")
    made.set_published(0)
    made.set_published(0, "lora")
    plan = ask(made).plan
    assert plan is not None
    found = by_rollout(plan)
    assert found["g1/0"] == pytest.approx(0.5 / (np.sqrt(1 / 3) + 1e-4))
    assert found["g2/0"] == pytest.approx(50 / (100 * np.sqrt(1 / 3) + 1e-4))


@pytest.mark.parametrize("advantage", ["dr_grpo", "reinforce"])
def test_a_batch_whose_rewards_are_equal_is_divided_by_nothing(advantage: str) -> None:
    made = batcher(step_groups=1, advantage=advantage, advantage_scale="batch")
    put(made, "g", rewards=[0.5] * 4)
    plan = ask(made).plan
    assert plan is not None
    assert plan.advantages.tolist() == [0.0 if advantage == "dr_grpo" else 0.5] * 4


def with_truncated(**settings: Any) -> StepPlan:
    made = Batcher(BatcherConfig(100, step_groups=1, advantage="dr_grpo", **settings))
    info = make_group(group_id="g", rewards=[1.0, 0.0, 0.0, 1.0], lengths=[8] * 4).info()
    cut = [r.changed(is_truncated=i >= 2) for i, r in enumerate(info.rollouts)]
    made.add(dataclasses.replace(info, rollouts=tuple(cut)), entry_id="1-0", now=0.0)
    plan = ask(made).plan
    assert plan is not None
    return plan


def test_a_masked_rollout_counts_in_its_group_and_then_trains_nothing() -> None:
    plan, whole = with_truncated(truncated="mask"), with_truncated()
    assert whole.advantages.tolist() == [0.5, -0.5, -0.5, 0.5]
    assert plan.advantages.tolist() == [0.5, -0.5, 0.0, 0.0]
    assert (whole.normalizers, plan.normalizers) == (
        Normalizers(loss_tokens=24, rollouts=4, groups=1),
        Normalizers(loss_tokens=12, rollouts=4, groups=1),
    )
    assert [ref.loss_tokens for ref in plan.rollouts] == [6, 6, 0, 0]
    assert (plan.rollouts.masks, whole.rollouts.masks) == (True, False)
    assert plan.plan == whole.plan, "its place in the row stays"
    assert plan.entries == whole.entries, "it is packed and trained in the ledger"
