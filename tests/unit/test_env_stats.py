"""The leader's numbers between two steps: what came, what a step took, what was dropped."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from step_headers import header_of
from store_runs import plan_of

from rlbuffer.batcher.batcher import Batcher
from rlbuffer.config.batcher import BatcherConfig
from rlbuffer.daemon import env_stats
from rlbuffer.daemon.env_stats import MOST_ENVS, MOST_REWARDS, EnvStats
from rlbuffer.records.failure import Failure
from rlbuffer.records.info import GroupInfo
from rlbuffer.records.states import Reason
from rlbuffer.records.step_plan import Drop, PlannedRollouts
from rlbuffer.records.waiting import Problem, Trouble
from rlbuffer.state.metric import said_in
from rlbuffer.state.run_state import EnvState, RunState, buffer_record, env_said
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


class Leading:
    """A leader that has numbers, and steps that take nothing."""

    def __init__(self, batcher: Batcher | None = None) -> None:
        self.stats = EnvStats()
        self.stats.published = {"": 3}
        self._batcher = batcher or Batcher(CONFIG)
        self.stats.lead(self._batcher, CONFIG)
        self._step = self._pushes = 0

    def read(self, *infos: GroupInfo, replaces: str = "") -> None:
        for info in infos:
            self._pushes += 1
            entry = entry_of(info, self._pushes, replaces)
            group = self._batcher.add(info, entry_id=entry.entry_id, now=0.0, replaces=replaces)
            self.stats.arrived(entry, group)

    def step(self) -> EnvState:
        """-> what is known of env math after a step."""
        self._step += 1
        entry = entry_of(make_group(env="math").info())
        plan = replace(plan_of([entry], self._step), rollouts=PlannedRollouts(()))
        self.stats.committed(plan, {}, header_of(step=self._step), 0.0)
        return EnvState(name="math", **env_said(self.stats.envs.get("math")))


def test_pushes_become_means_spreads_and_shares() -> None:
    leading = Leading()
    groups = [
        make_group(env="math", rewards=[0.0, 1.0, 1.0], version=3, seed=0),
        make_group(env="math", rewards=[0.5, 0.5], version=2, seed=1),
    ]
    leading.read(*[group.info() for group in groups])
    env = leading.step()
    rewards = [0.0, 1.0, 1.0, 0.5, 0.5]
    assert (env.groups_received, env.new_groups, env.new_rollouts) == (2, 2, 5)
    assert env.new_generated_tokens == sum(r.loss_tokens for g in groups for r in g.info().rollouts)
    assert env.reward_mean == {"reward": pytest.approx(statistics.fmean(rewards))}
    assert env.reward_std == {"reward": pytest.approx(statistics.stdev(rewards))}
    assert (env.frac_on_policy, env.frac_truncated, env.frac_flat) == (3 / 5, 0, 1 / 2)
    assert (env.prompt_reward["count"], env.prompt_reward["sum"]) == (2, pytest.approx(2 / 3 + 1 / 2))


def test_failed_attempts_are_counted_by_kind_and_their_rewards_are_none() -> None:
    leading = Leading()
    group, every = (make_group(env="math", rewards=[0.0, 1.0, 0.5], version=3, seed=seed) for seed in (0, 1))
    first, *others = group.rollouts
    failed = replace(first, failure=Failure("tool", "away"))
    leading.read(replace(group, rollouts=(failed, *others)).info())
    leading.read(replace(every, rollouts=tuple(replace(r, failure=Failure("timeout")) for r in every.rollouts)).info())
    env = leading.step()
    assert env.rollouts_failed == {"timeout": 3, "tool": 1}
    assert (env.new_groups, env.new_rollouts, env.reward_mean) == (2, 6, {"reward": 0.75})
    assert (env.frac_on_policy, env.frac_flat) == (1, 0)
    assert (env.prompt_reward["count"], env.prompt_reward["sum"]) == (1, 0.75)


def test_what_teaches_is_no_flat_group_and_a_part_of_a_group_is_not_judged() -> None:
    leading = Leading()
    flat, own = (make_group(env="math", rewards=[1.0, 1.0], seed=seed) for seed in (0, 1))
    rollouts = [replace(r, columns={"advantages": np.full(r.length, 0.5, np.float32)}) for r in own.rollouts]
    part = make_group(env="math", rewards=[1.0], planned_size=4, seed=2)
    leading.read(flat.info(), replace(own, rollouts=rollouts).info(), part.info())
    assert leading.step().frac_flat == 1 / 2


def test_a_scored_push_in_the_place_of_another_is_no_second_group() -> None:
    leading = Leading()
    leading.read(make_group(env="math", rewards=[None, None], needs=["reward"], seed=0).info())
    assert leading.step().reward_mean == {}
    leading.read(make_group(env="math", rewards=[0.0, 1.0], seed=0).info(), replaces="1-0")
    env = leading.step()
    assert (env.groups_received, env.new_groups, env.reward_mean) == (1, 0, {"reward": 0.5})


def test_a_step_becomes_ages_lengths_waits_and_shares() -> None:
    batcher = Batcher(CONFIG)
    stats = Leading(batcher).stats
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
    stats.dropped(Reason.FUTURE, [entry_of(make_group(env="math", lengths=[8, 20], seed=9).info())])
    stats.drop(Drop("g", "math", Reason.FUTURE, 1, 1))
    stats.committed(plan, used, header_of(tokens=120, fill=0.75, envs=envs, committed_ms=5001), 0.004)
    run, env = said_in(RunState, stats.run), EnvState(name="math", **env_said(stats.envs["math"]))
    assert (run["batch_fill"], run["stepped_at"], run["batches"]) == (0.75, 5.001, {"groups": 1})
    assert run["build"]["buckets"]["0.005"] == 1
    assert (env.frac_used, env.budget, env.frac_used_in_batch) == (1.0, 0.75, 2 / 3)
    assert stats.envs["code"] == {"budget": 0.25}
    assert env.age["buckets"]["0.0"] == 8
    assert env.packed_tokens["sum"] == plan.tokens
    responses = [r.length - r.prompt_tokens for entry in used.values() if entry.info for r in entry.info.rollouts]
    assert env.batch_response_tokens == pytest.approx(np.mean(responses))
    assert (env.dropped_tokens["buckets"]["16.0"], env.dropped_tokens["sum"]) == (1, 28)
    assert (env.wait["count"], env.wait["sum"]) == (2, pytest.approx(10, abs=0.01))
    assert (env.groups_dropped, env.batch_reward) == ({"future": 1}, 0.5)
    record = buffer_record({"step": 1, "envs": stats.envs})
    assert (record["step"], record["frac_used"], record["budget"]) == (1, {"math": 1.0}, {"math": 0.75, "code": 0.25})
    assert record["age"]["math"]["buckets"]["0.0"] == 8


def test_what_came_is_counted_from_step_to_step_and_by_the_leader_alone() -> None:
    leading = Leading()
    groups = [make_group(env="math", size=4, seed=n).info() for n in range(5)]
    for first, last in ((0, 2), (2, 5), (5, 5)):
        leading.read(*groups[first:last])
        env = leading.step()
        assert (env.new_groups, env.new_rollouts) == (last - first, 4 * (last - first))
    assert env.groups_received == 5
    leading.stats.lead(None)
    leading.read(groups[0])
    assert leading.step() == EnvState(name="math"), "who leads no more has none"


def test_names_that_foreign_workers_make_up_stay_few() -> None:
    leading = Leading()
    rewards = {f"part {n}": 1.0 for n in range(200)}
    for n in range(100):
        info = make_group(env=f"env{n}", seed=n).info()
        leading.read(replace(info, rollouts=tuple(r.changed(rewards=rewards) for r in info.rollouts)))
    leading.step()
    assert len(leading.stats.envs) <= MOST_ENVS + len(CONFIG.budgets)
    assert len(leading.stats.envs["env0"]["reward_mean"]) == MOST_REWARDS + 1


def test_notes_stay_bounded_while_no_step_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env_stats, "MOST_NOTES", 8)
    leading = Leading()
    for n in range(50):
        leading.read(make_group(env="math", seed=n).info())
        assert len(leading.stats._pushes) < 8
    env = leading.step()
    assert (env.groups_received, env.prompt_reward["count"]) == (50, 50)


def test_an_env_that_loses_its_long_groups_is_told_of_and_one_that_loses_some_of_each_is_not() -> None:
    def told(lost: Callable[[int], bool]) -> tuple[EnvState, list[Problem]]:
        """After 120 groups, each tenth of which is ten times as long."""
        leading = Leading()
        lengths = [200 if n % 10 == 0 else 20 for n in range(120)]
        entries = [
            entry_of(make_group(env="math", lengths=[length] * 2, group_id=f"math.{n}").info(), n)
            for n, length in enumerate(lengths)
        ]
        for n, entry in enumerate(entries):
            if lost(n):
                leading.stats.dropped(Reason.STALE, [entry])
        trained = {entry.entry_id: entry for n, entry in enumerate(entries) if not lost(n)}
        plan = replace(plan_of([*trained.values()], 1), rollouts=PlannedRollouts(()))
        leading.stats.committed(plan, trained, header_of(step=1), 0.0)
        return EnvState(name="math", **env_said(leading.stats.envs["math"])), leading.stats.problems

    env, problems = told(lambda n: n % 10 == 0)
    assert (env.length_distance, env.long_trained) == (pytest.approx(0.1), 0.0)
    assert [problem.kind for problem in problems] == [Trouble.LONG_LOST]
    assert "math loses its long rollouts: 0% of the longest tenth" in str(problems[0])
    env, problems = told(lambda n: n % 7 == 0)
    assert (env.length_distance, problems) == (pytest.approx(0.0, abs=0.02), [])


def test_groups_that_are_dropped_for_what_they_hold_say_nothing_of_time() -> None:
    leading = Leading()
    leading.stats.dropped(Reason.FLAT, [entry_of(make_group(env="math", lengths=[200, 200]).info())])
    assert leading.step().length_distance is None
