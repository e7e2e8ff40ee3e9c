"""`slow = "wait"`: a full step waits for what would be too old for the next one, takes it, and loses nothing it waited
for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from batcher_calls import ask, batcher, drops_of, put

from rlbuffer.config.batcher import BatcherConfig
from rlbuffer.errors import ConfigError
from rlbuffer.records.waiting import Wait

WAITS = {"slow": "wait", "step_groups": 2, "max_age": 0}


def full(**settings):
    """A batcher with what step 1 takes."""
    made = batcher(**(WAITS | settings))
    put(made, "a.1")
    put(made, "a.2")
    return made


def trained(made, step, **asked):
    """The groups of a step, which is committed."""
    decision = ask(made, step, **asked)
    made.dropped(decision.drops)
    made.committed(decision.plan)
    return decision.plan.group_ids


def test_a_full_step_waits_for_a_ticket_that_would_be_too_old_and_takes_its_group_first():
    made = full()
    made.set_under_way({"a": {0: 0}})
    decision = ask(made, now=3.0)
    assert (decision.plan, decision.why.kind, decision.why.env) == (None, Wait.SLOW, "a")
    assert (decision.why.groups, decision.why.version, decision.why.seconds) == (1, 0, 0.0)
    assert made.waited_for == {"a": ["a.0"]}
    assert "waits for 1 group of a" in ask(made, now=7.0).waiting
    assert ask(made, now=7.0).why.seconds == 4.0
    put(made, "a.0")
    assert trained(made, 1) == ("a.0", "a.1"), "a.2 has the highest ticket of three that only this step can train"


@pytest.mark.parametrize(("version", "waits"), [(1, False), (2, True), (3, False)])
def test_only_what_this_step_can_train_and_the_next_cannot_is_waited_for(version, waits):
    """Step 4 trains versions 2 and 3 at max_age 1, step 5 no version 2; version 1 is lost already."""
    made = batcher(**(WAITS | {"max_age": 1}), state={"schema": 1, "envs": {}, "step": 3})
    put(made, "a.8", version=3)
    put(made, "a.9", version=3)
    made.set_under_way({"a": {4: version}})
    assert (ask(made, 4).plan is None) == waits


def test_by_default_nothing_is_waited_for():
    made = full(slow="drop", order="oldest_first")
    made.set_under_way({"a": {0: 0}})
    assert trained(made, 1) == ("a.1", "a.2")


def test_the_wait_ends_with_its_bound_and_begins_anew_with_each_step():
    made = full(slow_wait_seconds=10.0)
    made.set_under_way({"a": {0: 0}})
    assert ask(made, now=100.0).plan is None
    assert ask(made, now=109.9).plan is None
    assert trained(made, 1, now=110.0) == ("a.1", "a.2")
    put(made, "a.3", version=1)
    put(made, "a.5", version=1)
    made.set_under_way({"a": {4: 1}})
    assert ask(made, 2, now=111.0).plan is None


def test_a_group_that_forms_is_waited_for_whoever_brings_the_rest():
    made = full()
    put(made, "a.0", lengths=(25,), planned=4)
    made.set_under_way({"a": {0: 0}})
    decision = ask(made)
    assert (decision.why.kind, decision.why.groups, decision.why.forming) == (Wait.SLOW, 1, 1)
    put(made, "a.0", lengths=(25,) * 3, planned=4, first=1, entry="rest")
    assert trained(made, 1) == ("a.0", "a.1")


def test_a_group_that_waits_for_a_scorer_is_waited_for():
    made = full()
    put(made, "a.0", needs=("rewards.judge",))
    assert ask(made).why.kind is Wait.SLOW
    put(made, "a.0", entry="scored", replaces="a.0-0")
    assert trained(made, 1) == ("a.0", "a.1")


def test_a_ticket_whose_group_has_come_or_is_closed_is_not_waited_for():
    made = full()
    made.set_under_way({"a": {1: 0, 2: 0, 7: 0}})
    made.close(["a.7"])
    assert trained(made, 1) == ("a.1", "a.2")


def test_a_group_for_which_the_step_has_no_place_is_not_waited_for():
    """Two earlier tickets take both places, so the third is lost whether it comes or not."""
    made = full()
    made.set_under_way({"a": {3: 0}})
    assert trained(made, 1) == ("a.1", "a.2")


def test_a_later_group_of_the_same_env_takes_the_place_of_none_that_is_waited_for():
    """Four groups for two places, each env's of the lowest ticket first."""
    made = batcher(**WAITS)
    put(made, "b.5", env="b")
    put(made, "a.5")
    made.set_under_way({"a": {1: 0}, "b": {1: 0}})
    assert ask(made).plan is None
    assert made.waited_for == {"a": ["a.1"], "b": ["b.1"]}
    put(made, "a.1")
    put(made, "b.1", env="b")
    made.set_under_way({})
    assert trained(made, 1) == ("a.1", "b.1")


def test_a_group_without_a_place_is_not_waited_for():
    made = batcher(**WAITS)
    put(made, "a.1")
    put(made, "a.2")
    made.set_under_way({"b": {1: 0}})
    assert trained(made, 1) == ("a.1", "a.2"), "three groups for two places, and both of a come first"


def test_what_cannot_wait_goes_before_a_share():
    made = batcher(slow="wait", step_groups=2, max_age=1, budgets={"a": 0.5, "b": 0.5}, unit="groups")
    for step in (1, 2):
        for n in (0, 1):
            put(made, f"b.{step}{n}", env="b", version=step - 1)
    put(made, "a.0")
    assert trained(made, 1) == ("a.0", "b.10")
    put(made, "a.1")
    put(made, "a.2", version=1)
    assert trained(made, 2) == ("a.1", "b.11"), "both are of version 0"
    assert drops_of(ask(made, 3)) == []


def test_what_cannot_wait_takes_more_than_its_share_and_gives_it_back():
    made = batcher(slow="wait", step_groups=2, max_age=1, budgets={"a": 0.5, "b": 0.5}, unit="groups")
    for n in (1, 2, 3):
        put(made, f"a.{n}")
    put(made, "b.1", env="b")
    assert trained(made, 1) == ("a.1", "b.1")
    put(made, "b.2", env="b", version=1)
    put(made, "b.3", env="b", version=1)
    assert trained(made, 2) == ("a.2", "a.3")
    put(made, "a.4", version=2)
    assert trained(made, 3) == ("b.2", "b.3"), "a was one group ahead"


def test_a_paused_env_is_not_waited_for():
    made = full()
    put(made, "b.0", env="b", lengths=(25,), planned=4)
    made.set_under_way({"b": {1: 0}})
    made.pause("b")
    assert trained(made, 1) == ("a.1", "a.2")


def test_tickets_of_adapters_are_not_known_and_their_forming_groups_are():
    made = batcher(**(WAITS | {"step_groups": 1}))
    made.set_published(0, "x")
    put(made, "a.1", adapter="x")
    made.set_under_way({"a": {0: 0}})
    assert ask(made).plan is not None
    put(made, "a.2", lengths=(25,), planned=2, adapter="x")
    assert ask(made).plan is not None, "its 64 rollouts are not there: the step of the adapter goes on"


def test_an_env_to_which_the_schedule_gives_nothing_is_not_waited_for():
    budgets = {"a": [[1, 0.5], [2, 1.0]], "b": [[1, 0.5], [2, 0.0]]}
    made = batcher(**(WAITS | {"budgets": budgets, "max_age": 1}), state={"schema": 1, "envs": {}, "step": 1})
    for name in ("a.1", "a.2"):
        put(made, name, version=1)
    put(made, "b.1", env="b", lengths=(25,), planned=4, version=0)
    assert trained(made, 2) == ("a.1", "a.2")


def test_what_a_paused_env_has_takes_no_place_of_the_others():
    made = batcher(**(WAITS | {"step_groups": 4, "max_age": 1}))
    for number in range(8):
        put(made, f"a.{number}", version=0)
    put(made, "a.8", version=0, lengths=(25,), planned=4)
    put(made, "b.0", env="b", version=0)
    made.set_published(0)
    made.set_under_way({"a": {9: 0}})
    made.pause("a")
    assert ask(made).allowances["b"] >= 3


def test_a_leader_that_takes_over_an_empty_pool_allows_tickets():
    """No time is known then: nothing was ever put there."""
    made = batcher(**(WAITS | {"budgets": {"a": 0.5, "b": 0.5}}))
    made.set_published(0)
    made.set_under_way({})
    assert sum(made.allowances(1, world_size=2).values()) >= 1


def test_where_nothing_is_under_way_each_env_that_the_step_waits_for_gets_a_ticket():
    """The step has room for no whole group of the usual length, and a has no worker."""
    made = batcher(**(WAITS | {"step_groups": 0}))
    for env in ("a", "b"):
        put(made, f"{env}.0", env=env, lengths=(90,))
    put(made, "a.9", lengths=(90,))
    made.set_published(0)
    trained(made, 1)
    made.set_published(1)
    for name in ("a.1", "a.2", "a.3"):
        put(made, name, version=1, lengths=(30,), now=1.0)
    put(made, "b.1", env="b", version=1, lengths=(30,), now=1.0)
    decision = ask(made, 2, now=2.0)
    assert decision.plan is None
    assert {env for env, allowed in decision.allowances.items() if allowed} >= {"a", "b"}


def test_no_ticket_is_given_for_a_step_that_is_full():
    made = full()
    made.set_under_way({"a": {0: 0}})
    assert ask(made).allowances["a"] == 0


def test_groups_train_oldest_first_and_in_no_other_order():
    assert BatcherConfig(64, slow="wait").order == "oldest_first"
    for order in ("newest_first", "priority", "mine:order"):
        with pytest.raises(ConfigError, match=r"batcher\.order"):
            BatcherConfig(64, slow="wait", order=order)
    with pytest.raises(ConfigError, match="stream"):
        BatcherConfig(64, slow="wait", feeds="stream")
    assert replace(BatcherConfig(64, slow="wait"), max_age=3).slow == "wait"
