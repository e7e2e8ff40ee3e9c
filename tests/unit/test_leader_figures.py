"""The leader's figures: sums of what it notes, made when somebody asks."""

from __future__ import annotations

import statistics
from dataclasses import replace

import numpy as np
import pytest
from step_headers import header_of
from store_runs import plan_of

from rlbuffer.batcher.batcher import Batcher
from rlbuffer.config.batcher import BatcherConfig
from rlbuffer.daemon import figures as module
from rlbuffer.daemon.figures import WINDOW, Figures
from rlbuffer.metrics.labels import MOST_ENVS, MOST_REWARDS, OTHER_NAMES
from rlbuffer.metrics.registry import SERVE
from rlbuffer.records.info import GroupInfo
from rlbuffer.records.states import Reason
from rlbuffer.records.step_plan import Drop
from rlbuffer.store.records import PoolEntry
from rlbuffer.testing import make_group

CONFIG = BatcherConfig(64, step_groups=2, budgets={"math": 0.75, "code": 0.25})


def entry_of(info: GroupInfo, number: int = 1, replaces: str = "") -> PoolEntry:
    return PoolEntry(
        entry_id=f"{number}-0",
        info=info,
        payload_key=f"k{number}",
        env=info.env,
        group_id=info.group_id,
        rollouts=len(info.rollouts),
        tokens=info.tokens,
        replaces=replaces,
    )


def leading(batcher: Batcher | None = None) -> Figures:
    figures = Figures()
    figures.published = {"": 3}
    figures.lead(batcher or Batcher(CONFIG), CONFIG)
    return figures


def test_pushes_become_means_spreads_and_shares() -> None:
    figures = leading()
    groups = [
        make_group(env="math", rewards=[0.0, 1.0, 1.0], version=3, seed=0),
        make_group(env="math", rewards=[0.5, 0.5], version=2, seed=1),
    ]
    for number, group in enumerate(groups):
        figures.arrived(entry_of(group.info(), number))
    values = figures.values()
    rewards = [0.0, 1.0, 1.0, 0.5, 0.5]
    assert values["leader"] == 1
    assert values["groups_received_total"] == {"math": 2}
    assert values["tokens_generated_total"] == {"math": sum(r.loss_tokens for g in groups for r in g.info().rollouts)}
    assert values["reward_mean"]["math"]["reward"] == pytest.approx(statistics.fmean(rewards))
    assert values["reward_std"]["math"]["reward"] == pytest.approx(statistics.stdev(rewards))
    assert values["on_policy_ratio"] == {"math": 3 / 5}
    assert values["truncated_ratio"] == {"math": 0}
    assert values["flat_ratio"] == {"math": 1 / 2}
    assert values["prompt_reward"]["math"].as_object()["count"] == 2


def test_what_teaches_is_no_flat_group_and_a_part_of_a_group_is_not_judged() -> None:
    figures = leading()
    flat, own = (make_group(env="math", rewards=[1.0, 1.0], seed=seed) for seed in (0, 1))
    rollouts = [replace(r, columns={"advantages": np.full(r.length, 0.5, np.float32)}) for r in own.rollouts]
    part = make_group(env="math", rewards=[1.0], planned_size=4, seed=2)
    for number, group in enumerate((flat, replace(own, rollouts=rollouts), part)):
        figures.arrived(entry_of(group.info(), number))
    assert figures.values()["flat_ratio"] == {"math": 1 / 2}


def test_a_scored_push_in_the_place_of_another_is_no_second_group() -> None:
    figures = leading()
    bare = make_group(env="math", rewards=[None, None], needs=["reward"], seed=0).info()
    figures.arrived(entry_of(bare))
    assert figures.values()["reward_mean"] == {}
    figures.arrived(entry_of(make_group(env="math", rewards=[0.0, 1.0], seed=0).info(), 2, replaces="1-0"))
    values = figures.values()
    assert values["groups_received_total"] == {"math": 1}
    assert values["reward_mean"]["math"]["reward"] == 0.5


def test_a_step_becomes_ages_lengths_waits_and_shares() -> None:
    batcher = Batcher(CONFIG)
    figures = leading(batcher)
    infos = [make_group(env="math", version=0, seed=n).info() for n in range(3)]
    entries = {f"{n}-0": entry_of(info, n) for n, info in enumerate(infos, 1)}
    for entry_id, entry in entries.items():
        assert entry.info is not None
        batcher.add(entry.info, entry_id=entry_id, now=1.0)
    plan = batcher.next(1, world_size=1, now=1.0, rng=np.random.default_rng(0)).plan
    assert plan is not None
    batcher.committed(plan)
    used = {use.entry_id: entries[use.entry_id] for use in plan.entries}
    envs = {"math": {"rollouts": 8, "tokens": 120, "groups": 2, "reward": 0.5, "age": 0.0, "max_age": 0}}
    figures.dropped([entry_of(make_group(env="math", lengths=[8, 20], seed=9).info())])
    header = header_of(tokens=120, fill=0.75, envs=envs, committed_ms=5001)
    figures.committed(plan, used, header, 0.004)
    values = figures.values()
    assert values["batch_fill_ratio"] == 0.75
    assert not [name for name in values if "padding" in name], "what a step leaves empty is no padding: rows end early"
    assert values["batch_used_ratio"] == {"math": 1.0}
    assert values["budget_ratio"] == {"math": 0.75, "code": 0.25}
    assert values["used_in_batch_ratio"] == {"math": 2 / 3}
    assert values["groups_ready"] == {"math": 1}
    assert values["age_versions"]["math"].as_object()["buckets"]["0.0"] == 8
    assert values["packed_rollout_tokens"]["math"].sum == plan.tokens
    assert values["dropped_rollout_tokens"]["math"].as_object()["buckets"]["16.0"] == 1
    assert values["dropped_rollout_tokens"]["math"].sum == 28
    assert values["wait_seconds"]["math"].as_object()["count"] == 2
    assert values["wait_seconds"]["math"].sum == pytest.approx(10, abs=0.01)
    record = figures.record()
    assert (record["step"], record["frac_used_in_batch"], record["frac_used"]) == (1, {"math": 2 / 3}, {"math": 1.0})
    assert record["age"]["math"]["buckets"]["0.0"] == 8
    assert {f"buffer/{name}" for name in record} - {"buffer/step"} <= {m.record for m in SERVE}


def test_what_came_is_counted_from_step_to_step() -> None:
    figures = leading()
    groups = [make_group(env="math", size=4, seed=n).info() for n in range(5)]
    tokens = [sum(rollout.loss_tokens for rollout in info.rollouts) for info in groups]
    plan = replace(plan_of([entry_of(groups[0])], 1), rollouts=())
    for step, (first, last) in enumerate([(0, 2), (2, 5), (5, 5)], 1):
        for number, info in enumerate(groups[first:last]):
            figures.arrived(entry_of(info, number))
        figures.committed(plan, {}, header_of(step=step), 0.0)
        record = figures.record()
        assert record["step"] == step
        assert record["new_groups"] == {"math": last - first}
        assert record["new_rollouts"] == {"math": 4 * (last - first)}
        assert record["new_generated_tokens"] == {"math": sum(tokens[first:last])}
    figures.lead(None)
    assert figures.record() == {}


def test_names_that_foreign_workers_make_up_stay_few() -> None:
    figures = leading()
    rewards = {f"part {n}": 1.0 for n in range(200)}
    for n in range(100):
        info = make_group(env=f"env{n}", seed=n).info()
        rollouts = tuple(replace(rollout, rewards=rewards) for rollout in info.rollouts)
        figures.arrived(entry_of(replace(info, rollouts=rollouts), n))
        figures.drop(Drop("g", f"env{n}", Reason.FUTURE, 1, 1))
    values = figures.values()
    assert len(values["groups_received_total"]) == MOST_ENVS + 1
    assert values["groups_received_total"][OTHER_NAMES] == 100 - MOST_ENVS
    assert values["groups_dropped_total"][OTHER_NAMES] == {"future": 100 - MOST_ENVS}
    assert len(values["reward_mean"]["env0"]) == MOST_REWARDS + 2  # the whole reward, and all other parts


def test_who_leads_no_more_says_only_that(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = leading()
    info = make_group(env="math").info()
    figures.arrived(entry_of(info))
    figures.lead(None)
    assert figures.values() == {"leader": 0, "groups_dropped_total": {}}
    figures.arrived(entry_of(info, 2))  # a takeover reads what another leader has counted
    figures.lead(Batcher(CONFIG), CONFIG)
    assert figures.values()["groups_received_total"] == {"math": 1}


def test_notes_stay_bounded_while_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_NOTES", 8)
    figures = leading()
    for n in range(2 * WINDOW):
        figures.arrived(entry_of(make_group(env="math", seed=n).info(), n))
        assert len(figures._notes) <= 9
    assert figures.values()["groups_received_total"] == {"math": 2 * WINDOW}
