"""Properties of the batcher whatever is pushed, in whatever order, and whenever it is asked."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pytest
from batcher_calls import pending_tokens
from closed_loop import EnvSpeed, group_info, simulate
from hypothesis import given, settings
from hypothesis import strategies as st

from rlbuffer.batcher.batcher import Batcher
from rlbuffer.config.batcher import BatcherConfig
from rlbuffer.records.info import GroupInfo
from rlbuffer.records.step_plan import Decision, StepPlan

RNG = np.random.default_rng(0)

# -- fairness ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", ["tokens", "rollouts", "groups"])
@pytest.mark.parametrize("seed", range(3))
def test_shares_hold_within_one_group_over_200_random_steps(unit: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    fractions = np.maximum(rng.dirichlet(np.ones(int(rng.integers(2, 6)))), 0.02)
    fractions /= fractions.sum()
    budgets = {f"e{i}": float(f) * 0.999999 for i, f in enumerate(fractions)}
    config = BatcherConfig(
        row_tokens=1000,
        step_groups=0,
        micro_batches_per_rank=int(rng.integers(1, 5)),
        budgets=budgets,
        unit=unit,  # type: ignore[arg-type]
        max_age=10**6,
    )
    batcher = Batcher(config)
    sizes: dict[str, int] = {}
    given_by = dict.fromkeys(budgets, 0)
    for step in range(1, 201):
        for env in budgets:
            while pending_tokens(batcher, env) < 12_000:
                name = f"{env}.{len(sizes)}"
                lengths = rng.integers(1, 600, int(rng.integers(1, 5)))
                sizes[name] = {"tokens": int(lengths.sum()), "rollouts": len(lengths), "groups": 1}[unit]
                batcher.add(group_info(name, env, lengths), entry_id=name, now=0.0)
        plan = batcher.next(step, world_size=2, now=0.0, rng=rng).plan
        assert plan is not None
        for group_id in plan.group_ids:
            given_by[group_id.split(".")[0]] += sizes[group_id]
        batcher.committed(plan)
        total = sum(given_by.values())
        for env, fraction in zip(budgets, fractions, strict=True):
            assert abs(given_by[env] - fraction * total) <= max(sizes.values()) * 1.001


# -- conservation and determinism --------------------------------------------------------------------------------------

PUSHES = st.lists(
    st.tuples(
        st.sampled_from(["add"] * 12 + ["ask"] * 6 + ["wait", "wait", "gone", "publish", "pause", "resume"]),
        st.integers(0, 11),
        st.lists(st.integers(1, 130), min_size=1, max_size=4),
        st.integers(0, 5),
        st.integers(0, 4),
    ),
    max_size=80,
)
CONFIGS = st.builds(
    BatcherConfig,
    row_tokens=st.just(100),
    micro_batches_per_rank=st.integers(1, 2),
    step_groups=st.sampled_from([0, 0, 2]),
    max_age=st.integers(0, 3),
    min_group_size=st.integers(1, 4),
    max_age_seconds=st.sampled_from([None, 150.0]),
    flat=st.sampled_from(["keep", "drop"]),
    order=st.sampled_from(["newest_first", "oldest_first"]),
    budgets=st.sampled_from([{}, {"e0": 0.5}, {"e0": 0.6, "e1": 0.4}]),
    unit=st.sampled_from(["tokens", "rollouts", "groups"]),
)

RULES = st.builds(
    BatcherConfig,
    row_tokens=st.just(100),
    micro_batches_per_rank=st.integers(1, 2),
    step_groups=st.sampled_from([0, 2]),
    max_age=st.integers(0, 3),
    min_group_size=st.integers(1, 2),
    max_age_seconds=st.sampled_from([None, 150.0]),
    flat=st.sampled_from(["keep", "drop", 0.0, 0.5]),
    order=st.sampled_from(["newest_first", "priority"]),
    budgets=st.sampled_from([{}, {"e0": 0.5}, {"e0": 0.6, "e1": 0.4}, {"e0": [[1, 0.9], [4, 0.0]]}]),
    spillover=st.sampled_from(["block", "borrow", "partial"]),
    on_dead_env=st.sampled_from(["wait", "borrow"]),
    max_uses=st.integers(1, 3),
    replay_fraction=st.sampled_from([0.0, 0.5, 1.0]),
)
"""Rules about short envs, flat groups and used ones."""


class Account:
    """The store's side: what is in the pool, and where everything else went."""

    def __init__(self) -> None:
        self.pool: dict[str, GroupInfo] = {}
        self.kept: dict[str, tuple[GroupInfo, int]] = {}
        """Entries that were trained and may be again, and how often they were."""
        self.pushed = np.zeros(2, int)
        self.packed = np.zeros(2, int)
        self.dropped = np.zeros(2, int)
        self.lost = np.zeros(2, int)
        self.trained: Counter[str] = Counter()

    @staticmethod
    def size(info: GroupInfo) -> Any:
        return np.array([len(info.rollouts), info.tokens])

    def push(self, entry_id: str, info: GroupInfo) -> None:
        self.pool[entry_id] = info
        self.pushed += self.size(info)

    def drop(self, decision: Decision) -> None:
        for drop in decision.drops:
            if any(e in self.kept for e in drop.entry_ids):
                assert (drop.rollouts, drop.tokens) == (0, 0)
                for entry_id in drop.entry_ids:
                    del self.kept[entry_id]
                continue
            held = sum((self.size(self.pool.pop(e)) for e in drop.entry_ids), np.zeros(2, int))
            assert (drop.rollouts, drop.tokens) == tuple(held)
            assert drop.detail
            self.dropped += held

    def commit(self, plan: StepPlan, config: BatcherConfig) -> None:
        for use in plan.entries:
            assert use.is_kept == (use.uses + 1 < config.max_uses)
            if use.uses:
                info, uses = self.kept.pop(use.entry_id)
                assert (uses, use.dropped) == (use.uses, ())
            else:
                info = self.pool.pop(use.entry_id)
            if use.is_kept:
                self.kept[use.entry_id] = (info, use.uses + 1)
            if use.uses:
                continue
            dropped = sum((np.array(d[1:]) for d in use.dropped), np.zeros(2, int))
            packed = np.array([use.packed_rollouts, use.packed_tokens])
            assert tuple(packed + dropped) == tuple(self.size(info))
            self.packed += packed
            self.dropped += dropped
            for ref in plan.rollouts:
                if ref.entry_id == use.entry_id:
                    its = info.rollouts[ref.index]
                    assert (its.rollout_id, its.failure) == (ref.rollout_id, "")
        assert sum(u.packed_rollouts for u in plan.entries) == len(plan.rollouts)
        for ref in plan.rollouts:
            assert 0 <= plan.step - 1 - ref.min_version <= config.max_age
            self.trained[ref.rollout_id] += 1
        assert max(self.trained.values()) <= config.max_uses
        assert len({ref.rollout_id for ref in plan.rollouts}) == len(plan.rollouts)
        placed = sorted(i for micro_step in plan.plan.rows for rank in micro_step for row in rank for i in row)
        assert placed == list(range(len(plan.rollouts)))

    def check(self) -> None:
        pending = sum((self.size(info) for info in self.pool.values()), np.zeros(2, int))
        assert tuple(self.pushed) == tuple(pending + self.packed + self.dropped + self.lost)


def play(config: BatcherConfig, moves: list[Any], account: Account) -> list[bytes]:
    """Plays the moves against a batcher and an account; -> each decision as bytes."""
    batcher, step, now, said = Batcher(config), 1, 0.0, []
    paused: set[str] = set()
    for number, (kind, which, lengths, first, version) in enumerate(moves):
        if kind == "add":
            info = group_info(f"g{which}", f"e{which % 2}", lengths, version, planned_size=4, first=first)
            if (which + first) % 3 == 0:
                *others, last = info.rollouts
                info = replace(info, rollouts=(*others, last.changed(failure="tool", reward=None)))
            account.push(f"{number}-0", info)
            batcher.add(info, entry_id=f"{number}-0", now=now)
        elif kind == "wait":
            now += 100.0
        elif kind == "publish":
            batcher.set_published(min(version, step - 1))
        elif kind == "pause":
            batcher.pause(f"e{which % 2}")
            paused.add(f"e{which % 2}")
        elif kind == "resume":
            batcher.resume(f"e{which % 2}")
            paused.discard(f"e{which % 2}")
        elif kind == "gone" and (account.pool or account.kept):
            there = sorted([*account.pool, *account.kept])
            entry_id = there[which % len(there)]
            if entry_id in account.pool:
                account.lost += account.size(account.pool.pop(entry_id))
            else:
                del account.kept[entry_id]
            batcher.remove(entry_id)
        elif kind == "ask":
            decision = batcher.next(step, world_size=2, now=now, rng=RNG)
            plan = decision.plan
            said.append(
                msgpack.packb(
                    [
                        None if plan is None else [plan.group_ids, plan.plan.rows, plan.advantages.tolist()],
                        dict(decision.state),
                        [[d.group_id, d.reason, d.entry_ids, d.detail] for d in decision.drops],
                        decision.waiting,
                        dict(decision.allowances),
                    ]
                )
            )
            assert (plan is None) == bool(decision.waiting)
            assert all(decision.allowances.get(env) == 0 for env in paused)
            assert plan is None or paused.isdisjoint(ref.env for ref in plan.rollouts)
            account.drop(decision)
            batcher.dropped(decision.drops)
            if plan is not None:
                account.commit(plan, config)
                batcher.committed(plan)
                step += 1
        account.check()
    return said


PARTS = st.lists(
    st.fixed_dictionaries(
        {
            "group": st.integers(0, 2),
            "first": st.integers(0, 3),
            "size": st.sampled_from([1, 1, 4]),
            "seconds": st.floats(0.0, 40.0),
            "look": st.none() | st.floats(0.0, 1.0),
            "ago": st.just(0.0) | st.floats(0.0, 60.0),
        }
    ),
    max_size=12,
)
"""Parts of groups: seconds after the one before, where in this time somebody looks, and how long before a scorer's push
its rollouts came (0: no scorer pushed it)."""


@given(parts=PARTS)
@settings(max_examples=400, deadline=None)
def test_what_groups_hold_and_their_order_do_not_depend_on_when_somebody_looked(parts: Any) -> None:
    assert played(parts, has_looks=True) == played(parts, has_looks=False)


def played(parts: list[Any], *, has_looks: bool) -> Any:
    """What is dropped of these parts, the tokens that are pending in the end, and the groups of the next step."""
    config = BatcherConfig(row_tokens=256, step_groups=2, group_timeout_seconds=50.0, min_group_size=2, max_age=0)
    batcher, now, drops = Batcher(config), 100.0, list[Any]()

    def look(at: float) -> tuple[str, ...]:
        decision = batcher.next(1, world_size=1, now=at, rng=RNG)
        batcher.dropped(decision.drops)
        drops.extend((drop.group_id, drop.reason, drop.entry_ids, drop.detail) for drop in decision.drops)
        return decision.plan.group_ids if decision.plan is not None else ()

    for number, part in enumerate(parts):
        if has_looks and part["look"] is not None:
            look(now + part["look"] * part["seconds"])
        now += part["seconds"]
        info = group_info(f"g{part['group']}", "e", [10] * part["size"], planned_size=4, first=part["first"])
        first = now - part["ago"]
        replaces = f"{number}-1" if part["ago"] else ""
        batcher.add(info, entry_id=f"{number}-2", now=first, pushed=first, replaces=replaces, came=now)
    group_ids = look(now)
    assert all(group.since + 50.0 > now for env in batcher.pools.values() for group in env.forming.values())
    return sorted(drops), pending_tokens(batcher, "e"), group_ids


@given(config=CONFIGS | RULES, moves=PUSHES)
@settings(max_examples=80, deadline=None)
def test_every_rollout_is_pending_packed_or_dropped_and_never_two_of_them(config: BatcherConfig, moves: Any) -> None:
    account = Account()
    play(config, moves, account)
    # The rest is still known: closing everything down drops exactly that.
    batcher_left = set(account.pool)
    batcher = Batcher(config)
    for entry_id in sorted(batcher_left):
        batcher.add(account.pool[entry_id], entry_id=entry_id, now=0.0)
    decision = batcher.next(1000, world_size=2, now=1e9, rng=RNG)
    account.drop(decision)
    account.check()
    assert not account.pool


@given(config=CONFIGS | RULES, moves=PUSHES)
@settings(max_examples=40, deadline=None)
def test_the_same_calls_give_the_same_decisions(config: BatcherConfig, moves: Any) -> None:
    assert play(config, moves, Account()) == play(config, moves, Account())


@given(
    config=CONFIGS.filter(lambda c: c.max_age_seconds is None),
    lengths=st.lists(st.lists(st.integers(1, 100), min_size=4, max_size=4), min_size=8, max_size=40),
    cut=st.integers(0, 12),
)
@settings(max_examples=80, deadline=None)
def test_a_restart_from_the_saved_state_goes_on_with_the_same_bytes(
    config: BatcherConfig, lengths: list[list[int]], cut: int
) -> None:
    infos = {f"{n}-0": group_info(f"g{n}", f"e{n % 2}", sizes, n // 6) for n, sizes in enumerate(lengths)}

    def run(restart_at: int) -> list[bytes]:
        batcher, pool, closed, said = Batcher(config), {}, [], []
        state, step = None, 1
        for number, (entry_id, info) in enumerate(infos.items()):
            if number == restart_at:
                batcher = Batcher(config, msgpack.unpackb(msgpack.packb(state)))
                batcher.close(closed)
                for pending, old in pool.items():
                    batcher.add(old, entry_id=pending, now=0.0)
            pool[entry_id] = info
            batcher.add(info, entry_id=entry_id, now=0.0)
            decision = batcher.next(step, world_size=2, now=0.0, rng=RNG)
            plan = decision.plan
            groups = None if plan is None else [plan.group_ids, plan.plan.rows, plan.advantages.tobytes()]
            said.append(msgpack.packb([groups, dict(decision.state), dict(decision.allowances)]))
            batcher.dropped(decision.drops)
            gone = [e for d in decision.drops for e in d.entry_ids]
            if plan is not None:
                batcher.committed(plan)
                state, step = dict(decision.state), step + 1
                gone += [use.entry_id for use in plan.entries]
            for old_id in gone:
                closed.append(pool.pop(old_id).group_id)
        return said

    # An env of which nothing was trained and nothing is pending is no longer known after a restart, so its allowance
    # may differ; with budgets for both that cannot happen. The sentence may: it names the last drop, and that is lost.
    if len(config.budgets) == 2:
        assert run(cut) == run(-1)


# -- the closed loop ---------------------------------------------------------------------------------------------------

FAST_AND_SLOW = {
    "a": EnvSpeed(seconds=2, workers=8),
    "b": EnvSpeed(seconds=8, workers=6, length=200, size=8),
    "c": EnvSpeed(seconds=0.5, workers=2, length=30),
}
SIZES: dict[str, dict[str, Any]] = {
    "rows": {"micro_batches_per_rank": 3, "step_groups": 0},
    "groups": {"step_groups": 16},
    "rollouts": {"step_rollouts": 64},
}


BUDGETS: list[dict[str, float]] = [{}, {"a": 0.5, "b": 0.3, "c": 0.2}, {"b": 0.5}]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("max_age", [0, 1, 2])
def test_workers_and_trainer_never_wait_for_each_other_for_ever(size: str, lookahead: int, max_age: int) -> None:
    budgets = BUDGETS[(max_age + list(SIZES).index(size)) % 3]  # each pair of values of two settings
    config = BatcherConfig(row_tokens=2048, max_age=max_age, lookahead=lookahead, budgets=budgets, **SIZES[size])
    outcome = simulate(config, FAST_AND_SLOW, steps=15, train_seconds=2.0)
    assert outcome.stuck == ""
    assert outcome.steps == 15
    assert outcome.oldest <= max_age
    assert set(outcome.dropped) <= {"stale"}


@given(
    seed=st.integers(0, 10_000),
    speeds=st.lists(
        st.builds(
            EnvSpeed,
            seconds=st.floats(0.1, 30),
            workers=st.integers(1, 6),
            size=st.integers(1, 8),
            length=st.integers(100, 900),
        ),
        min_size=1,
        max_size=3,
    ),
    size=st.sampled_from(list(SIZES)),
    max_age=st.integers(0, 2),
    lookahead=st.integers(0, 1),
    remainder=st.sampled_from(["proportional", "equal", "e0"]),
    share=st.floats(0.05, 0.9),
    loss=st.sampled_from([0.0, 0.1]),
)
@settings(max_examples=10, deadline=None)
def test_no_mix_of_speeds_and_settings_deadlocks(
    seed: int,
    speeds: list[EnvSpeed],
    size: str,
    max_age: int,
    lookahead: int,
    remainder: str,
    share: float,
    loss: float,
) -> None:
    envs = {f"e{i}": speed for i, speed in enumerate(speeds)}
    config = BatcherConfig(
        row_tokens=1024,
        max_age=max_age,
        lookahead=lookahead,
        remainder=remainder,
        budgets={"e0": share},
        **SIZES[size],
    )
    outcome = simulate(config, envs, steps=4, seed=seed, loss=loss, spread=1.0)
    assert (outcome.stuck, outcome.steps) == ("", 4)


@pytest.mark.parametrize(
    ("order", "max_age", "least", "most"),
    [("newest_first", 0, 0, 0.1), ("newest_first", 1, 1, 20), ("newest_first", 2, 0, 20), ("oldest_first", 2, 0, 15)],
)
def test_the_window_throws_little_away(order: Any, max_age: int, least: float, most: float) -> None:
    config = BatcherConfig(row_tokens=8192, max_age=max_age, step_groups=32, order=order)
    outcome = simulate(config, {"a": EnvSpeed(seconds=4, workers=32)}, steps=30, train_seconds=2.0)
    assert outcome.stuck == ""
    assert least <= outcome.stale_percent <= most


@pytest.mark.parametrize(("order", "max_age"), [("newest_first", 0), ("oldest_first", 1), ("newest_first", 2)])
def test_the_env_that_others_wait_for_does_not_make_them_waste_their_work(order: Any, max_age: int) -> None:
    config = BatcherConfig(4096, step_groups=0, max_age=max_age, budgets={"fast": 0.7, "slow": 0.3}, order=order)
    envs = {
        "fast": EnvSpeed(seconds=1, workers=16, size=16, length=20),
        "slow": EnvSpeed(seconds=2, workers=8, size=16, length=12),
    }
    outcome = simulate(config, envs, steps=50)
    assert outcome.stuck == ""
    assert outcome.tokens["fast"] / outcome.tokens.total() == pytest.approx(0.7, abs=0.01)
    assert outcome.stale_percent <= 13


@settings(max_examples=120, deadline=None)
@given(RULES, PUSHES, st.integers(1, 3))
def test_no_step_is_made_while_too_few_groups_are_ready(config: BatcherConfig, pushes: Any, world_size: int) -> None:
    batcher, step = Batcher(replace(config, spillover="block", max_age_seconds=None)), 1
    for number, (action, name, lengths, env, _) in enumerate(pushes):
        if action in ("ask", "publish"):
            lacks = batcher.lacks_groups(world_size)
            plan = batcher.next(step, world_size=world_size, now=0.0, rng=RNG).plan
            assert plan is None or not lacks
            if plan is not None:
                batcher.committed(plan)
                step += 1
        else:
            adapter = "x" if name % 4 == 0 else ""
            info = replace(group_info(f"g{number}", f"e{env % 2}", np.array(lengths)), adapter=adapter)
            batcher.add(info, entry_id=f"{number}-0", now=0.0)
