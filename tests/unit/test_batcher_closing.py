"""A step closes, stays open or waits, at spots where several rules meet."""

from __future__ import annotations

from test_batcher import ask, batcher, put

from rlbuffer.config.batcher import EnvConfig
from rlbuffer.records.waiting import Wait, Waiting


def test_rows_that_no_packing_can_save_close_a_step_that_has_tokens_left():
    made = batcher()  # 2 rows of 100: two rollouts above a third of a row fill it
    for n in range(5):
        put(made, f"g{n}", lengths=(34,))
        plan = ask(made).plan
        assert (plan is None) is (n < 4)
    assert (plan.group_ids, plan.closed_by) == (("g0", "g1", "g2", "g3"), "capacity")


def test_a_step_waits_for_a_version_only_when_no_env_could_give_anything_younger():
    made = batcher(step_groups=2, budgets={"a": 0.5, "b": 0.5}, max_age=0, envs={"b": EnvConfig(max_age=4)})
    made.set_published(3)
    assert ask(made, 6).why.kind is Wait.FILLING
    made.set_published(0)
    assert ask(made, 6).why == Waiting(kind=Wait.VERSION, step=6, version=1, published=0, limit=4)


def test_what_is_too_old_for_the_next_step_is_no_supply_for_it():
    made = batcher(step_groups=4, budgets={"a": 1.0}, max_age=1)
    made.set_published(5)
    for n in range(3):
        put(made, f"old{n}", version=4)
        put(made, f"new{n}", version=5)
    assert made.allowances(6, world_size=2) == {"a": 2}  # both versions can train at step 6: 8 - 6
    assert made.allowances(7, world_size=2) == {"a": 1}  # only version 5 can at step 7: 4 - 3
