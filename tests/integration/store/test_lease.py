"""LEASE and TICKET."""

from __future__ import annotations

import time

import pytest
from looks import allowances
from store_runs import Run

from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.records.step_plan import AdapterProgress

pytest_plugins = ("store_fixtures",)


def test_first_to_ask_leads_and_others_are_told_who(run):
    lease = run.store.lease("one", ttl_seconds=5)
    assert (lease.held, lease.owner, lease.remaining_seconds) == (True, "one", 5.0)
    other = run.again().lease("two", ttl_seconds=5)
    assert (other.held, other.owner, other.token) == (False, "one", lease.token)
    assert 0 < other.remaining_seconds <= 5


def test_renewal_keeps_the_token(run):
    first = run.store.lease("one", ttl_seconds=5)
    assert run.store.renew(ttl_seconds=5).token == first.token


def test_expired_lease_gives_a_new_token_even_to_the_same_owner(run):
    first = run.store.lease("one", ttl_seconds=0.001)
    time.sleep(0.01)
    again = run.store.renew(ttl_seconds=5)
    assert again.held
    assert again.token > first.token


def test_released_lease_is_free_at_once_and_its_token_never_comes_back(run):
    first = run.store.lease("one", ttl_seconds=30)
    other = run.again()
    assert not other.lease("two", ttl_seconds=5).held
    other.release_lease()
    assert not other.lease("two", ttl_seconds=5).held
    run.store.release_lease()
    assert other.lease("two", ttl_seconds=5).token > first.token


def test_token_is_beyond_every_token_of_the_past_after_the_clock_went_back(run):
    future = 10**15
    run.client.hset(run.store.keys.lease, mapping={"owner": "x", "until": 0, "token": future})
    assert run.store.lease("one", ttl_seconds=5).token == future + 1


def test_leader_says_config_error_and_allowances(run):
    run.lead()
    run.store.set_config({"max_age": 2, "envs": {"a": {"max_age": 3}}}, "digest-1")
    run.store.set_error("boom")
    run.store.set_allowances({"a": 3, "b": -1})
    meta = run.store.meta()
    assert (meta.config, meta.config_digest, meta.error) == (
        {"max_age": 2, "envs": {"a": {"max_age": 3}}},
        "digest-1",
        "boom",
    )
    assert allowances(run.store) == {"a": 3, "b": 0}
    run.store.set_allowances({"b": 1})
    assert allowances(run.store) == {"b": 1}
    run.store.set_error("")
    assert run.store.meta().error == ""


def test_what_a_leader_said_before_changes_nothing_when_it_comes_late(run, monkeypatch):
    run.lead()
    sent, say = [], run.store._lease_move
    monkeypatch.setattr(run.store, "_lease_move", lambda *words: sent.append(words) or say(*words))
    run.store.set_allowances({"a": 3})
    run.store.set_allowances({"b": 1})
    assert say(*sent[0]) == [b"OK"]
    assert allowances(run.store) == {"b": 1}
    run.store.release_lease()
    successor = run.again()
    successor.lease("two", ttl_seconds=60)
    successor.set_allowances({"c": 2})
    assert allowances(run.store) == {"c": 2}


def test_config_revision_grows_only_with_another_digest(run):
    run.lead()
    for digest in ("x", "x", "y"):
        run.store.set_config({}, digest)
    assert run.client.hget(run.store.keys.meta, "revision") == b"2"


def test_tombstones_outlive_twice_the_group_timeout(run):
    run.lead()
    for timeout, wanted_hours in ((300.0, 1), (7200.0, 4)):
        run.store.set_config({"group_timeout_seconds": timeout}, str(timeout))
        assert run.store.tombstone_ms == wanted_hours * 3_600_000
        other = run.again()
        other.meta()
        assert other.tombstone_ms == wanted_hours * 3_600_000
    run.store.set_config({"group_timeout_seconds": 1e308}, "an older version took it")
    assert run.again().meta().config == {"group_timeout_seconds": 1e308}


def test_old_tombstones_go_when_enough_steps_were_made_since_too(run, monkeypatch):
    monkeypatch.setattr("rlbuffer.config.batcher.REMEMBERED_STEPS", 3)
    run.lead()
    run.store.set_config({"max_age": 1}, "d")
    now = run.store.now()
    run.client.zadd(run.store.keys.closed, {"old": 1000 * (now - 3700), "young": 1000 * (now - 3500)})
    for i, left in enumerate((["old", "young"], ["old", "young"], ["young"])):
        run.step(f"a.{i}")
        assert run.store.closed_groups()[: len(left)] == left
        run.train(i + 1, oldest_kept=i + 1)
        run.store.retire(i + 1)
    assert run.store.closed_groups() == ["young", "a.0", "a.1", "a.2"]


def forgetful(run, monkeypatch):
    """A run that remembers three steps, and whose clock was set forward: by their age alone all tombstones may go."""
    monkeypatch.setattr("rlbuffer.config.batcher.REMEMBERED_STEPS", 3)
    monkeypatch.setattr("rlbuffer.store.viewer.tombstone_ms", lambda config: 0)
    run.lead()
    run.store.set_config({"max_age": 1}, "d")
    run.store.meta()


def step_of(run, group):
    time.sleep(0.002)  # ids and scores are milliseconds
    run.step(group)


def six_forgetful_steps(run, monkeypatch):
    forgetful(run, monkeypatch)
    for i in range(6):
        step_of(run, f"a.{i}")


def test_a_run_that_goes_back_finds_the_tombstones_of_every_step_that_it_can_go_back_to(run, monkeypatch):
    six_forgetful_steps(run, monkeypatch)
    assert run.store.closed_groups() == [f"a.{i}" for i in range(6)]
    run.store.void_from(2, force=True)
    assert run.store.verify().findings == ()


def test_steps_that_were_taken_back_do_not_count_among_those_that_keep_a_tombstone(run, monkeypatch):
    six_forgetful_steps(run, monkeypatch)
    run.train(3, oldest_kept=3)
    run.store.retire(3)
    known = run.store.closed_groups()
    run.store.void_from(4, force=True)
    run.meta = run.store.meta()
    run.lead("another")
    step_of(run, "a.7")
    assert run.store.closed_groups() == sorted([*known, "a.7"])


@pytest.mark.parametrize(
    ("config", "steps"),
    [({}, 64), ({"max_age": 62}, 64), ({"max_age": 63}, 65), ({"max_age": 1, "envs": {"a": {"max_age": 90}}}, 92)],
)
def test_tombstones_outlast_every_step_that_could_train_what_was_sampled_before(run, config, steps):
    run.lead()
    run.store.set_config(config, "d")
    assert run.store.tombstone_steps == steps


def test_tombstones_of_a_run_with_adapters_stay(run, monkeypatch):
    monkeypatch.setattr("rlbuffer.config.batcher.REMEMBERED_STEPS", 1)
    run.lead()
    run.store.set_config({"max_age": 0}, "d")
    progress = AdapterProgress(samples=1, tokens=1, step=1, ready_to_update=True, version=0, gathered=0, rollouts=1)
    for i in range(4):
        run.client.zadd(run.store.keys.closed, {f"old.{i}": i})
        run.push(f"a.{i}")
        run.commit(adapters={"": progress, "coder": progress})
    assert len(run.store.closed_groups()) == 8


@pytest.mark.parametrize("move", ["commit", "drop", "rewind"])
def test_tombstones_stay_in_order_when_the_clock_is_set_back(run, move):
    run.lead()
    ahead = 1000 * round(run.store.now() + 5000)
    run.client.zadd(run.store.keys.closed, {"before": ahead})
    run.push("a.0")
    if move == "commit":
        run.commit()
    elif move == "drop":
        run.drop("stale", run.pool())
    else:
        run.store.rewind(0, force=True)
    assert run.client.zscore(run.store.keys.closed, "a.0") == ahead


# -- tickets -----------------------------------------------------------------------------------------------------------
def allow(run: Run, **allowances: int) -> None:
    run.lead()
    run.store.set_allowances(allowances)


def take(run: Run, n: int, env: str = "a", ttl_seconds: float = 60) -> list[int]:
    return run.store.take_tickets(env, n, ttl_seconds=ttl_seconds)


def test_no_more_tickets_are_out_than_allowed(run):
    assert take(run, 2) == []
    allow(run, a=3, b=1)
    assert (take(run, 2), take(run, 2), take(run, 2)) == ([0, 1], [2], [])
    assert take(run, 5, "b") == [0]
    allow(run, a=4)
    assert take(run, 5) == [3]
    assert take(run, 5, "b") == []


@pytest.mark.parametrize(("allowed", "given"), [(0, []), (1, [1, 2]), (9, [1, 2, 3])])
def test_who_cannot_get_on_without_more_is_given_them_unless_none_are_allowed(run, allowed, given):
    allow(run, a=1)
    take(run, 1)
    allow(run, a=allowed)
    assert run.store.take_tickets("a", 3, ttl_seconds=60, least=2) == given


def test_tickets_of_ingested_groups_make_room_for_new_numbers(run):
    allow(run, a=2)
    take(run, 2)
    run.store.close_tickets("a", [0])
    run.store.close_tickets("a", [])
    assert take(run, 2) == [2]


def test_lowest_expired_number_is_taken_first(run):
    allow(run, a=12)
    take(run, 12, ttl_seconds=0.001)
    time.sleep(0.01)
    run.store.close_tickets("a", [0, 3])
    # By number, not by text: 10 comes after 9.
    assert take(run, 12) == [1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]


def test_released_tickets_are_taken_again_first(run):
    allow(run, a=4)
    take(run, 3)
    run.store.release_tickets("a", [1])
    assert take(run, 2) == [1, 3]


def test_renewed_ticket_stays_out_and_a_closed_one_does_not_come_back(run):
    allow(run, a=3)
    take(run, 3, ttl_seconds=0.2)
    run.store.close_tickets("a", [2])
    run.store.renew_tickets("a", [0, 2], ttl_seconds=60)
    time.sleep(0.25)
    assert take(run, 3) == [1, 3]
    for nothing in (run.store.renew_tickets("a", [], ttl_seconds=1), run.store.release_tickets("a", [])):
        assert nothing is None
    assert run.client.zscore(run.store.keys.tickets("a"), "2") is None


@pytest.mark.parametrize("moves", [1, 2])
def test_refused_take_changes_nothing(run, moves):
    allow(run, a=1)
    take(run, 1)
    before = run.control_keys()
    for _ in range(moves):
        assert take(run, 1) == []
    assert run.control_keys() == before


def test_what_is_no_ticket_is_not_given_again(run):
    allow(run, a=3)
    run.client.zadd(run.store.keys.tickets("a"), {"x": 0, "9" * 16: 0, "7": 0})  # as any worker may
    assert take(run, 3) == [7, 0, 1]


@pytest.mark.parametrize("number", ["many", "9" * 15])
def test_what_is_no_number_of_tickets_gives_none(run, number):
    allow(run, a=3)
    run.client.hset(run.store.keys.numbers, "a", number)
    assert take(run, 2) == []
    assert run.client.hget(run.store.keys.numbers, "a") == number.encode()


def test_the_leader_hears_with_which_version_each_ticket_that_lives_was_taken(run):
    allow(run, a=4, b=1)
    number = run.store.attempt(uuid="t", world_size=1, resume_step=0).number
    take(run, 1)
    run.store.announce(number, PolicyVersion(version=3))
    take(run, 1)
    take(run, 1, "b")
    assert run.store.tickets_out() == {"a": {1: 3}, "b": {0: 3}}, "number 0 was taken before any version was announced"
    version, at = run.client.hget(run.store.keys.taken("a"), "1").split()
    run.client.hset(run.store.keys.taken("a"), "1", b"%s %d" % (version, int(at) - 90_000))
    first, second = run.store.taken_tickets()
    assert [(ticket.env, ticket.number, ticket.version) for ticket in (first, second)] == [("a", 1, 3), ("b", 0, 3)]
    assert second.seconds + 90 <= first.seconds + 0.001
    run.store.release_tickets("a", [1])
    assert run.store.tickets_out()["a"] == {}
    run.store.announce(number, PolicyVersion(version=4))
    assert take(run, 1) == [1]
    assert run.store.tickets_out()["a"] == {1: 4}, "it is sampled anew"
    run.store.close_tickets("a", [1])
    assert (run.store.tickets_out()["a"], run.client.hkeys(run.store.keys.taken("a"))) == ({}, [b"0"])


def test_what_is_no_version_is_no_ticket_to_wait_for(run):
    allow(run, a=1)
    take(run, 1)
    run.client.hset(run.store.keys.taken("a"), "0", "soon")
    assert run.store.tickets_out()["a"] == {}
