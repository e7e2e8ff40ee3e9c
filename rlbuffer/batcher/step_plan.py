"""A selection of groups as the step that is committed: rows, advantages, and what becomes of every pool entry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlbuffer.batcher.advantages import (
    BY_ROWS,
    MAX_ADVANTAGE,
    Loaded,
    check_advantages,
    check_rewards,
    load_estimator,
    over_batch,
)
from rlbuffer.batcher.group import PooledGroup
from rlbuffer.config.batcher import BatcherConfig, compares
from rlbuffer.errors import InvalidRollout
from rlbuffer.packing.planner import plan
from rlbuffer.records.info import IS_TRUNCATED, ROW_DTYPE, rollouts_of
from rlbuffer.records.states import ClosedBy
from rlbuffer.records.step_plan import AdapterProgress, Normalizers, Plan, PlannedRollouts, StepPlan


def _rows(groups: Sequence[PooledGroup]) -> NDArray[np.void]:
    """[sequences] of :data:`~rlbuffer.records.info.ROW_DTYPE`, group by group."""
    return np.frombuffer(b"".join([part.rows for group in groups for part in group.parts.values()]), ROW_DTYPE)


def _numbers(groups: Sequence[PooledGroup], rows: NDArray[np.void]) -> NDArray[np.void]:
    """[rollouts] of the same, of their `rows`."""
    return rows if len(rows) == sum([group.rollouts for group in groups]) else rollouts_of(rows)


def plan_groups(groups: Sequence[PooledGroup], config: BatcherConfig, world_size: int) -> Plan:
    """The rows of these groups' sequences; index i of the plan is the i-th sequence, group by group."""
    if config.is_stream:
        lengths = [length for group in groups for length in group.lengths]
        return Plan(rows=(((tuple(range(len(lengths))),),),), world_size=1, row_tokens=sum(lengths))
    adapters = [g.adapter for g in groups for _ in g.lengths] if any(g.adapter for g in groups) else None
    return plan(
        _rows(groups)["length"],
        row_tokens=config.row_tokens,
        world_size=world_size,
        rows_per_micro_batch=config.rows_per_micro_batch,
        cost=config.cost,
        adapters=adapters,
    )


def load_estimators(config: BatcherConfig) -> dict[str, Loaded]:
    """Every estimator that the settings name, by its name.

    Raises:
        ConfigError: one of the user's own cannot be imported.
    """
    places = {f"batcher.envs.{env}.advantage": o.advantage for env, o in config.envs.items() if o.advantage is not None}
    places["batcher.advantage"] = config.advantage
    return {name: load_estimator(name, setting=place) for place, name in places.items()}


def group_facts(group: PooledGroup) -> dict[str, Any]:
    """The facts about a group that a user's estimator gets besides its rewards: of the valid rollouts, in order.

    group_id, env, prompt_id, adapter; and per rollout, as tuples: rollout_ids, rewards (the named ones, each a dict),
    lengths and prompt_tokens (all tokens, and the prompt's), is_truncated, min_policy_versions, max_policy_versions.
    """
    infos = group.infos
    return {
        "group_id": group.group_id,
        "env": group.env,
        "prompt_id": group.prompt_id,
        "adapter": group.adapter,
        "rollout_ids": tuple(info.rollout_id for info in infos),
        "rewards": tuple(dict(info.rewards) for info in infos),
        "lengths": tuple(info.length for info in infos),
        "prompt_tokens": tuple(info.prompt_tokens for info in infos),
        "is_truncated": tuple(info.is_truncated for info in infos),
        "min_policy_versions": tuple(info.min_version for info in infos),
        "max_policy_versions": tuple(info.max_version for info in infos),
    }


def advantages_of(
    groups: Sequence[PooledGroup], config: BatcherConfig, estimators: Mapping[str, Loaded]
) -> tuple[NDArray[np.float32], list[tuple[PooledGroup, str]]]:
    """Returns [rollouts] float32, group by group, by each env's estimator; and the groups that have no advantages that
    can be trained, with the reason. When there are any, the advantages are those of the others.

    The divisor of `advantage_scale` is taken over the rollouts of one adapter: two policies do not share a batch. A
    masked rollout counts in all of it, and gets 0.

    Raises:
        ConfigError: an estimator of the user's own failed.
    """
    numbers = _numbers(groups, _rows(groups))
    rewards, lengths = np.ascontiguousarray(numbers["reward"]), numbers["loss_tokens"].astype(np.float64)
    advantages, start, slices = np.zeros(len(numbers)), 0, list[slice]()
    is_finite = np.isfinite(rewards)
    with np.errstate(all="ignore"):
        for (name, size), alike in groupby(groups, lambda group: (config.for_env(group.env).advantage, group.rollouts)):
            members = list(alike)
            slices += (slice(start + size * i, start + size * (i + 1)) for i in range(len(members)))
            together = slice(start, start + size * len(members))
            start = together.stop
            if size == 1 and compares(name):
                continue
            if name in BY_ROWS:
                rows, weights = (values[together].reshape(-1, size) for values in (rewards, lengths))
                advantages[together] = estimators[name](rows, weights, {}).ravel()
                continue
            for group, place in zip(members, slices[-len(members) :], strict=True):
                if is_finite[place].all():
                    about = group_facts(group) if ":" in name else {}
                    advantages[place] = estimators[name](rewards[place], lengths[place], about)
    if not (is_finite & (np.abs(advantages) <= MAX_ADVANTAGE)).all():
        untrainable = []
        trained = np.ones(len(numbers), dtype=bool)
        for group, place in zip(groups, slices, strict=True):
            name = config.for_env(group.env).advantage
            try:
                check_rewards(name, rewards[place])
                check_advantages(name, advantages[place])
            except InvalidRollout as error:
                untrainable.append((group, str(error)))
                trained[place] = False
        return advantages[trained].astype(np.float32), untrainable
    if config.advantage_scale == "batch":
        adapters = np.repeat([group.adapter for group in groups], [group.rollouts for group in groups])
        for adapter in np.unique(adapters):
            mine = adapters == adapter
            advantages[mine] = over_batch(advantages[mine], rewards[mine])
    if config.truncated == "mask":
        advantages[_are_truncated(numbers)] = 0.0
    return advantages.astype(np.float32), []


def all_train(group: PooledGroup, config: BatcherConfig) -> bool:
    """True when the rollouts of a group, of which it has one, are known to train a token each; its rows stay packed."""
    if config.truncated == "mask" or not group.rollouts:
        return False
    return all(part.info.totals.are_trained for part in group.parts.values())


def trained_tokens(groups: Sequence[PooledGroup], config: BatcherConfig) -> NDArray[np.int64]:
    """[rollouts] int64, group by group: the tokens of each that a step trains."""
    return _trained(_numbers(groups, _rows(groups)), config)


def _trained(numbers: NDArray[np.void], config: BatcherConfig) -> NDArray[np.int64]:
    tokens = numbers["loss_tokens"].astype(np.int64)
    if config.truncated == "mask":
        tokens[_are_truncated(numbers)] = 0
    return tokens


def _are_truncated(numbers: NDArray[np.void]) -> NDArray[np.bool_]:
    are_truncated: NDArray[np.bool_] = (numbers["flags"] & IS_TRUNCATED) != 0
    return are_truncated


def step_plan(
    step: int,
    groups: Sequence[PooledGroup],
    advantages: NDArray[np.float32],
    rows: Plan,
    closed_by: ClosedBy,
    config: BatcherConfig,
    progress: Mapping[str, AdapterProgress],
    flat: int = 0,
) -> StepPlan:
    """The step that trains `groups` with these `advantages` of their rollouts, laid out as `rows`; every entry
    accounted. `flat` of them teach nothing."""
    uses = [use for group in groups for use in group.uses(config.max_uses)]
    rollouts = PlannedRollouts(uses, masks=config.truncated == "mask")
    loss_tokens = _trained(rollouts.numbers, config)
    return StepPlan(
        step=step,
        group_ids=tuple(group.group_id for group in groups),
        rollouts=rollouts,
        advantages=np.repeat(advantages, rollouts.sequences),
        plan=rows,
        normalizers=Normalizers(loss_tokens=int(loss_tokens.sum()), rollouts=len(loss_tokens), groups=len(groups)),
        tokens=sum(group.tokens for group in groups),
        closed_by=closed_by,
        adapters=progress,
        flat=flat,
    )
