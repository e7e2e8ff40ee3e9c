"""Properties of adapters whatever their speeds and sizes: turns are fair, own steps exact, takeovers invisible."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgpack
import numpy as np
import pytest
from closed_loop import group_info
from hypothesis import given, settings
from hypothesis import strategies as st

from rlbuffer.batcher.batcher import Batcher
from rlbuffer.config.batcher import AdapterConfig, BatcherConfig
from rlbuffer.records.info import GroupInfo

RNG = np.random.default_rng(0)
NAMES = ("", "x", "y", "z")


def size_of(unit: str, lengths: Any) -> int:
    return {"tokens": int(np.sum(lengths)), "rollouts": len(lengths), "groups": 1}[unit]


@pytest.mark.parametrize("unit", ["tokens", "rollouts", "groups"])
@pytest.mark.parametrize("seed", range(2))
def test_adapters_with_supply_are_never_more_than_one_group_apart(unit: str, seed: int) -> None:
    """Two envs, three adapters of unequal sizes that always have groups ready, over 60 steps."""
    rng = np.random.default_rng(seed)
    scale = {name: int(rng.integers(20, 200)) for name in NAMES[1:]}
    members = {name: int(rng.integers(1, 6)) for name in NAMES[1:]}
    config = BatcherConfig(
        row_tokens=200,
        step_groups=0,
        micro_batches_per_rank=int(rng.integers(1, 4)),
        rows_per_micro_batch=2,
        budgets={"a": 0.6, "b": 0.4},
        unit=unit,  # type: ignore[arg-type]
        max_age=10**6,
    )
    batcher, given_by = Batcher(config), Counter[tuple[str, str]]()
    sizes: dict[str, int] = {}
    tokens: dict[str, int] = {}
    pending = Counter[tuple[str, str]]()
    for step in range(1, 61):
        for env in ("a", "b"):
            for name in NAMES[1:]:
                while pending[env, name] < 3000:  # tokens: more than a step holds
                    group_id = f"{env}.{name}.{len(sizes)}"
                    lengths = rng.integers(1, scale[name] + 1, members[name])
                    sizes[group_id] = size_of(unit, lengths)
                    batcher.add(group_info(group_id, env, lengths, adapter=name), entry_id=group_id, now=0.0)
                    pending[env, name] += int(lengths.sum())
                    tokens[group_id] = int(lengths.sum())
        plan = batcher.next(step, world_size=2, now=0.0, rng=rng).plan
        assert plan is not None
        for group_id in plan.group_ids:
            env, name, _ = group_id.split(".")
            given_by[env, name] += sizes[group_id]
            pending[env, name] -= tokens[group_id]
        batcher.committed(plan)
        for env in ("a", "b"):
            shares = [given_by[env, name] for name in NAMES[1:]]
            assert max(shares) - min(shares) <= max(sizes.values())


@given(
    seed=st.integers(0, 2**32 - 1),
    speeds=st.lists(st.integers(0, 9), min_size=3, max_size=3),
    unit=st.sampled_from(["tokens", "rollouts", "groups"]),
)
@settings(max_examples=25, deadline=None)
def test_at_unequal_speeds_the_faster_adapter_is_ahead_only_while_the_other_has_nothing(
    seed: int, speeds: list[int], unit: Any
) -> None:
    """Over every stretch of steps in which two adapters both had groups left, they are within two groups of each other:
    the stretch may begin with one of them a group ahead. And an adapter without supply holds nobody up."""
    rng = np.random.default_rng(seed)
    config = BatcherConfig(row_tokens=100, step_groups=3, unit=unit, max_age=10**6)
    batcher = Batcher(config)
    sizes: dict[str, int] = {}
    waiting = dict.fromkeys(NAMES[1:], 0)
    ahead: dict[tuple[str, str], list[int]] = {}
    for step in range(1, 31):
        for name, speed in zip(NAMES[1:], speeds, strict=True):
            for _ in range(int(rng.poisson(speed / 2))):
                group_id = f"{name}.{len(sizes)}"
                lengths = rng.integers(1, 90, int(rng.integers(1, 4)))
                sizes[group_id] = size_of(unit, lengths)
                batcher.add(group_info(group_id, "a", lengths, adapter=name), entry_id=group_id, now=0.0)
                waiting[name] += 1
        plan = batcher.next(step, world_size=2, now=0.0, rng=rng).plan
        assert (plan is not None) == (sum(waiting.values()) >= 3)
        if plan is None:
            return
        batcher.committed(plan)
        largest = max(sizes.values())
        got = Counter[str]()
        for group_id in plan.group_ids:
            got[group_id.split(".")[0]] += sizes[group_id]
            waiting[group_id.split(".")[0]] -= 1
        for one in NAMES[1:]:
            for other in NAMES[1:]:
                stretch = ahead.setdefault((one, other), [])
                if not waiting[one] or not waiting[other]:
                    stretch.clear()
                    continue
                stretch.append(got[one] - got[other])
                for start in range(len(stretch)):
                    assert abs(sum(stretch[start + 1 :])) <= 2 * largest


ADAPTED = st.builds(
    BatcherConfig,
    row_tokens=st.just(100),
    micro_batches_per_rank=st.integers(1, 2),
    step_groups=st.sampled_from([0, 0, 2, 3]),
    max_age=st.integers(0, 2),
    budgets=st.sampled_from([{"e0": 0.5, "e1": 0.5}, {"e0": 0.7, "e1": 0.3}]),
    unit=st.sampled_from(["tokens", "rollouts", "groups"]),
    order=st.sampled_from(["newest_first", "oldest_first"]),
    max_uses=st.integers(1, 2),
    adapters=st.integers(1, 12).map(
        lambda size: {"x": AdapterConfig(batch_size=5), "y": AdapterConfig(batch_size=size)}
    ),
)
ARRIVALS = st.lists(
    st.tuples(st.sampled_from(NAMES), st.integers(0, 1), st.lists(st.integers(1, 100), min_size=1, max_size=4)),
    min_size=6,
    max_size=40,
)


def follow(config: BatcherConfig, arrivals: list[Any], restarts: set[int]) -> list[bytes]:
    """A run whose workers sample what is published at once and whose trainer publishes at once; -> what was decided.

    At each of `restarts` another batcher takes over, from the last committed state and what is pending.
    """
    batcher, said = Batcher(config), []
    state: Any = None
    step = 1
    pool: dict[str, GroupInfo] = {}
    kept: dict[str, tuple[GroupInfo, int]] = {}
    closed: list[str] = []
    own = dict.fromkeys(NAMES, 0)
    gathered = Counter[str]()
    totals, tokens = Counter[str](), Counter[str]()
    for number, (name, env, lengths) in enumerate(arrivals):
        if number in restarts:
            batcher = Batcher(config, msgpack.unpackb(msgpack.packb(state)))
            batcher.close(closed)
            for entry_id, (info, uses) in kept.items():
                batcher.restore([(entry_id, info)], uses=uses, now=0.0)
            for entry_id, info in pool.items():
                batcher.add(info, entry_id=entry_id, now=0.0)
        for adapter in NAMES:
            batcher.set_published(own[adapter], adapter)
        pool[f"{number}"] = group_info(f"g{number}", f"e{env}", lengths, own[name], adapter=name)
        batcher.add(pool[f"{number}"], entry_id=f"{number}", now=0.0)
        while True:
            decision = batcher.next(step, world_size=2, now=0.0, rng=RNG)
            for drop in decision.drops:
                for entry_id in drop.entry_ids:
                    closed.append(f"g{entry_id}")
                    pool.pop(entry_id, None)
                    kept.pop(entry_id, None)
            batcher.dropped(decision.drops)
            plan = decision.plan
            progress = {} if plan is None else {a: [p.samples, p.step, p.version] for a, p in plan.adapters.items()}
            rows = None if plan is None else [plan.group_ids, plan.plan.rows, plan.advantages.tobytes()]
            # Tickets are left out: which adapters an env was sent of which nothing was trained is not remembered.
            said.append(msgpack.packb([rows, progress, dict(decision.state)]))
            if plan is None:
                break
            batcher.committed(plan)
            state = decision.state
            for ref in plan.rollouts:
                # The age rule, in the adapter's own count, recomputed from outside.
                assert 0 <= own[ref.adapter] - ref.min_version <= config.max_age
                gathered[ref.adapter] += 1
                totals[ref.adapter] += 1
                tokens[ref.adapter] += ref.length
            for use in plan.entries:
                info, uses = kept.pop(use.entry_id, (pool.pop(use.entry_id, None), 0))
                assert info is not None
                if use.is_kept:
                    kept[use.entry_id] = info, uses + 1
                closed.append(use.info.group_id)
            for rows_of_step in plan.plan.rows:
                for rank in rows_of_step:
                    assert all(len({plan.rollouts[i].adapter for i in row}) <= 1 for row in rank)
            own[""] = step
            for name in NAMES[1:]:
                told = plan.adapters.get(name)
                is_ready = gathered[name] >= config.batch_size(name)
                if told is not None:
                    assert (told.ready_to_update, told.gathered) == (is_ready, gathered[name])
                    assert (told.samples, told.tokens) == (totals[name], tokens[name])
                if is_ready:
                    own[name] += 1
                    gathered[name] = 0
                    assert told is not None
                assert told is None or told.step == own[name]
            step += 1
            for adapter in NAMES:
                batcher.set_published(own[adapter], adapter)
    return said


@given(config=ADAPTED, arrivals=ARRIVALS, restarts=st.sets(st.integers(1, 39), max_size=4))
@settings(max_examples=60, deadline=None)
def test_takeovers_change_nothing_and_own_steps_are_exact(
    config: BatcherConfig, arrivals: list[Any], restarts: set[int]
) -> None:
    through = follow(config, arrivals, set())
    if config.max_uses == 1:  # a takeover reads used groups in another order than they were used
        assert follow(config, arrivals, restarts) == through
