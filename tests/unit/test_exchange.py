"""Scored pushes in the batcher: one takes the place of the push that lacked something."""

from __future__ import annotations

from batcher_calls import ask, batcher, drops_of, pending_tokens, put


def test_a_group_becomes_ready_when_its_push_is_replaced_by_one_that_needs_nothing():
    made = batcher(step_groups=1)
    put(made, "g", needs=("ref_logprobs",))
    assert made.needs == {("a", "ref_logprobs"): 1}
    assert ask(made).plan is None
    put(made, "g", entry="g-1", replaces="g-0")
    assert made.needs == {}
    plan = ask(made).plan
    assert plan.group_ids == ("g",)
    assert {ref.entry_id for ref in plan.rollouts} == {"g-1"}
    assert pending_tokens(made, "a") == 100


def test_needs_are_added_one_after_the_other():
    made = batcher(step_groups=1)
    put(made, "g", needs=("reward", "ref_logprobs"), rewards=[None] * 4)
    put(made, "g", entry="g-1", replaces="g-0", needs=("ref_logprobs",), rewards=[0.0, 1.0, 0.0, 1.0])
    assert made.needs == {("a", "ref_logprobs"): 1}
    put(made, "g", entry="g-2", replaces="g-1", rewards=[0.0, 1.0, 0.0, 1.0])
    decision = ask(made)
    assert decision.plan.group_ids == ("g",)
    assert set(decision.plan.advantages) != {0.0}


def test_a_part_is_replaced_and_the_others_stay():
    made = batcher(step_groups=1)
    put(made, "g", lengths=(25, 25), planned=4, needs=("ref_logprobs",))
    put(made, "g", lengths=(25, 25), planned=4, first=2, entry="g-b", needs=("ref_logprobs",))
    put(made, "g", lengths=(25, 25), planned=4, first=2, entry="g-c", replaces="g-b")
    assert ask(made).plan is None
    assert made.needs == {("a", "ref_logprobs"): 1}
    put(made, "g", lengths=(25, 25), planned=4, entry="g-d", replaces="g-0")
    plan = ask(made).plan
    assert [(ref.entry_id, ref.rollout_id) for ref in plan.rollouts] == [
        ("g-d", "g/0"),
        ("g-d", "g/1"),
        ("g-c", "g/2"),
        ("g-c", "g/3"),
    ]


def test_the_timeout_counts_from_the_first_push_and_scoring_does_not_start_it_anew():
    made = batcher(group_timeout_seconds=300.0)
    put(made, "g", planned=8, needs=("ref_logprobs", "reward"), now=0.0)
    put(made, "g", planned=8, entry="g-1", replaces="g-0", needs=("reward",), now=290.0)
    drops = drops_of(ask(made, now=300.0))
    assert drops == [("g", "small", "still needs reward after 300 s", 4, 100)]
    assert made.needs == {}


def test_a_scored_push_of_a_group_that_was_dropped_meanwhile_is_late_and_its_old_push_is_dropped_no_more():
    made = batcher(group_timeout_seconds=300.0)
    put(made, "g", needs=("ref_logprobs",))
    assert [d.entry_ids for d in ask(made, now=300.0).drops] == [("g-0",)]
    put(made, "g", entry="g-1", replaces="g-0", now=301.0)
    (drop,) = ask(made, now=301.0).drops
    assert (drop.reason, drop.entry_ids, drop.rollouts, drop.tokens) == ("late", ("g-1",), 4, 100)


def test_after_a_takeover_a_scored_push_is_a_push_like_any_other():
    made = batcher(step_groups=1)
    put(made, "g", entry="g-1", replaces="g-0")
    assert ask(made).plan.group_ids == ("g",)


def test_a_scored_push_still_without_a_reward_drops_as_invalid():
    made = batcher(step_groups=1)
    put(made, "g", needs=("ref_logprobs", "reward"), rewards=[None] * 4)
    put(made, "g", entry="g-1", replaces="g-0", rewards=[None] * 4)
    assert drops_of(ask(made)) == [("g", "invalid", "rollout g/0 has no reward", 4, 100)]
    assert made.needs == {}


def test_what_takes_the_place_of_a_ready_push_breaks_its_group():
    """Nobody does so; the batcher holds on to what the server has."""
    made = batcher(step_groups=1)
    put(made, "g")
    put(made, "g", entry="g-1", replaces="g-0")
    decision = ask(made)
    assert decision.plan is None
    assert [(d.reason, d.entry_ids) for d in decision.drops] == [("late", ("g-1",))]


def test_rollouts_that_were_set_aside_stay_so_when_their_push_is_replaced():
    made = batcher(step_groups=1, row_tokens=30)
    put(made, "g", lengths=(25, 25, 99, 25), needs=("ref_logprobs",))
    put(made, "g", lengths=(25, 25, 99, 25), entry="g-1", replaces="g-0")
    plan = ask(made).plan
    assert len(plan.rollouts) == 3
    assert plan.entries[0].dropped == (("oversized", 1, 99),)
