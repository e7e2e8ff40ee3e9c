"""A selection of groups as the step that is committed: rows, advantages, and what becomes of every pool entry."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlbuffer.advantages import advantage
from rlbuffer.batches import Normalizers, Plan, RolloutRef, StepPlan
from rlbuffer.config import BatcherConfig
from rlbuffer.planning import plan
from rlbuffer.policy.groups import GroupState


def plan_groups(groups: Sequence[GroupState], config: BatcherConfig, world_size: int) -> Plan:
    """The rows of these groups' rollouts; index i of the plan is the i-th rollout, group by group."""
    adapters = [g.adapter for g in groups for _ in g.members] if any(g.adapter for g in groups) else None
    return plan(
        [m.info.length for g in groups for m in g.members],
        row_tokens=config.row_tokens,
        world_size=world_size,
        rows_per_micro_batch=config.rows_per_micro_batch,
        cost=config.cost,
        adapters=adapters,
    )


def step_plan(step: int, groups: Sequence[GroupState], rows: Plan, closed_by: str, config: BatcherConfig) -> StepPlan:
    """The step that trains `groups`, laid out as `rows`: advantages by each env's estimator, every entry accounted."""
    refs = [
        RolloutRef(
            entry_id=member.entry_id,
            index=member.place,
            rollout_id=member.info.rollout_id,
            group_id=group.group_id,
            env=group.env,
            adapter=group.adapter,
            length=member.info.length,
            loss_tokens=member.info.loss_tokens,
            min_version=member.info.min_version,
        )
        for group in groups
        for member in group.members
    ]
    advantages = [
        advantage(
            config.for_env(group.env, "advantage"),
            group.rewards,
            lengths=[member.info.loss_tokens for member in group.members],
        )
        for group in groups
    ]
    return StepPlan(
        step=step,
        group_ids=tuple(group.group_id for group in groups),
        rollouts=tuple(refs),
        advantages=np.concatenate(advantages).astype(np.float32),
        plan=rows,
        normalizers=Normalizers(
            loss_tokens=sum(ref.loss_tokens for ref in refs), rollouts=len(refs), groups=len(groups)
        ),
        tokens=sum(group.tokens for group in groups),
        closed_by=closed_by,
        entries=tuple(use for group in groups for use in group.uses(config.max_uses)),
    )
