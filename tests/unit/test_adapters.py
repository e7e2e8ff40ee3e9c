"""LoRA adapters: own steps and ages, turns, what closes a step, tickets, and what is said."""

from __future__ import annotations

import msgpack
import pytest
from batcher_calls import ask, batcher, drops_of, put

from rlbuffer.batcher.adapters import at_step
from rlbuffer.batcher.pool import TOMBSTONE_SECONDS
from rlbuffer.config.batcher import REMEMBERED_STEPS, AdapterConfig
from rlbuffer.errors import RlbufferError
from rlbuffer.records.step_plan import AdapterProgress
from rlbuffer.records.waiting import Wait, Waiting

ONE_GROUP = {"step_groups": 1, "max_age": 1, "adapters": {"x": AdapterConfig(batch_size=6)}}


def commit(made, step, **options):
    plan = ask(made, step, **options).plan
    made.committed(plan)
    return plan


def told(plan, adapter="x"):
    p = plan.adapters[adapter]
    return p.version, p.rollouts, p.gathered, p.step, p.ready_to_update


def test_an_adapter_that_a_step_does_not_train_stays_where_it_is():
    made = batcher(**ONE_GROUP)
    put(made, "g1", adapter="x")
    commit(made, 1)
    put(made, "g2")
    plan = commit(made, 2)
    assert told(plan) == (0, 0, 4, 0, False)
    assert told(plan, "") == (1, 4, 4, 2, True)
    put(made, "g3", adapter="x")
    assert told(commit(made, 3), "") == (2, 0, 0, 3, False)


@pytest.mark.parametrize(
    ("version", "fate"),
    [(0, "future"), (1, "packed"), (2, "packed"), (3, "future")],
)
def test_ages_of_an_adapter_count_from_its_own_step(version, fate):
    # Two own steps are made in eight steps of the run: version 2 is trained next, max_age is 1.
    made = batcher({"schema": 1, "envs": {}, "adapters": {"x": [24, 600, 2, 0]}, "turns": {}, "step": 8}, **ONE_GROUP)
    put(made, "g", adapter="x", version=version)
    decision = ask(made, 9)
    if fate == "packed":
        assert decision.plan.group_ids == ("g",)
        assert told(decision.plan) == (2, 4, 4, 2, False)
    else:
        detail = {
            0: "age 2 > max_age 1 at step 3 of adapter x",
            3: "policy version 3 > 2 at step 3 of adapter x",
        }[version]
        reason = "stale" if version == 0 else "future"
        assert drops_of(decision) == [("g", reason, detail, 4, 100)]


@pytest.mark.parametrize(("adapter", "late"), [("", False), ("x", True)])
def test_once_an_adapter_was_trained_no_closed_group_is_forgotten(adapter, late):
    made = batcher(**ONE_GROUP)
    put(made, "g", adapter=adapter)
    commit(made, 1)
    step, now = 2 + REMEMBERED_STEPS, 2 * TOMBSTONE_SECONDS
    ask(made, step, now=now)
    put(made, "g", adapter=adapter, entry="again-0", now=now)
    assert ("late" in [drop.reason for drop in ask(made, step, now=now).drops]) == late


def test_an_announced_version_is_proof_of_its_steps():
    made = batcher(**ONE_GROUP)
    made.set_published(7)
    made.set_published(5, "x")
    put(made, "g", adapter="x", version=5)
    plan = commit(made, 1)
    assert told(plan) == (5, 4, 4, 5, False)


def test_turns_go_on_in_the_next_step_and_after_a_takeover():
    made = batcher(step_groups=1)
    for n in range(3):
        put(made, f"x{n}", adapter="x", lengths=(50, 50))
        put(made, f"y{n}", adapter="y", lengths=(50, 50))
    state = ask(made, 1).state
    assert commit(made, 1).group_ids == ("x0",)
    again = batcher(msgpack.unpackb(msgpack.packb(state)), step_groups=1)
    for n in range(3):
        put(again, f"y{n}", adapter="y", lengths=(50, 50), version=0)
        put(again, f"x{n + 1}", adapter="x", lengths=(50, 50), version=0)
    for one in (made, again):
        assert [commit(one, step).group_ids for step in (2, 3)] == [("y0",), ("x1",)]


def test_used_groups_of_one_adapter_come_after_fresh_ones_of_another():
    made = batcher(step_groups=2, max_uses=2, replay_fraction=0.5, max_age=9)
    put(made, "x0", adapter="x")
    put(made, "y0", adapter="y")
    assert commit(made, 1).group_ids == ("x0", "y0")
    put(made, "y1", adapter="y")
    assert commit(made, 2).group_ids == ("x0", "y1")  # a fresh one and a used one; y0 waits


@pytest.mark.parametrize("tokens", [10, 100])
def test_rows_of_one_adapter_each_close_a_step_however_few_tokens_they_hold(tokens):
    made = batcher()
    for name in "xyz":
        put(made, name, adapter=name, lengths=(tokens,))
    plan = ask(made, 1).plan  # two rows of 100 tokens
    assert (plan.group_ids, plan.closed_by) == (("x", "y"), "capacity")


def test_a_step_below_half_of_its_tokens_is_full_when_its_adapters_need_more_rows():
    made = batcher()
    put(made, "x", adapter="x", lengths=(67, 67, 34))  # three rows, though 168 tokens would fit two
    put(made, "y", adapter="y", lengths=(1,))
    assert ask(made, 1, world_size=4).plan is None
    put(made, "z", adapter="z", lengths=(1,))
    assert ask(made, 1, world_size=4).plan.group_ids == ("x", "y")


def test_groups_that_fit_the_rows_of_their_adapters_do_not_close_a_step():
    made = batcher()
    put(made, "x0", adapter="x", lengths=(40,))
    put(made, "y0", adapter="y", lengths=(40,))
    put(made, "x1", adapter="x", lengths=(40,))
    assert ask(made, 1).plan is None
    put(made, "y1", adapter="y", lengths=(70,))
    assert ask(made, 1).plan.group_ids == ("x0", "y0", "x1")


def test_tickets_count_the_groups_of_all_adapters_of_an_env():
    settings = {"step_groups": 2, "budgets": {"a": 1.0}, "max_age": 1}
    one, two = batcher(**settings), batcher(**settings)
    for made in (one, two):
        made.set_published(0)
        made.set_published(0, "x")
        put(made, "g1", lengths=(10,))
    assert one.allowances(1, world_size=2) == two.allowances(1, world_size=2) == {"a": 3}
    put(one, "g2", lengths=(10,))
    put(two, "g2", lengths=(10,), adapter="x")
    assert one.allowances(1, world_size=2) == two.allowances(1, world_size=2) == {"a": 2}


def test_groups_that_wait_for_a_version_count_against_the_tickets():
    made = batcher(step_groups=2, budgets={"a": 1.0}, max_age=0, lookahead=0)
    made.set_published(0)
    put(made, "g1", lengths=(10,))
    put(made, "g2", lengths=(10,), adapter="x")
    commit(made, 1)
    # Nobody has said which version of x there is: one that step 2 trains may be. All weights are at version 0, which it
    # does not train, and what they sampled is kept until there are others.
    assert made.allowances(2, world_size=2) == {"a": 2}
    put(made, "g3", lengths=(10,))
    assert made.allowances(2, world_size=2) == {"a": 1}
    put(made, "g4", lengths=(10,))
    assert made.allowances(2, world_size=2) == {"a": 0}


def test_the_window_is_that_of_the_adapter_whose_version_reaches_furthest():
    made = batcher(step_groups=2, budgets={"a": 1.0}, max_age=0, lookahead=0)
    made.set_published(0)
    put(made, "g1", lengths=(10,), adapter="x")
    put(made, "g2", lengths=(10,), adapter="x")
    commit(made, 1)
    # All weights are at version 0 and step 2 trains version 1; x is at its version 0 and trains that.
    made.set_published(0, "x")
    assert made.allowances(2, world_size=2) == {"a": 2}
    made.set_published(-1, "x")
    assert made.allowances(2, world_size=2) == {"a": 0}


def test_what_an_adapter_without_any_version_has_sampled_trains_or_goes_and_holds_no_ticket_for_ever():
    """An announced version goes only with a new epoch: the leader begins anew, and nobody has said a version of x."""
    state = {"schema": 1, "envs": {}, "adapters": {"x": [64, 640, 2, 0]}, "turns": {"a": {"x": 3}}, "step": 8}
    made = batcher(state, **ONE_GROUP | {"max_age": 0, "budgets": {"a": 1.0}})
    made.set_published(8)
    put(made, "old", adapter="x", version=1)
    put(made, "new", adapter="x", version=2)
    put(made, "whole", version=8)
    decision = ask(made, 9)
    assert drops_of(decision) == [("old", "stale", "age 1 > max_age 0 at step 3 of adapter x", 4, 100)]
    made.dropped(decision.drops)
    assert [commit(made, step).group_ids for step in (9, 10)] == [("whole",), ("new",)]
    made.set_published(10)
    decision = ask(made, 11)
    assert (decision.drops, made.pools["a"].sums({})["groups_ready"]) == ((), 0)
    assert decision.allowances == {"a": 1}


def test_an_env_whose_adapter_lags_says_which_version_of_which_adapter_it_waits_for():
    state = {"schema": 1, "envs": {}, "adapters": {"x": [64, 640, 2, 0]}, "turns": {}, "step": 8}
    made = batcher(state, **ONE_GROUP | {"max_age": 0})
    made.set_published(8)
    made.set_published(1, "x")
    put(made, "g", adapter="x", version=1)
    decision = ask(made, 9)
    assert decision.drops == ()  # nothing is swept while nothing younger could be sampled
    assert decision.allowances["a"] == 0
    assert decision.why == Waiting(kind=Wait.VERSION, step=9, adapter="x", version=2, published=1)
    made.set_published(2, "x")
    assert drops_of(ask(made, 9))[0][2] == "age 1 > max_age 0 at step 3 of adapter x"


def test_a_step_asks_for_the_version_that_the_next_one_of_the_adapter_needs():
    made = batcher(**ONE_GROUP | {"max_age": 0, "adapters": {"x": AdapterConfig(batch_size=8)}})
    made.set_published(0)
    made.set_published(0, "x")
    put(made, "g1", adapter="x")
    plan = commit(made, 1)
    assert plan.adapters["x"].waiting_for_version is None  # its own step goes on with version 0
    put(made, "g2", adapter="x")
    decision = ask(made, 2)
    assert decision.plan.adapters["x"].waiting_for_version == 1
    assert decision.waiting_for_version is None  # nobody samples all weights


@pytest.mark.parametrize(
    ("max_age", "published", "asked"),
    [(0, 4, 5), (1, 4, None), (1, 3, 4), (2, 3, None), (2, 0, 3)],
)
def test_a_step_asks_for_what_the_next_one_needs_when_it_is_not_published(max_age, published, asked):
    made = batcher(step_groups=1, max_age=max_age)
    made.set_published(4)
    put(made, "g", version=4)
    made.set_published(published)
    assert ask(made, 5).waiting_for_version == asked


def test_the_env_with_the_smallest_max_age_says_which_version_is_asked_for():
    made = batcher(step_groups=1, max_age=9, envs={"b": {"max_age": 0}})
    made.set_published(4)
    put(made, "g", version=4)
    assert ask(made, 5).waiting_for_version is None
    put(made, "h", version=4, env="b")
    assert ask(made, 5).waiting_for_version == 5
    made.pause("b")
    assert ask(made, 5).waiting_for_version is None


def progress(*, is_ready):
    return AdapterProgress(
        samples=40, tokens=400, step=1, ready_to_update=is_ready, version=int(not is_ready), gathered=8
    )


@pytest.mark.parametrize(
    ("step", "progress", "adapters"),
    [
        (8, None, {"x": [64, 640, 2, 5]}),  # where the state was saved
        (5, {"x": progress(is_ready=False)}, {"x": [40, 400, 1, 8]}),
        (5, {"x": progress(is_ready=True)}, {"x": [40, 400, 1, 0]}),
        (9, None, {"x": [64, 640, 2, 5]}),  # a loss of writes: the announced versions say the rest
        (7, None, {}),
    ],
)
def test_a_run_that_was_taken_back_goes_on_with_the_adapters_as_its_last_step_has_them(step, progress, adapters):
    state = {"schema": 1, "envs": {}, "adapters": {"x": [64, 640, 2, 5]}, "turns": {"a": {"x": 3}}, "step": 8}
    found = at_step(state, step=step, progress=progress)
    assert found["adapters"] == adapters
    assert found["turns"] == ({"a": {"x": 3}} if step >= 8 else {})


@pytest.mark.parametrize("adapters", [[1], {"x": 3}])
def test_a_state_that_cannot_be_read_is_refused(adapters):
    with pytest.raises(RlbufferError, match="the batcher's saved state of its adapters cannot be read"):
        batcher({"schema": 1, "envs": {}, "adapters": adapters})
