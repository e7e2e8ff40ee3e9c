"""The batcher and an env that keeps a step waiting: spillover, dead envs, paused envs."""

from __future__ import annotations

import pytest
from batcher_calls import ask, batcher, drops_of, put

from rlbuffer.batcher.admission import ANY_ENV
from rlbuffer.config.batcher import EnvConfig
from rlbuffer.records.waiting import Wait, Waiting

HALVES = {"step_groups": 4, "budgets": {"math": 0.5, "code": 0.5}, "max_age": 99}


def with_code_only(count=8, **settings):
    """The env math has nothing at all, code has more than enough."""
    made = batcher(**(HALVES | settings))
    for n in range(count):
        put(made, f"c{n}", env="code")
    return made


@pytest.mark.parametrize(("seconds", "groups"), [(59.9, None), (60.0, 4), (1000.0, 4)])
def test_borrow_lets_others_fill_the_place_of_an_env_that_is_short_for_too_long(seconds, groups):
    made = with_code_only(spillover="borrow")
    assert ask(made, now=0.0).plan is None
    plan = ask(made, now=seconds).plan
    assert (plan and len(plan.group_ids)) == groups


def test_what_was_borrowed_is_given_back_as_soon_as_the_env_has_something():
    made = with_code_only(spillover="borrow")
    ask(made, now=0.0)
    made.committed(ask(made, now=60.0).plan)
    made.committed(ask(made, 2, now=60.1).plan)  # who borrows goes on, without another minute
    for n in range(4):
        put(made, f"m{n}", env="math", now=61.0)
        put(made, f"d{n}", env="code", now=61.0)
    assert [g[0] for g in ask(made, 3, now=61.0).plan.group_ids] == ["m"] * 4


def test_block_never_goes_on_without_an_env_and_gives_it_tickets():
    made = with_code_only()
    ask(made, now=0.0)
    decision = ask(made, now=10_000.0)
    assert decision.plan is None
    assert decision.allowances["math"] > 0


@pytest.mark.parametrize(("seconds", "groups"), [(59.9, None), (60.0, 3)])
def test_partial_closes_the_step_with_what_is_there(seconds, groups):
    made = with_code_only(spillover="partial")
    ask(made, now=0.0)
    plan = ask(made, now=seconds).plan
    assert (plan and (len(plan.group_ids), plan.closed_by)) == (groups and (groups, "partial"))


def test_after_a_partial_step_the_next_one_waits_anew():
    made = with_code_only(spillover="partial")
    ask(made, now=0.0)
    made.committed(ask(made, now=60.0).plan)
    assert ask(made, 2, now=60.0).plan is None
    assert ask(made, 2, now=119.0).plan is None


def test_partial_goes_on_although_more_than_a_group_is_owed_before_anything_is_selected():
    made = with_code_only(12, spillover="partial")
    sizes = []
    for step in (1, 2, 3):
        assert ask(made, step, now=100.0 * step).plan is None
        plan = ask(made, step, now=100.0 * step + 60.0).plan
        made.committed(plan)
        sizes.append((len(plan.group_ids), plan.closed_by))
    assert sizes == [(3, "partial")] * 3
    for n in range(8):
        put(made, f"m{n}", env="math", now=400.0)
    assert [g[0] for g in ask(made, 4, now=400.0).plan.group_ids] == ["m"] * 4  # what it is owed is not forgotten


def test_partial_closes_with_less_than_the_others_share_when_no_more_is_there():
    made = with_code_only(4, spillover="partial")
    for step, size in ((1, 3), (2, 1)):
        assert ask(made, step, now=100.0 * step).plan is None
        assert ask(made, step, now=100.0 * step + 59.9).plan is None
        plan = ask(made, step, now=100.0 * step + 60.0).plan
        assert len(plan.group_ids) == size
        made.committed(plan)
    assert ask(made, 3, now=1000.0).plan is None  # nothing at all is ready


def test_partial_fits_the_rows_of_the_step():
    made = batcher(budgets={"math": 0.5, "code": 0.5}, spillover="partial", max_age=99)
    for n in range(8):
        put(made, f"c{n}", env="code", lengths=(20,))
    assert ask(made, now=0.0).plan is None
    plan = ask(made, now=60.0).plan
    assert (plan.closed_by, len(plan.group_ids), plan.plan.micro_steps) == ("partial", 3, 1)


def test_an_env_is_dead_when_a_step_waited_for_it_and_nothing_came():
    made = with_code_only()
    assert ask(made, now=100.0).dead == {}
    assert ask(made, now=219.9).dead == {}
    decision = ask(made, now=220.0)
    assert (decision.dead, decision.plan) == ({"math": 120.0}, None)
    assert (decision.why.kind, decision.why.env, decision.why.seconds) == (Wait.ENV_DEAD, "math", 120.0)
    put(made, "m0", env="math", lengths=(5,), planned=4, now=221.0)  # not even a whole group
    assert ask(made, now=221.0).dead == {}


def test_an_env_of_which_nothing_is_wanted_is_not_dead_however_silent():
    made = batcher(**HALVES)
    for n in range(8):
        put(made, f"c{n}", env="code")
        put(made, f"m{n}", env="math")
    made.committed(ask(made, now=0.0).plan)
    assert ask(made, 2, now=1e6).dead == {}


def test_an_env_that_only_the_trainer_holds_up_is_not_dead():
    made = batcher(**(HALVES | {"max_age": 0}))
    made.set_published(0)
    for n in range(8):
        put(made, f"c{n}", env="code", version=5)
    ask(made, 6, now=0.0)
    decision = ask(made, 6, now=1e6)
    assert (decision.plan, decision.dead) == (None, {})


def test_without_budgets_an_env_is_dead_only_when_all_are_silent():
    made = batcher(step_groups=4, max_age=99)
    put(made, "c0", env="code")
    put(made, "m0", env="math")
    ask(made, now=0.0)
    put(made, "c1", env="code", now=100.0)
    assert ask(made, now=130.0).dead == {}
    decision = ask(made, now=220.0)
    assert decision.dead == {"code": 120.0, "math": 220.0}
    assert decision.why.kind is Wait.ENV_DEAD


def test_on_dead_env_borrow_goes_on_without_it_until_it_sends_something():
    made = with_code_only(12, on_dead_env="borrow")
    ask(made, now=0.0)
    decision = ask(made, now=120.0)
    assert (len(decision.plan.group_ids), decision.dead) == (4, {"math": 120.0})
    made.committed(decision.plan)
    decision = ask(made, 2, now=121.0)
    assert (len(decision.plan.group_ids), decision.dead) == (4, {"math": 121.0})
    assert decision.allowances["math"] > 0
    made.committed(decision.plan)
    put(made, "m0", env="math", now=122.0)
    decision = ask(made, 3, now=122.0)
    assert (decision.plan, decision.dead) == (None, {})


def test_a_paused_env_has_no_share_no_tickets_and_is_not_waited_for():
    made = with_code_only()
    assert ask(made).plan is None
    made.pause("math")
    decision = ask(made)
    assert len(decision.plan.group_ids) == 4
    assert decision.allowances["math"] == 0
    made.committed(decision.plan)
    made.resume("math")
    assert ask(made, 2).plan is None


def test_what_a_paused_env_has_stays_in_the_pool_and_grows_older():
    made = batcher(step_groups=1, max_age=1)
    made.pause("math")
    put(made, "m0", env="math")
    assert ask(made, 2).plan is None
    put(made, "c0", env="code", version=2)
    decision = ask(made, 3)
    assert decision.plan.group_ids == ("c0",)
    assert drops_of(decision) == [("m0", "stale", "age 2 > max_age 1 at step 3", 4, 100)]


def test_an_env_that_was_paused_before_it_sent_anything_gets_no_tickets_either():
    made = batcher(step_groups=1)
    made.pause("math")
    allowances = made.allowances(1, world_size=1)
    assert allowances["math"] == 0
    assert allowances[ANY_ENV] > 0


def test_when_every_env_is_paused_the_step_waits_for_them():
    made = batcher(step_groups=1)
    put(made, "m0", env="math")
    made.pause("math")
    decision = ask(made)
    assert (decision.plan, decision.why) == (None, Waiting(kind=Wait.PAUSED, env="math"))


def test_a_paused_env_is_owed_nothing_for_the_time_it_was_paused():
    made = with_code_only(12)
    made.pause("math")
    made.committed(ask(made).plan)
    made.resume("math")
    for n in range(8):
        put(made, f"m{n}", env="math")
    assert sorted(g[0] for g in ask(made, 2).plan.group_ids) == ["c", "c", "m", "m"]


def test_a_scheduled_budget_moves_the_shares_from_step_to_step():
    made = batcher(step_groups=4, budgets={"math": [[1, 1.0], [2, 0.0]], "code": [[1, 0.0], [2, 1.0]]}, max_age=99)
    for n in range(8):
        put(made, f"c{n}", env="code")
        put(made, f"m{n}", env="math")
    taken = []
    for step in (1, 2):
        plan = ask(made, step).plan
        made.committed(plan)
        taken.append([g[0] for g in plan.group_ids])
    assert taken == [["m"] * 4, ["c"] * 4]


@pytest.mark.parametrize(("flat", "kept"), [(0.0, 0), (0.24, 0), (0.25, 1), (0.5, 2), (1.0, 4)])
def test_flat_groups_are_kept_up_to_their_share_of_a_step(flat, kept):
    made = batcher(step_groups=4, flat=flat)
    for n in range(4):
        put(made, f"f{n}", rewards=[0.5] * 4)
    for n in range(4):
        put(made, f"g{n}")
    decision = ask(made)
    assert [g[0] for g in decision.plan.group_ids] == ["f"] * kept + ["g"] * (4 - kept)
    detail = f"all 4 rollouts have reward 0.5, and a step holds at most {flat:g} of flat groups"
    assert drops_of(decision) == [(f"f{n}", "flat", detail, 4, 100) for n in range(kept, 4)]


def test_what_exceeds_the_share_of_flat_groups_gives_its_place_back():
    made = batcher(step_groups=4, flat=0.25)
    for n in range(4):
        put(made, f"f{n}", rewards=[0.5] * 4)
    decision = ask(made)
    assert (decision.plan, len(decision.drops)) == (None, 3)
    made.dropped(decision.drops)
    assert ask(made).allowances["a"] == decision.allowances["a"] == 7


@pytest.mark.parametrize(("seconds", "env", "stale"), [(10.0, "a", False), (10.1, "a", True), (10.1, "b", False)])
def test_max_age_seconds_counts_from_the_push_and_has_overrides(seconds, env, stale):
    made = batcher(step_groups=1, max_age_seconds=10.0, envs={"b": EnvConfig(max_age_seconds=99.0)})
    put(made, "g", env=env, now=5.0, pushed=0.0)
    decision = ask(made, now=seconds)
    assert drops_of(decision) == ([("g", "stale", "10.1 s in the pool > max_age_seconds 10", 4, 100)] if stale else [])
    assert (decision.plan is None) is stale


def test_an_env_that_its_schedule_leaves_out_is_neither_waited_for_nor_dead():
    made = batcher(step_groups=4, budgets={"math": [[1, 0.0], [9, 0.5]], "code": 0.5}, max_age=99)
    put(made, "c0", env="code")
    ask(made, now=0.0)
    decision = ask(made, now=1000.0)
    assert (decision.plan, set(decision.dead)) == (None, {"code"})
    assert decision.allowances["math"] == 0


@pytest.mark.parametrize("patience", [{"spillover": "partial"}, {"spillover": "borrow"}, {"fill_timeout_seconds": 5.0}])
def test_steps_that_go_out_without_a_silent_env_do_not_hide_that_it_is_dead(patience):
    """Its time to be missed is shorter than its time to be dead, so many steps come before that."""
    made = batcher(**HALVES, **patience, spill_after_seconds=5.0)
    step, died = 1, None
    for second in range(200):
        put(made, f"c{second}", env="code", now=float(second))
        decision = ask(made, step, now=float(second))
        if decision.dead and died is None:
            died = second
        if decision.plan is not None:
            made.committed(decision.plan)
            step += 1
    assert (died, step > 20) == (120, True)
