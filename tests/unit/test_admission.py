import pytest

from rlbuffer.batcher.admission import (
    START_TICKETS,
    EnvSupply,
    allowances,
    groups_per_step,
    missing,
)


def supply(*, window=1, pending=0, share=1.0, mean=(100.0, 100.0, 4.0), owed=0.0, **sizes):
    return EnvSupply(window=window, pending=pending, share=share, mean=mean, owed=owed, **sizes)


@pytest.mark.parametrize(("steps", "share", "expected"), [(1, 0.5, 1), (0, 0.5, 0), (1, 0.0, 0)])
def test_a_wanted_env_gets_a_ticket_if_what_it_samples_can_still_train(steps, share, expected):
    got = allowances({"a": supply(window=steps, pending=99, share=share)}, {"a": 10.0}, awaited=["a"])
    assert got == {"a": expected}


NOTHING = {"tokens": 0, "groups": None, "rollouts": None}
UNEQUAL = {"a": supply(share=0.7), "b": supply(share=0.3, mean=(300.0, 300.0, 8.0))}


@pytest.mark.parametrize(
    ("envs", "limits", "expected"),
    [
        # Budgets in tokens 70/30, groups of 100 and 300 tokens: a step of 3,000 tokens holds 21 and 3.
        (UNEQUAL, {"tokens": 3000}, {"a": 21, "b": 3}),
        (UNEQUAL, {"groups": 24}, {"a": 21, "b": 3}),
        (UNEQUAL, {"rollouts": 108}, {"a": 21, "b": 3}),
        # an unknown env is taken for an average one
        ({"a": supply(share=0.5), "b": supply(share=0.5, mean=None)}, {"tokens": 1000}, {"a": 5, "b": 5}),
        # before anything is known: a few, or, with a number of groups, the share
        ({"a": supply(mean=None), "b": supply(share=0.0, mean=None)}, {"tokens": 1000}, {"a": START_TICKETS}),
        ({"a": supply(share=0.75, mean=None), "b": supply(share=0.25, mean=None)}, {"groups": 32}, {"a": 24, "b": 8}),
    ],
)
def test_groups_per_step_follow_from_shares_and_mean_groups(envs, limits, expected):
    assert groups_per_step(envs, **(NOTHING | limits)) == pytest.approx(expected)


GROUPS = NOTHING | {"groups": 8}


@pytest.mark.parametrize(
    ("owed", "pending", "expected"),
    [
        ((0, 0), (0, 0), {"a": 6, "b": 2}),
        ((0, 0), (4, 0), {"a": 2, "b": 2}),
        ((0, 0), (9, 2), {"a": 0, "b": 0}),
        ((-100, 100), (0, 0), {"a": 5, "b": 3}),  # what b was owed before is its now
        ((-60, 60), (0, 0), {"a": 6, "b": 2}),
    ],
)
def test_the_open_step_needs_what_it_would_select_and_is_not_there(owed, pending, expected):
    shares = {"a": 0.75, "b": 0.25}
    envs = {e: supply(share=shares[e], owed=owed[i], pending=pending[i]) for i, e in enumerate("ab")}
    assert missing(envs, **GROUPS) == expected


@pytest.mark.parametrize(
    ("limit", "amount", "expected"),
    [
        *(("tokens", 700, 7), ("tokens", 701, 8), ("tokens", 800, 8)),
        *(("rollouts", 28, 7), ("rollouts", 29, 8), ("rollouts", 32, 8)),
    ],
)
def test_a_step_of_rows_or_rollouts_needs_groups_until_it_may_close(limit, amount, expected):
    assert missing({"a": supply()}, **(NOTHING | {limit: amount})) == {"a": expected}


@pytest.mark.parametrize(
    ("ready_mean", "expected"), [(100.0, 5), (130.0, 4), (140.0, 3), (60.0, 6), (233.3, 1), (233.4, 0)]
)
def test_what_is_ready_counts_with_its_own_tokens(ready_mean, expected):
    env = supply(pending=3, ready=3, ready_mean=(ready_mean, ready_mean, 4.0))
    assert missing({"a": env}, tokens=700.1, groups=None, rollouts=None) == {"a": expected}


@pytest.mark.parametrize(("spread", "expected"), [(0, 8), (1, 7), (17, 7), (21, 7), (22, 6), (50, 5), (10_000, 1)])
def test_the_last_groups_of_a_step_of_rows_wait_until_it_is_nearly_certain_that_they_are_needed(spread, expected):
    assert missing({"a": supply(spread=spread)}, tokens=705, groups=None, rollouts=None) == {"a": expected}
    assert missing({"a": supply(spread=spread)}, tokens=0, groups=8, rollouts=None) == {"a": 8}
    assert missing({"a": supply(spread=spread)}, tokens=0, groups=None, rollouts=32) == {"a": 8}


def test_of_what_is_ready_nothing_is_doubtful():
    env = supply(pending=7, ready=7, ready_mean=(100.0, 100.0, 4.0), spread=1000)
    assert missing({"a": env}, tokens=705, groups=None, rollouts=None) == {"a": 1}


def test_before_groups_of_every_env_are_seen_a_few_of_each_are_enough():
    envs = {"a": supply(share=0.75), "b": supply(share=0.25, mean=None)}
    assert missing(envs, **(GROUPS | {"groups": 32})) == {"a": 6, "b": 2}
    unknown = {env: supply(share=0.5, mean=None) for env in "ab"}
    assert missing(unknown, tokens=1000, groups=None, rollouts=None) == {"a": 1, "b": 1}
    assert missing(unknown, **GROUPS) == {"a": 1, "b": 1}


def test_what_the_open_step_needs_replaces_the_average_and_what_is_wanted():
    envs = {"a": supply(share=0.5), "b": supply(share=0.5), "c": supply(share=0.0)}
    per_step = {"a": 4.5, "b": 4.5}
    assert allowances(envs, per_step, awaited=["a", "b"], open_step={"a": 3, "b": 0}) == {"a": 3, "b": 0, "c": 0}
    assert allowances(envs, per_step, awaited=["b"], open_step={"a": 0, "b": 0}) == {"a": 0, "b": 1, "c": 0}
    shut = {"a": supply(share=1.0, window=0)}
    assert allowances(shut, {"a": 4.0}, awaited=["a"], open_step={"a": 3}) == {"a": 0}
