import numpy as np
import pytest
from batcher_calls import ask, batcher, drops_of, pending_tokens, put

from rlbuffer.batcher.admission import ANY_ENV
from rlbuffer.batcher.batcher import Batcher
from rlbuffer.config.batcher import BatcherConfig, EnvConfig
from rlbuffer.errors import RlbufferError
from rlbuffer.records.step_plan import Normalizers
from rlbuffer.records.waiting import Wait, Waiting


def test_a_step_closes_before_the_group_that_needs_another_row():
    made = batcher()
    put(made, "g1")
    put(made, "g2", lengths=(20,) * 4)
    assert ask(made).plan is None
    put(made, "g3", lengths=(30,))
    plan = ask(made).plan
    assert plan.group_ids == ("g1", "g2")
    assert (plan.closed_by, plan.tokens, plan.plan.micro_steps) == ("capacity", 180, 1)
    assert plan.normalizers == Normalizers(loss_tokens=sum(r.loss_tokens for r in plan.rollouts), rollouts=8, groups=2)
    assert [r.entry_id for r in plan.rollouts] == ["g1-0"] * 4 + ["g2-0"] * 4
    assert [r.index for r in plan.rollouts] == [0, 1, 2, 3] * 2
    np.testing.assert_allclose(plan.advantages[:4], [-2 / 3, 2 / 3, -2 / 3, 2 / 3], rtol=1e-6)
    assert plan.advantages.dtype == np.float32
    assert [(e.entry_id, e.packed_rollouts, e.packed_tokens, e.dropped) for e in plan.entries] == [
        ("g1-0", 4, 100, ()),
        ("g2-0", 4, 80, ()),
    ]


@pytest.mark.parametrize(("last", "closed_by"), [(89, None), (90, "fill"), (100, "capacity")])
def test_a_full_enough_step_closes_at_once(last, closed_by):
    made = batcher()
    put(made, "g1", lengths=(100,))
    put(made, "g2", lengths=(last,))
    plan = ask(made).plan
    assert (plan and plan.closed_by) == closed_by


def test_rows_that_fragment_give_groups_back():
    made = batcher(close_fill=1.0)
    for n in range(5):
        put(made, f"g{n}", lengths=(40,))
    plan = ask(made).plan
    assert (plan.group_ids, plan.closed_by, plan.plan.micro_steps) == (("g0", "g1", "g2", "g3"), "capacity", 1)


def test_a_group_larger_than_the_step_is_a_step_of_its_own():
    made = batcher()
    put(made, "big", lengths=(60,) * 5)
    plan = ask(made).plan
    assert (plan.group_ids, plan.plan.micro_steps, plan.closed_by) == (("big",), 3, "capacity")


@pytest.mark.parametrize(
    ("settings", "closed_by", "groups"), [({"step_groups": 3}, "groups", 3), ({"step_rollouts": 5}, "rollouts", 2)]
)
def test_groups_or_rollouts_fix_the_size_instead(settings, closed_by, groups):
    made = batcher(**settings)
    for n in range(4):
        put(made, f"g{n}", lengths=(90,) * 4)
    plan = ask(made).plan
    assert (plan.closed_by, len(plan.group_ids)) == (closed_by, groups)


@pytest.mark.parametrize("length", [5, 90])
def test_a_step_of_the_default_settings_is_32_groups_however_long_they_are(length):
    made = Batcher(BatcherConfig(100))
    for n in range(31):
        put(made, f"g{n}", lengths=(length,) * 4)
    assert ask(made).plan is None
    put(made, "g31", lengths=(length,) * 4)
    put(made, "g32", lengths=(length,) * 4)
    plan = ask(made).plan
    assert (plan.closed_by, len(plan.group_ids)) == ("groups", 32)


def test_asking_moves_nothing_until_it_is_committed():
    made = batcher(step_groups=1)
    put(made, "g1")
    put(made, "g2")
    first, again = ask(made), ask(made)
    assert first.plan.group_ids == again.plan.group_ids == ("g1",)
    assert first.state == again.state
    made.committed(again.plan)
    assert ask(made, 2).plan.group_ids == ("g2",)


def test_only_the_last_decided_plan_can_be_committed():
    made = batcher(step_groups=1)
    put(made, "g1")
    plan = ask(made).plan
    made.committed(plan)
    with pytest.raises(RlbufferError, match="step 1 was committed, but it is not the plan that was decided last"):
        made.committed(plan)


def test_a_refused_plan_forgets_what_is_gone_and_plans_again():
    made = batcher(step_groups=1)
    put(made, "g1")
    put(made, "g2", lengths=(25, 25), planned=4, entry="g2a-0")
    put(made, "g2", lengths=(25, 25), planned=4, first=2, entry="g2b-0")
    put(made, "g3")
    plan = ask(made).plan
    made.refused(plan, ["g1-0", "g2b-0"])
    decision = ask(made)
    assert decision.plan.group_ids == ("g3",)
    assert drops_of(decision) == [("g2", "invalid", "its part g2b-0 is gone from the pool", 2, 50)]
    assert decision.drops[0].entry_ids == ("g2a-0",)


def test_drops_repeat_until_they_are_confirmed_and_are_never_planned():
    made = batcher(step_groups=1)
    put(made, "old", version=0)
    put(made, "new", version=4)
    first = ask(made, 5)
    assert drops_of(first) == [("old", "stale", "age 4 > max_age 1 at step 5", 4, 100)]
    assert first.drops[0].entry_ids == ("old-0",)
    assert first.plan.group_ids == ("new",)
    assert ask(made, 5).drops == first.drops
    made.dropped(first.drops)
    assert ask(made, 5).drops == ()


@pytest.mark.parametrize(("version", "fate"), [(1, "stale"), (2, None), (4, None), (5, "future")])
def test_only_what_is_neither_too_old_nor_from_the_future_trains(version, fate):
    made = batcher(step_groups=1, max_age=2)
    put(made, "g", version=version)
    decision = ask(made, 5)
    assert [d.reason for d in decision.drops] == ([fate] if fate else [])
    assert (decision.plan is None) is (fate is not None)


def test_a_drop_goes_on_without_the_entries_that_are_gone_before_it_was_made():
    made = batcher(group_timeout_seconds=10.0, min_group_size=4)
    for entry in range(3):
        put(made, "g", lengths=(20 + entry,), planned=4, first=entry, entry=f"{entry}-0")
    assert [(d.entry_ids, d.rollouts, d.tokens) for d in ask(made, now=10.0).drops] == [(("0-0", "1-0", "2-0"), 3, 63)]
    made.remove("1-0")
    assert [(d.entry_ids, d.rollouts, d.tokens) for d in ask(made, now=10.0).drops] == [(("0-0", "2-0"), 2, 42)]
    made.remove("0-0")
    made.remove("2-0")
    assert ask(made, now=10.0).drops == ()


def test_max_age_may_differ_by_env():
    made = batcher(step_groups=2, max_age=0, envs={"b": EnvConfig(max_age=3)})
    put(made, "ga", env="a", version=3)
    put(made, "gb", env="b", version=1)
    decision = ask(made, 5)
    assert drops_of(decision) == [("ga", "stale", "age 1 > max_age 0 at step 5", 4, 100)]
    assert pending_tokens(made, "a") == 0
    assert pending_tokens(made, "b") == 100


def test_a_lagging_version_sweeps_nothing_admits_nothing_and_says_what_it_waits_for():
    made = batcher(max_age=1, step_groups=2, budgets={"a": 1.0})
    made.set_published(3)
    put(made, "g", version=3)
    decision = ask(made, 6)
    assert decision.drops == ()
    assert decision.allowances == {"a": 0}
    assert decision.why == Waiting(kind=Wait.VERSION, step=6, version=4, published=3, limit=1)
    made.set_published(5)
    assert [d.reason for d in ask(made, 6).drops] == ["stale"]


def test_parts_become_one_group_and_each_entry_is_accounted_for():
    made = batcher(step_groups=1)
    put(made, "g", lengths=(10, 20), planned=4, entry="1-0")
    assert ask(made).plan is None
    put(made, "g", lengths=(30, 40, 50), planned=4, first=2, entry="2-0")
    plan = ask(made).plan
    assert [r.rollout_id for r in plan.rollouts] == ["g/0", "g/1", "g/2", "g/3"]
    assert [(e.entry_id, e.packed_rollouts, e.packed_tokens, e.dropped) for e in plan.entries] == [
        ("1-0", 2, 30, ()),
        ("2-0", 2, 70, (("late", 1, 50),)),
    ]


def test_what_comes_after_a_group_is_ready_is_late_or_a_duplicate():
    made = batcher(step_groups=2)
    put(made, "g")
    put(made, "g", lengths=(7,), planned=4, first=9, entry="late-0")
    put(made, "g", lengths=(8,), planned=4, first=1, entry="twice-0")
    assert [(d.reason, d.entry_ids, d.tokens) for d in ask(made).drops] == [
        ("late", ("late-0",), 7),
        ("duplicate", ("twice-0",), 8),
    ]


def test_what_comes_after_a_group_was_trained_or_closed_is_late():
    made = batcher(step_groups=1)
    made.close(["tomb"])
    put(made, "tomb")
    put(made, "g")
    made.committed(ask(made).plan)
    put(made, "g", entry="again-0")
    decision = ask(made, 2)
    assert [(d.group_id, d.reason, d.detail) for d in decision.drops] == [
        ("tomb", "late", "the group is closed"),
        ("g", "late", "the group is closed"),
    ]


def test_an_entry_read_twice_counts_once():
    made = batcher(step_groups=1)
    put(made, "g")
    put(made, "g")
    assert ask(made).drops == ()
    assert pending_tokens(made, "a") == 100


@pytest.mark.parametrize(
    ("now", "least", "fate"), [(299.9, 1, None), (300, 1, "ready"), (300, 2, "ready"), (300, 3, "small")]
)
def test_a_group_that_is_not_full_closes_after_the_timeout(now, least, fate):
    made = batcher(step_groups=1, min_group_size=least)
    put(made, "g", lengths=(25, 25), planned=4, now=1000.0)
    decision = ask(made, now=1000.0 + now)
    assert (decision.plan is not None) is (fate == "ready")
    small = [("g", "small", "2 valid rollouts < min_group_size 3 after 300 s", 2, 50)]
    assert drops_of(decision) == (small if fate == "small" else [])


def test_a_group_that_needs_something_stays_forming_and_then_drops_small():
    made = batcher(step_groups=1)
    put(made, "g", needs=("ref_logprobs",))
    assert ask(made, now=299.0).plan is None
    assert drops_of(ask(made, now=300.0)) == [("g", "small", "still needs ref_logprobs after 300 s", 4, 100)]


def test_oversized_and_unscored_rollouts_leave_the_rest_of_the_group():
    made = batcher(step_groups=1)
    put(made, "g", lengths=(10, 101, 30, 40), rewards=[1.0, 0.0, None, 0.0])
    plan = ask(made).plan
    assert [r.index for r in plan.rollouts] == [0, 3]
    assert plan.advantages.tolist() == [1.0, -1.0]
    assert plan.entries[0].dropped == (("oversized", 1, 101), ("invalid", 1, 30))


def test_a_push_without_a_valid_rollout_is_dropped_at_once():
    made = batcher(step_groups=1)
    put(made, "g", lengths=(101, 102))
    assert drops_of(ask(made)) == [("g", "oversized", "length 101 > row_tokens 100", 2, 203)]
    assert ask(made, now=1e9).drops[0].group_id == "g"


def test_too_few_valid_rollouts_drop_the_group_without_waiting():
    made = batcher(step_groups=1, min_group_size=3)
    put(made, "g", lengths=(10, 101, 102, 40))
    assert drops_of(ask(made)) == [("g", "small", "2 valid rollouts < min_group_size 3", 4, 253)]


def test_each_env_has_its_own_estimator():
    made = batcher(step_groups=2, advantage="dr_grpo", envs={"b": EnvConfig(advantage="reinforce")})
    put(made, "ga", env="a", lengths=(5, 5), rewards=[1.0, 0.0])
    put(made, "gb", env="b", lengths=(5, 5), rewards=[1.0, 0.0])
    plan = ask(made).plan
    by_env = {r.rollout_id: a for r, a in zip(plan.rollouts, plan.advantages.tolist(), strict=True)}
    assert by_env == {"ga/0": 0.5, "ga/1": -0.5, "gb/0": 1.0, "gb/1": 0.0}


@pytest.mark.parametrize(("estimator", "expected"), [("reinforce", 1.0), ("rloo", 0.0)])
def test_a_group_of_one_gets_its_reward_without_a_baseline_and_zero_with_one(estimator, expected):
    made = batcher(step_groups=1, advantage=estimator)
    put(made, "g", lengths=(25,), rewards=[1.0])
    assert ask(made).plan.advantages.tolist() == [expected]


@pytest.mark.parametrize(("order", "first"), [("newest_first", "g2"), ("oldest_first", "g1")])
def test_the_order_decides_which_version_goes_first(order, first):
    made = batcher(step_groups=1, order=order)
    for name, version in (("g1", 3), ("g2", 4), ("g3", 4)):
        put(made, name, version=version)
    assert ask(made, 5).plan.group_ids == (first,)


def test_a_step_waits_for_an_env_that_is_short_and_names_it():
    made = batcher(budgets={"math": 0.5, "code": 0.5})
    made.set_published(0)
    for n in range(3):
        put(made, f"c{n}", env="code", lengths=(20,) * 2)
    put(made, "m", env="math", lengths=(20,), planned=2, now=1.0)
    decision = ask(made, now=10.0)
    assert decision.plan is None
    assert decision.why == Waiting(
        kind=Wait.ENV_SHORT, step=1, env="math", groups=3, forming=1, done=decision.why.done, published=0, seconds=9.0
    )
    assert decision.waiting == str(decision.why)
    assert decision.allowances["math"] >= 1


def test_an_env_that_never_sent_anything_is_named_too():
    made = batcher(step_groups=4, budgets={"math": 0.5, "code": 0.5})
    for n in range(4):
        put(made, f"c{n}", env="code")
    why = ask(made).why
    assert (why.kind, why.env, why.groups) == (Wait.ENV_SHORT, "math", 2)


def test_the_reason_says_how_full_the_step_is_when_nobody_is_short():
    made = batcher()
    assert ask(made).why == Waiting(kind=Wait.FILLING, step=1)
    put(made, "g")
    why = ask(made).why
    assert (why.kind, why.env, why.done, why.dropped) == (Wait.FILLING, "a", 0.5, "")


def test_an_env_whose_groups_are_all_dropped_is_named_with_the_reason_until_one_is_ready():
    made = batcher()
    put(made, "g1", lengths=(101, 102))
    first = ask(made)
    made.dropped(first.drops)
    again = ask(made)
    assert (len(first.drops), again.drops) == (1, ())
    assert (again.why.env, again.why.dropped) == ("a", "oversized: length 101 > row_tokens 100")
    assert not again.why.is_normal
    put(made, "g2")
    put(made, "g2", entry="late")
    assert ask(made).why.is_normal


def test_allowances_follow_the_window_and_what_is_pending():
    made = batcher(step_groups=8, budgets={"a": 1.0})
    made.set_published(0)
    assert ask(made).allowances == {"a": 16}  # steps 1 and 2
    put(made, "g1")
    put(made, "g2", lengths=(25,), planned=2)
    assert ask(made).allowances == {"a": 14}
    for n in range(7):
        put(made, f"h{n}")
    decision = ask(made)
    assert decision.plan is not None
    assert decision.allowances == {"a": 7}  # step 2 only: 8 groups, of which one is forming
    made.committed(decision.plan)
    assert made.allowances(2, world_size=2) == {"a": 7}
    made.set_published(1)
    assert made.allowances(2, world_size=2) == {"a": 15}


def test_an_env_that_nobody_knows_yet_may_start():
    made = batcher()
    assert ask(made).allowances == {ANY_ENV: 8}
    assert batcher(budgets={"a": 1.0}).allowances(1, world_size=2) == {"a": 16}


def test_an_open_step_that_has_used_up_everything_always_gets_one_more_ticket():
    made = batcher(max_age=0)
    made.set_published(0)
    put(made, "g1", lengths=(100,))
    put(made, "g2", lengths=(100,))
    made.committed(ask(made).plan)
    made.set_published(1)
    assert ask(made, 2).allowances["a"] == 2  # as many groups as the last step had
    for n in range(2):
        put(made, f"small{n}", lengths=(10,), version=1)
    assert made.allowances(2, world_size=2)["a"] == 0
    assert ask(made, 2).allowances["a"] == 1  # they are ten times smaller: the window is full, the step is not


def test_what_the_open_step_lacks_bounds_the_tickets_of_envs_on_policy_alone():
    made = batcher(step_groups=4, budgets={"a": 0.5, "b": 0.5}, max_age=0, envs={"b": EnvConfig(max_age=3)})
    made.set_published(0)
    assert made.allowances(1, world_size=2) == {"a": 1, "b": 8}  # before any is known; two of each of four steps


@pytest.mark.parametrize(("order", "allowance"), [("newest_first", 1), ("oldest_first", 5)])
def test_newest_first_an_env_does_not_outrun_the_one_that_the_step_waits_for(order, allowance):
    made = batcher(step_groups=8, budgets={"a": 0.5, "b": 0.5}, order=order)
    made.set_published(0)
    for n in range(3):
        put(made, f"a{n}", env="a")
    decision = ask(made)
    assert (decision.why.kind, decision.why.env, decision.why.groups) == (Wait.ENV_SHORT, "b", 4)
    assert decision.allowances == {"a": allowance, "b": 8}


def test_the_same_groups_are_the_same_step_in_whatever_order_they_came():
    plans = []
    for order in ([2, 10, 1], [1, 2, 10], [10, 1, 2]):
        made = batcher(step_groups=3, advantage="dr_grpo")
        for n in order:
            put(made, f"a.{n}", lengths=(10 + n, 20, 30 - n), rewards=[n / 7, 1.0, 0.0])
        plans.append(ask(made).plan)
    assert [plan.group_ids for plan in plans] == [("a.1", "a.2", "a.10")] * 3
    first = plans[0]
    for plan in plans[1:]:
        assert [ref.rollout_id for ref in plan.rollouts] == [ref.rollout_id for ref in first.rollouts]
        assert plan.advantages.tolist() == first.advantages.tolist()
        assert plan.plan == first.plan


@pytest.mark.parametrize(("settings", "tickets"), [({"max_age": 0}, 16), ({"max_age": 1}, 8)])
def test_an_env_that_nobody_knows_gets_a_whole_step_of_groups_on_policy(settings, tickets):
    made = batcher(step_groups=16, lookahead=0, **settings)
    made.set_published(0)
    assert made.allowances(1, world_size=2)[ANY_ENV] == tickets
    assert batcher(lookahead=0, **settings).allowances(1, world_size=2)[ANY_ENV] == 8


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


@pytest.mark.parametrize("max_age", [0, 1])
def test_what_waits_for_a_scorer_is_not_sampled_again_and_again_and_its_env_is_not_silent(max_age):
    made = batcher(step_groups=2, budgets={"a": 1.0}, max_age=max_age)
    made.set_published(0)
    put(made, "g0", needs=("rewards.judge",))
    assert ask(made).allowances["a"] >= 1  # it may never be scored
    for number in range(1, 8):
        put(made, f"g{number}", needs=("rewards.judge",))
    assert ask(made).allowances["a"] == 0
    decisions = [ask(made, now=float(now)) for now in range(0, 290, 10)]
    assert {decision.allowances["a"] for decision in decisions} == {0}
    assert [decision.dead for decision in decisions if "a" in decision.dead] == []
