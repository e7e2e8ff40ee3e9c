"""Priorities: the built-in one, the user's own selector, and the index behind them."""

from __future__ import annotations

import sys
from types import ModuleType

import numpy as np
import pytest
from batcher_calls import ask, batcher, drops_of, put

from rlbuffer.batcher.group import PooledGroup
from rlbuffer.batcher.ordering import PriorityIndex
from rlbuffer.errors import ConfigError
from rlbuffer.testing import make_group


@pytest.fixture
def selectors(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("selectors_of_a_test")
    monkeypatch.setitem(sys.modules, "selectors_of_a_test", module)
    return module


def order_of(made, steps):
    out = []
    for step in range(1, steps + 1):
        decision = ask(made, step)
        made.committed(decision.plan)
        out += decision.plan.group_ids
    return out


def test_priority_takes_the_largest_variance_in_reward_first():
    made = batcher(step_groups=1, order="priority", max_age=9)
    for name, rewards in {"never": [0, 0, 0, 0], "half": [0, 1, 0, 1], "once": [0, 0, 0, 1]}.items():
        put(made, name, rewards=[float(r) for r in rewards])
    assert order_of(made, 3) == ["half", "once", "never"]


def test_of_equal_priority_the_newer_version_goes_first_and_then_whoever_was_ready_first():
    made = batcher(step_groups=1, order="priority", max_age=9)
    for name, version in (("old", 0), ("first", 1), ("second", 1)):
        put(made, name, version=version)
    made.set_published(1)
    ids = [ask(made, 2).plan.group_ids]
    for step in (3, 4):
        made.committed(ask(made, step - 1).plan)
        ids.append(ask(made, step).plan.group_ids)
    assert ids == [("first",), ("second",), ("old",)]


def test_what_is_too_old_is_swept_whatever_its_priority():
    made = batcher(step_groups=1, order="priority")
    put(made, "old")
    put(made, "new", version=2, rewards=[1.0] * 4)
    decision = ask(made, 3)
    assert decision.plan.group_ids == ("new",)
    assert drops_of(decision) == [("old", "stale", "age 2 > max_age 1 at step 3", 4, 100)]


def test_the_users_own_selector_sees_each_group_once_and_decides_the_order(selectors):
    seen = []

    def shortest(group, rng):
        seen.append((group.group_id, group.env, group.lengths, group.rewards, group.min_policy_version, group.uses))
        return -sum(group.lengths)

    selectors.shortest = shortest
    made = batcher(step_groups=1, order="selectors_of_a_test:shortest", max_age=9)
    put(made, "long", lengths=(30, 30))
    put(made, "short", lengths=(10, 10))
    put(made, "middle", lengths=(20, 20))
    assert order_of(made, 3) == ["short", "middle", "long"]
    assert seen[0] == ("long", "a", (30, 30), (0.0, 1.0), 0, 0)
    assert [s[0] for s in seen] == ["long", "short", "middle"]


def test_a_selector_may_draw_from_the_generator_it_is_given(selectors):
    selectors.lottery = lambda group, rng: rng.random()
    orders = []
    for _ in range(2):
        made = batcher(step_groups=4, order="selectors_of_a_test:lottery")
        for n in range(8):
            put(made, f"g{n}")
        orders.append(made.next(1, world_size=1, now=0.0, rng=np.random.default_rng(7)).plan.group_ids)
    assert orders[0] == orders[1] != tuple(f"g{n}" for n in range(4))


def test_a_selector_may_be_a_class(selectors):
    class Newest:
        def __call__(self, group, rng):
            return group.max_policy_version

    selectors.Newest = Newest
    assert batcher(step_groups=1, order="selectors_of_a_test:Newest") is not None


@pytest.mark.parametrize("name", ["no_such_module:x", *(f"selectors_of_a_test:{n}" for n in ("x", "number", "Broken"))])
def test_a_selector_that_cannot_be_used_is_refused_at_start(selectors, name):
    class Broken:
        def __init__(self):
            raise ValueError("no")

    selectors.number, selectors.Broken = 7, Broken
    with pytest.raises(ConfigError, match=f"^batcher.order = '{name}'") as caught:
        batcher(order=name)
    assert caught.value.setting == "batcher.order"


@pytest.mark.parametrize("answer", [lambda g, rng: 1 / 0, lambda g, rng: sys.exit(3), lambda g, rng: "high"])
def test_a_selector_that_fails_stops_the_batcher_with_its_name(selectors, answer):
    selectors.bad = answer
    made = batcher(order="selectors_of_a_test:bad")
    put(made, "g")
    with pytest.raises(ConfigError, match=r"^batcher.order = 'selectors_of_a_test:bad' failed for group g") as caught:
        ask(made)
    assert f"({__file__}:" in str(caught.value)


@pytest.mark.parametrize(
    ("answer", "number"), [(float("nan"), "nan"), (float("-inf"), "-inf"), (10**400, "inf"), (-(10**400), "-inf")]
)
def test_a_group_without_a_place_in_the_order_is_dropped_and_others_train(selectors, answer, number):
    selectors.odd = lambda g, rng: answer if g.group_id == "bad" else 1e300
    made = batcher(step_groups=1, order="selectors_of_a_test:odd")
    put(made, "bad")
    put(made, "good")
    decision = ask(made)
    assert decision.plan.group_ids == ("good",)
    why = f"batcher.order = 'selectors_of_a_test:odd' gave {number} for this group: it must be a finite number"
    assert drops_of(decision) == [("bad", "invalid", why, 4, 100)]


def state(name: str, version: int = 0) -> PooledGroup:
    info = make_group(group_id=name, version=version).info()
    made = PooledGroup(info, 0.0)
    made.take("e", info, 10_000)
    return made


def test_walking_and_discarding_in_any_order_agrees_with_sorting():
    rng = np.random.default_rng(3)
    index = PriorityIndex()
    here: dict[str, tuple[float, int, int, PooledGroup]] = {}
    for n in range(600):
        group, priority = state(f"g{n}", int(rng.integers(4))), float(rng.integers(5))
        index.add(group, priority)
        here[group.group_id] = (-priority, -group.min_version, n, group)
        if rng.random() < 0.7:
            gone = list(here)[int(rng.integers(len(here)))]
            index.discard(here.pop(gone)[3])
            index.discard(state("stranger"))
        if n % 50 == 0:
            wanted = [entry[3].group_id for entry in sorted(here.values(), key=lambda e: e[:3]) if -entry[1] >= 1]
            assert [g.group_id for g in index.walk(oldest=1)] == wanted
    assert len(index) == len(here)
    assert len(index._heap) <= 2 * len(here) + 65
