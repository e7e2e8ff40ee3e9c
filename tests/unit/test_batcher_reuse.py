"""Groups that more than one step trains: `max_uses` and `replay_fraction`."""

from __future__ import annotations

import pytest
from batcher_calls import ask, batcher, drops_of, put

from rlbuffer.testing import make_group

TWICE = {"max_uses": 2, "max_age": 9, "step_groups": 2}


def train(made, step, **asked):
    plan = ask(made, step, **asked).plan
    made.committed(plan)
    return plan


def test_a_group_is_trained_as_often_as_max_uses_allows_and_not_twice_in_a_step():
    made = batcher(**(TWICE | {"max_uses": 3, "step_groups": 1, "replay_fraction": 1.0}))
    put(made, "g")
    plans = [train(made, step) for step in (1, 2, 3)]
    assert [p.group_ids for p in plans] == [("g",)] * 3
    assert [[(e.uses, e.is_kept) for e in p.entries] for p in plans] == [[(0, True)], [(1, True)], [(2, False)]]
    assert ask(made, 4).plan is None


def test_one_group_alone_never_fills_a_step_of_two():
    made = batcher(**(TWICE | {"max_uses": 9, "replay_fraction": 1.0}))
    put(made, "g")
    assert ask(made).plan is None


def test_fresh_groups_go_first_and_used_ones_fill_what_they_leave():
    made = batcher(**TWICE)
    put(made, "g0")
    put(made, "g1")
    train(made, 1)
    put(made, "g2")
    assert train(made, 2).group_ids == ("g0", "g2"), "a step of so many groups holds them by name"
    put(made, "g3")
    put(made, "g4")
    assert train(made, 3).group_ids == ("g3", "g4")


@pytest.mark.parametrize(("fraction", "groups"), [(0.0, None), (0.49, None), (0.5, 4), (1.0, 4)])
def test_replay_fraction_caps_the_share_that_was_trained_before(fraction, groups):
    made = batcher(max_uses=2, max_age=9, step_groups=4, replay_fraction=fraction)
    for n in range(4):
        put(made, f"g{n}")
    train(made, 1)
    put(made, "h0")
    put(made, "h1")
    plan = ask(made, 2).plan
    assert (plan and len(plan.group_ids)) == groups
    made = batcher(max_uses=2, max_age=9, step_groups=4, replay_fraction=0.5)
    for n in range(4):
        put(made, f"g{n}")
    train(made, 1)
    put(made, "h0")
    assert ask(made, 2).plan is None  # 3 of 4 would be used ones


def test_what_was_dropped_with_the_first_use_is_not_dropped_again():
    made = batcher(**(TWICE | {"step_groups": 1, "replay_fraction": 1.0}))
    put(made, "g", lengths=(10, 101, 10))
    first, second = train(made, 1), train(made, 2)
    assert first.entries[0].dropped == (("oversized", 1, 101),)
    assert second.entries[0].dropped == ()
    assert second.entries[0].packed_rollouts == first.entries[0].packed_rollouts == 2


def test_a_used_group_that_grows_too_old_is_released_and_drops_nothing():
    made = batcher(max_uses=2, max_age=1, step_groups=1)
    put(made, "g")
    train(made, 1)
    put(made, "h", version=2)
    decision = ask(made, 3)
    assert decision.plan.group_ids == ("h",)
    assert drops_of(decision) == [("g", "stale", "age 2 > max_age 1 at step 3", 0, 0)]
    assert decision.drops[0].entry_ids == ("g-0",)


def test_a_late_part_of_a_used_group_is_late():
    made = batcher(**TWICE)
    put(made, "g")
    put(made, "h")
    train(made, 1)
    put(made, "g", entry="g-1", lengths=(10,), first=9, planned=4)
    assert [(d.reason, d.entry_ids, d.rollouts) for d in ask(made, 2).drops] == [("late", ("g-1",), 1)]


def test_a_takeover_gives_the_uses_back():
    made = batcher(**(TWICE | {"step_groups": 1, "replay_fraction": 1.0}))
    info = make_group(group_id="g", size=4, lengths=(10,) * 4, planned_size=9).info()
    made.close(["g"])  # its tombstone
    made.restore([("e-0", info)], uses=1, now=5.0)
    made.restore([("e-0", info)], uses=1, now=5.0)
    plan = ask(made, 2, now=5.0).plan
    assert [(e.entry_id, e.uses, e.is_kept) for e in plan.entries] == [("e-0", 1, False)]
    made.committed(plan)
    assert ask(made, 3, now=5.0).plan is None


def test_a_refused_plan_forgets_a_used_group_and_releases_the_rest_of_it():
    made = batcher(**(TWICE | {"step_groups": 1, "replay_fraction": 1.0}))
    put(made, "g", lengths=(10, 10), planned=4, entry="p0")
    put(made, "g", lengths=(10, 10), planned=4, first=2, entry="p1")
    train(made, 1)
    made.refused(ask(made, 2).plan, ["p0"])
    decision = ask(made, 2)
    assert decision.plan is None
    assert [(d.reason, d.rollouts, d.tokens, d.entry_ids) for d in decision.drops] == [("invalid", 0, 0, ("p1",))]


def test_used_groups_keep_steps_coming_without_holding_back_tickets():
    made = batcher(max_uses=2, max_age=9, step_groups=2, budgets={"a": 1.0})
    put(made, "g0")
    put(made, "g1")
    plain = batcher(max_age=9, step_groups=2, budgets={"a": 1.0})
    put(plain, "g0")
    put(plain, "g1")
    for one in (made, plain):
        train(one, 1)
    assert ask(made, 2).allowances == ask(plain, 2).allowances


def test_a_used_group_from_the_future_is_dropped_as_steps_that_trained_it_may_be_void():
    made = batcher(**(TWICE | {"step_groups": 1, "replay_fraction": 1.0}))
    put(made, "g", version=1, uses=1)
    decision = ask(made, 1)
    assert decision.plan is None
    assert [drop[:2] for drop in drops_of(decision)] == [("g", "future")]
