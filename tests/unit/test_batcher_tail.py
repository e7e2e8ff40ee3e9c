"""The time that a step waits to fill, and the rest when nothing more comes."""

from __future__ import annotations

import numpy as np
import pytest
from batcher_calls import ask, batcher, drops_of, put

from rlbuffer.records.waiting import Wait, Waiting

FOUR = {"step_groups": 4, "max_age": 99}


def closed(decision):
    plan = decision.plan
    return plan and (sorted(plan.group_ids), plan.closed_by)


@pytest.mark.parametrize(
    ("timeout", "now", "groups"),
    [
        (None, 1e9, None),
        (10.0, 14.9, None),
        (10.0, 15.0, (["g0", "g1"], "timeout")),
        (10.0, 99.0, (["g0", "g1"], "timeout")),
    ],
)
def test_a_step_waits_for_so_long_after_its_first_group_came(timeout, now, groups):
    made = batcher(**FOUR, fill_timeout_seconds=timeout)
    put(made, "g0", pushed=5.0, now=5.0)
    put(made, "g1", pushed=14.0, now=14.0)
    assert closed(ask(made, now=now)) == groups


@pytest.mark.parametrize(("now", "groups"), [(29.9, None), (30.0, (["g4"], "timeout"))])
def test_what_was_left_over_waits_for_so_long_after_the_step_before(now, groups):
    made = batcher(**FOUR, fill_timeout_seconds=10.0, order="oldest_first")
    for n in range(5):
        put(made, f"g{n}")
    made.committed(ask(made, now=20.0).plan)
    assert closed(ask(made, 2, now=now)) == groups


def test_a_takeover_does_not_make_a_step_wait_anew():
    first = batcher(**FOUR, fill_timeout_seconds=10.0, order="oldest_first")
    for n in range(5):
        put(first, f"g{n}")
    decision = ask(first, now=20.0)
    for taken_over in (22.0, 24.0, 26.0, 28.0):  # a batcher that never lives for as long as a step waits
        made = batcher(decision.state, **FOUR, fill_timeout_seconds=10.0)
        put(made, "g4", now=taken_over, pushed=0.0)
        assert ask(made, 2, now=taken_over).plan is None
        assert ask(made, 2, now=taken_over + 1.9).plan is None
    made = batcher(decision.state, **FOUR, fill_timeout_seconds=10.0)
    put(made, "g4", now=30.0, pushed=0.0)
    assert closed(ask(made, 2, now=30.0)) == (["g4"], "timeout")


def test_a_clock_that_was_set_back_does_not_make_a_step_wait_for_it():
    first = batcher(**FOUR, fill_timeout_seconds=10.0)
    for n in range(4):
        put(first, f"g{n}", now=10_000.0)
    state = ask(first, now=10_000.0).state
    made = batcher(state, **FOUR, fill_timeout_seconds=10.0)
    put(made, "g4", now=100.0, pushed=100.0)
    assert ask(made, 2, now=100.0).plan is None
    assert closed(ask(made, 2, now=110.0)) == (["g4"], "timeout")


def test_what_an_env_was_short_of_when_a_step_waited_no_longer_is_given_back():
    made = batcher(step_groups=4, max_age=99, fill_timeout_seconds=10.0, budgets={"math": 0.5, "code": 0.5})
    for n in range(8):
        put(made, f"c{n}", env="code")
    assert ask(made, now=9.9).plan is None
    plan = ask(made, now=10.0).plan
    assert ([g[0] for g in plan.group_ids], plan.closed_by) == (["c"] * 4, "timeout")
    made.committed(plan)
    for n in range(4):
        put(made, f"m{n}", env="math", now=11.0)
    assert [g[0] for g in ask(made, 2, now=11.0).plan.group_ids] == ["m"] * 4


def test_a_step_that_waited_for_long_enough_holds_no_more_rows_than_any_other():
    made = batcher(fill_timeout_seconds=10.0, budgets={"math": 0.5, "code": 0.5}, max_age=9)
    for n in range(9):
        put(made, f"c{n}", env="code", lengths=(10, 10))
    assert ask(made, now=9.0, world_size=1).plan is None  # it is math's turn
    plan = ask(made, now=10.0, world_size=1).plan
    assert (plan.closed_by, plan.plan.micro_steps, len(plan.group_ids)) == ("timeout", 1, 5)


def test_every_rank_has_its_part_of_a_step_with_less_rows_than_ranks():
    made = batcher(fill_timeout_seconds=10.0)
    put(made, "g0", lengths=(10, 10))
    plan = ask(made, now=10.0, world_size=4).plan.plan
    assert [len(rank) for rank in plan.rows[0]] == [1, 1, 1, 1]
    assert sorted(index for rank in plan.rows[0] for row in rank for index in row) == [0, 1]


def test_a_step_without_an_advantage_waits_on_until_something_would_train():
    made = batcher(**FOUR, fill_timeout_seconds=10.0)
    put(made, "flat", rewards=[1.0] * 4)
    assert ask(made, now=1000.0).plan is None
    put(made, "other", now=1000.0, pushed=1000.0)
    assert closed(ask(made, now=1001.0)) == (["flat", "other"], "timeout")


def test_groups_that_are_all_used_do_not_make_a_step_of_their_own():
    made = batcher(**FOUR, fill_timeout_seconds=10.0, max_uses=3, replay_fraction=1.0)
    put(made, "g0", uses=1)
    assert ask(made, now=1000.0).plan is None
    put(made, "g1", now=1000.0, pushed=1000.0)
    assert closed(ask(made, now=1010.0)) == (["g0", "g1"], "timeout")


def test_a_group_too_old_or_too_small_does_not_train_because_a_step_waited():
    made = batcher(step_groups=4, max_age=1, fill_timeout_seconds=10.0, min_group_size=4)
    made.set_published(8)
    put(made, "old", version=5)
    put(made, "forming", version=8, lengths=(25, 25), planned=4)
    put(made, "good", version=8)
    decision = ask(made, 9, now=10.0)
    assert closed(decision) == (["good"], "timeout")
    assert [d.group_id for d in decision.drops] == ["old"]


# -- nothing more comes ------------------------------------------------------------------------------------------------
def run_out(made, step=1, *, now=0.0, confirm=True):
    """Commits and drops until nothing more is decided. -> (steps, drops)."""
    steps, drops = [], []
    for _ in range(20):
        decision = ask(made, step, now=now)
        drops += [(d.group_id, d.reason, d.detail) for d in decision.drops]
        made.dropped(decision.drops)
        if decision.plan is not None:
            steps.append((sorted(decision.plan.group_ids), decision.plan.closed_by))
            made.committed(decision.plan)
            step += 1
        elif not decision.drops:
            return steps, drops, decision
    raise AssertionError("it never ends")


@pytest.mark.parametrize(
    ("count", "steps"),
    [
        (0, []),
        (1, [(["g0"], "end")]),
        (4, [(["g0", "g1", "g2", "g3"], "groups")]),
        (5, [(["g0", "g1", "g2", "g3"], "groups"), (["g4"], "end")]),
    ],
)
def test_the_rest_trains_once_all_envs_are_done(count, steps):
    made = batcher(**FOUR, order="oldest_first")
    for n in range(count):
        put(made, f"g{n}")
    made.set_sources(done=["a"])
    found, drops, last = run_out(made)
    assert (found, drops, last.is_over) == (steps, [], True)
    assert last.why == Waiting(kind=Wait.LAST_STEP, step=len(steps))


def test_nothing_is_hurried_or_over_while_somebody_else_may_send_something():
    made = batcher(**FOUR)
    put(made, "g0")
    made.set_sources(done=["a"], others=["b"])
    decision = ask(made, now=1e6)
    assert (decision.plan, decision.is_over) == (None, False)
    made.set_sources(done=["a", "b"])
    assert closed(ask(made, now=1e6)) == (["g0"], "end")


def test_an_env_with_a_budget_that_never_came_is_waited_for():
    made = batcher(**FOUR, budgets={"a": 0.5, "b": 0.5})
    put(made, "g0")
    made.set_sources(done=["a"])
    assert ask(made).plan is None
    made.set_sources(done=["a", "b"])
    assert run_out(made)[0] == [(["g0"], "end")]


def test_an_env_that_is_done_and_used_up_keeps_no_step_waiting():
    made = batcher(step_groups=4, max_age=99, budgets={"a": 0.5, "b": 0.5})
    for n in range(8):
        put(made, f"b{n}", env="b")
    assert ask(made).plan is None  # it is a's turn
    made.set_sources(done=["a"], others=["b"])
    assert [len(groups) for groups, _ in run_out(made)[0]] == [4, 4]
    assert ask(made, 3).allowances["b"] > 0


def test_what_forms_of_an_env_that_was_said_to_be_done_closes_at_once_or_drops_as_small():
    made = batcher(**FOUR, min_group_size=2)
    put(made, "two", lengths=(25, 25), planned=4)
    put(made, "one", lengths=(25,), planned=4)
    made.set_sources(done=["a"], declared=["a"])
    steps, drops, last = run_out(made)
    assert steps == [(["two"], "end")]
    assert drops == [("one", "small", "1 valid rollout < min_group_size 2, and its env is done")]
    assert last.is_over


def test_further_parts_of_an_env_that_is_done_by_its_tickets_are_waited_for():
    made = batcher(**FOUR)
    put(made, "in_parts", lengths=(25, 25), planned=4)
    made.set_sources(done=["a"])
    assert (run_out(made)[0], ask(made).is_over) == ([], False)
    put(made, "in_parts", lengths=(25, 25), planned=4, first=2, entry="its second part")
    assert run_out(made)[:2] == ([(["in_parts"], "end")], [])
    put(made, "never_whole", lengths=(25, 25), planned=4)
    assert run_out(made, 2, now=299.0)[:2] == ([], [])
    steps, drops, last = run_out(made, 2, now=300.0)
    assert (steps, drops, last.is_over) == ([(["never_whole"], "end")], [], True)


def test_a_group_that_a_scorer_may_complete_is_waited_for_until_its_time_is_up():
    made = batcher(**FOUR)
    put(made, "unscored", needs=("ref_logprobs",))
    put(made, "ready")
    made.set_sources(done=["a"])
    decision = ask(made, now=299.0)
    assert (decision.plan, decision.drops, decision.is_over) == (None, (), False)
    steps, drops, last = run_out(made, now=300.0)
    assert steps == [(["ready"], "end")]
    assert [drop[:2] for drop in drops] == [("unscored", "small")]
    assert last.is_over


def test_what_is_left_without_an_advantage_is_dropped_as_flat_and_the_run_is_over():
    made = batcher(**FOUR)
    put(made, "flat", rewards=[1.0] * 4)
    made.set_sources(done=["a"])
    steps, drops, last = run_out(made)
    assert (steps, [drop[:2] for drop in drops], last.is_over) == ([], [("flat", "flat")], True)


def test_what_no_step_can_hold_is_let_go_at_the_end():
    made = batcher(**FOUR, budgets={"a": 1.0}, max_uses=2)
    put(made, "a0", env="a")
    put(made, "b0", env="b")  # the budgets leave nothing for it
    made.set_sources(done=["a", "b"])
    steps, drops, last = run_out(made)
    assert steps == [(["a0"], "end")]
    assert sorted(drop[:2] for drop in drops) == [("a0", "void"), ("b0", "stale")]
    assert last.is_over


@pytest.mark.parametrize("done", [["a", "b"], ["a"]])
def test_a_paused_env_keeps_what_it_has_and_the_run_from_its_end(done):
    made = batcher(**FOUR)
    put(made, "a0", env="a")
    put(made, "b0", env="b")
    made.pause("b")
    made.set_sources(done=done)
    steps, drops, last = run_out(made)
    assert (steps, drops, last.is_over) == ([(["a0"], "end")], [], False)
    assert last.why == Waiting(kind=Wait.PAUSED, env="b")
    made.resume("b")
    made.set_sources(done=["a", "b"])
    assert run_out(made, 2)[0] == [(["b0"], "end")]


def test_a_push_after_the_end_trains_all_the_same():
    made = batcher(**FOUR)
    made.set_sources(done=["a"])
    assert ask(made).is_over
    put(made, "late")
    steps, _, last = run_out(made)
    assert (steps, last.is_over) == ([(["late"], "end")], True)


def test_the_end_is_decided_alike_in_whatever_order_envs_were_named():
    drops = []
    for names in (["a", "b", "c"], ["c", "b", "a"]):
        made = batcher(**FOUR)
        for name in "abc":
            put(made, name, env=name, rewards=[0.0] * 4)
        made.set_sources(done=names)
        drops.append(drops_of(ask(made)))
    assert drops[0] == drops[1] != []
    assert np.array(drops).size
