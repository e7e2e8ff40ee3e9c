"""Opening a run, and what is shown of it."""

from __future__ import annotations

import pytest

from rlbuffer.errors import EnvDone, RlbufferError
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.store.records import WorkerAnswers

pytest_plugins = ("store_fixtures",)


def test_opening_again_changes_nothing_but_the_time(run):
    before = run.control_keys()
    assert run.again().open_run() == run.meta
    assert run.control_keys() == before
    assert abs(run.store.runs()[run.store.run] - run.store.now()) < 5


def test_heartbeats_carry_the_servers_time(run):
    run.store.heartbeat("worker", "w0", {"tokens_per_second": 12.5, "text": "a b"})
    run.store.heartbeat("rank", "0", {"step": 3})
    (record,) = run.store.heartbeats("worker").values()
    assert 0 <= record.pop("seconds_ago") < 5
    assert record == {"tokens_per_second": 12.5, "text": "a b"}
    assert list(run.store.heartbeats("rank")) == ["0"]
    assert run.store.heartbeats("batcher") == {}
    with pytest.raises(ValueError, match="heartbeat kind 'x' must be one of worker, scorer, rank, batcher"):
        run.store.heartbeat("x", "w0", {})


def ask(run, **changes):
    usual = {"worker": "w0", "beat": {"version": 3}, "ttl_seconds": 60, "size": None, "section": ""}
    return run.store.ask("a", 2, **(usual | changes))


def test_one_ask_takes_tickets_is_heard_and_sees_the_newest_version_and_a_drain(run):
    run.store.heartbeat("worker", "w0", {"version": 2})
    run.lead()
    run.store.set_allowances({"a": 3})
    assert ask(run) == WorkerAnswers(numbers=(0, 1), policy=PolicyVersion(version=-1), is_draining=False, is_heard=True)
    announced = PolicyVersion(version=3, location="/3", size=1)
    number = run.store.attempt(uuid="t", world_size=1, resume_step=0).number
    run.store.announce(number, announced)
    run.store.ask_drain()
    assert ask(run) == WorkerAnswers(numbers=(), policy=announced, is_draining=True, is_heard=True)
    assert run.store.heartbeats("worker")["w0"]["version"] == 3
    run.store.close_tickets("a", [0, 1])
    with pytest.raises(EnvDone):
        ask(run, size=2)


def test_a_heartbeat_that_fails_leaves_the_rest_of_an_ask_as_it_is(run):
    run.lead()
    run.store.set_allowances({"a": 2})
    run.client.set(run.store.keys.heartbeats("worker"), "no hash")
    assert ask(run) == WorkerAnswers(
        numbers=(0, 1), policy=PolicyVersion(version=-1), is_draining=False, is_heard=False
    )


def test_a_server_that_has_forgotten_its_scripts_gives_tickets_in_the_same_ask(run):
    run.lead()
    run.store.set_allowances({"a": 3})
    run.client.script_flush()
    asked = ask(run)
    assert (asked.numbers, asked.is_heard) == ((0, 1), False)
    run.store.heartbeat("worker", "w0", {})  # as its thread does when it was not heard
    asked = ask(run)
    assert (asked.numbers, asked.is_heard) == ((2,), True)


def beats(run, name: str, n: int, *, seconds_ago: float) -> None:
    at = int(1000 * (run.store.now() - seconds_ago))
    run.client.hset(run.store.keys.heartbeats("worker"), mapping={f"{name}{i}": f"{at} x" for i in range(n)})


def test_old_names_stay_few_while_new_ones_come(run):
    beats(run, "old", 50, seconds_ago=3_700)
    beats(run, "live", 50, seconds_ago=3_500)
    for i in range(150):
        run.store.heartbeat("worker", f"new{i}", {})
    left = [name.rstrip(b"0123456789") for name in run.client.hkeys(run.store.keys.heartbeats("worker"))]
    assert (left.count(b"new"), left.count(b"live")) == (150, 50)
    assert left.count(b"old") <= 5  # each is overlooked 150 times once in 10,000 tests


def test_damaged_and_lost_are_counted_beside_the_accounts(run):
    run.push()
    run.store.count_damaged(1, ["a.0/0", "a.0/1"])
    run.store.count_damaged(2, ["a.0/0"])  # with max_uses 2 it trains again, and is missed again
    run.store.count_damaged(2, [])
    run.store.count_lost(4)
    ledger = run.store.ledger()
    assert (ledger.damaged, ledger.lost, list(ledger.envs)) == (3, 4, ["a"])


def test_a_damaged_rollout_counts_once_whoever_pulls_its_step_again(run):
    run.step("a.0")
    run.store.count_damaged(1, ["a.0/0"])
    run.store.count_damaged(1, ["a.0/0", "a.0/1"])
    run.again().count_damaged(1, ["a.0/1"])
    assert run.store.ledger().damaged == 2
    run.train(1, oldest_kept=1)
    run.store.retire(1)
    run.store.count_damaged(2, ["a.1/0"])
    assert run.client.zrange(run.store.keys.damaged, 0, -1) == [b"2 a.1/0"]
    assert run.store.ledger().damaged == 3


def test_history_is_newest_first_with_the_time_of_the_event(run):
    run.step("a.0")
    run.push("a.1")
    run.drop("stale", run.pool())
    records = run.store.history()
    assert [r["event"] for r in records] == ["drop", "step"]
    assert records[1]["step"] == 1
    assert abs(records[0]["at"] - run.store.now()) < 5
    assert run.store.history(1) == records[:1]


def test_a_request_that_others_overtake_each_time_ends(run, monkeypatch):
    look = run.store.look

    def overtaken(read):
        seen = look(read)
        run.client.hincrby(run.store.keys.meta, "asked", 1)
        return seen

    monkeypatch.setattr(run.store, "look", overtaken)
    with pytest.raises(RlbufferError, match="CHANGED"):
        run.store.ask_drain()
