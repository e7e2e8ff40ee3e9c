"""COMMIT, DROP, PIN, PULL and RETIRE."""

from __future__ import annotations

import threading
import time

import pytest
from daemon_runs import start_trainer
from msgspec.structs import replace
from store_runs import Run, plan_of, rollouts_of

from rlbuffer.config.batcher import BatcherConfig
from rlbuffer.errors import LeaseLost, NotFound, StepRetired
from rlbuffer.records.states import Reason, Trait
from rlbuffer.records.step_plan import PlannedRollouts
from rlbuffer.store.records import Claim
from rlbuffer.testing import make_group
from rlbuffer.wire import payload

pytest_plugins = ("store_fixtures",)


def test_committed_step_moves_everything_at_once(run):
    run.lead()
    run.push("a.0", size=3, rewards=[0, 1, 1])
    run.push("b.0", size=2, rewards=[0, 0])
    entries = run.pool()
    status, header = run.commit()
    assert status == "ok"
    assert run.pool() == []
    assert header == run.store.wait_step(1, block_seconds=0)
    assert (header.step, header.previous_digest, header.world_size) == (1, "", 2)
    assert (header.rollouts, header.group_ids, header.closed_by) == (5, ("a.0", "b.0"), "capacity")
    tokens = sum(e.tokens for e in entries)
    assert (header.tokens, header.fill) == (tokens, tokens / (2 * 3 * 64))
    assert header.reward == pytest.approx(2 / 5)
    assert header.envs["a"]["reward"] == pytest.approx(2 / 3)
    assert {env: (v["rollouts"], v["groups"], v["max_age"]) for env, v in header.envs.items()} == {
        "a": (3, 1, 0),
        "b": (2, 1, 0),
    }
    assert abs(header.committed_ms / 1000 - run.store.now()) < 5
    ledger = run.store.ledger()
    assert ledger.envs["a"].packed == (3, entries[0].tokens)
    assert ledger.total().pending == (0, 0)
    assert run.store.closed_groups() == ["a.0", "b.0"]
    assert run.store.load_state() == {"deficits": {"a": 1.5}}
    assert (run.store.meta().step, run.store.meta().digest) == (1, header.digest)
    assert run.store.history()[0]["event"] == "step"
    assert run.client.zrange(run.store.keys.garbage, 0, -1, withscores=True) == [
        [e.payload_key.encode(), 1.0] for e in entries
    ]
    assert run.store.verify().findings == ()


def test_parts_hold_what_each_rank_trains_on(run):
    run.lead()
    run.push("a.0", size=3)
    entries = run.pool()
    run.commit()
    first, second = run.store.read_parts(1)
    assert [r.info.rollout_id for r in first.rollouts] == ["a.0/0", "a.0/2"]
    assert [r.info.rollout_id for r in second.rollouts] == ["a.0/1"]
    assert first.rows == (((0,),), ((1,),))
    assert second.rows == (((0,),), ((),))
    assert [r.advantage for r in first.rollouts] == [0.0, 0.25]
    assert first.rollouts[0].info == entries[0].info.rollouts[0]
    assert first.rollouts[0].payload_key == entries[0].payload_key
    (again,) = run.store.read_parts(1, [1])
    assert [*again.rollouts] == [*second.rollouts]
    assert all(run.store.read_payloads(first.rollouts))


def test_same_step_again_is_a_duplicate_and_changes_nothing(run):
    run.lead()
    run.push()
    entries = run.pool()
    meta = run.store.meta()
    plan = plan_of(entries, 1)
    used = {e.entry_id: e for e in entries}
    first = run.store.commit(plan, used, meta=meta, columns={}, state={})
    before = run.control_keys()
    assert run.store.commit(plan, used, meta=meta, columns={}, state={}) == ("duplicate", first[1])
    assert run.control_keys() == before


def test_entries_that_are_gone_are_named_and_nothing_is_committed(run):
    run.lead()
    run.push("a.0")
    run.push("a.1")
    run.push("a.2")
    entries = run.pool()
    run.drop("stale", [entries[1]])
    before = run.control_keys()
    assert run.commit(entries=entries) == ("gone", [entries[1].entry_id])
    assert run.control_keys() == before


def _other_leader(run: Run) -> None:
    run.store.release_lease()
    run.again().lease("other", ttl_seconds=30)


def _expired(run: Run) -> None:
    run.store.lease("leader", ttl_seconds=0.001)
    time.sleep(0.01)


def _no_lease(run: Run) -> None:
    run.client.delete(run.store.keys.lease)


@pytest.mark.parametrize(("spoil", "holder"), [(_other_leader, "other"), (_expired, "leader"), (_no_lease, "nobody")])
def test_who_does_not_lead_changes_nothing_and_is_told_whose_the_lease_is(run, spoil, holder):
    run.lead()
    run.push()
    entries = run.pool()
    claim = Claim(step=1, epoch=run.meta.epoch, digest="d" * 64, steps=())
    run.store.attempt(uuid="trainer", world_size=2, resume_step=1, claim=claim)
    trainer = run.store.trainer()
    spoil(run)
    before = run.control_keys()
    for refused in (
        lambda: run.commit(),
        lambda: run.drop("stale", entries),
        lambda: run.store.retire(1),
        lambda: run.store.recover(trainer, entries),
        lambda: run.store.set_config({"max_age": 1}, "d"),
        lambda: run.store.set_error("x"),
        lambda: run.store.set_allowances({"a": 1}),
    ):
        message = f"the lease of run '{run.store.run}' is not this batcher's any more: {holder} holds it"
        with pytest.raises(LeaseLost, match=message):
            refused()
    assert run.control_keys() == before


def test_what_an_entry_holds_beyond_the_step_is_dropped_by_its_reason(run):
    run.lead()
    run.push("a.0", size=3, lengths=[4, 5, 6])
    (entry,) = run.pool()
    plan = plan_of([entry], 1, drop={"a.0/2": "oversized"})
    assert run.store.commit(plan, {entry.entry_id: entry}, meta=run.store.meta(), columns={}, state={})[0] == "ok"
    account = run.store.ledger().envs["a"]
    assert (account.packed, account.dropped, account.pending) == ((2, 9), {"oversized": (1, 6)}, (0, 0))
    assert run.store.verify().findings == ()


def test_dropped_group_is_accounted_once_and_leaves_a_tombstone(run):
    run.lead()
    run.push("a.0")
    entries = run.pool()
    run.drop("stale", entries)
    account = run.store.ledger().envs["a"]
    assert (account.dropped, account.pending) == ({"stale": (2, entries[0].tokens)}, (0, 0))
    assert run.store.closed_groups() == ["a.0"]
    record = run.store.history()[0]
    assert (record["event"], record["group_id"], record["reason"], record["detail"]) == (
        "drop",
        "a.0",
        "stale",
        "because",
    )
    before = run.control_keys()
    run.drop("stale", entries)
    assert run.control_keys() == before


@pytest.mark.parametrize("reason", list(Reason))
def test_the_next_leader_trains_the_rest_of_a_group_that_lost_rollouts_and_of_a_closed_one_nothing(served, reason):
    # Without a tombstone the rest is a second group; with one where rollouts alone were dropped, it is lost.
    run = served.run
    start_trainer(run)
    run.lead()
    run.push("a.0", size=1, planned_size=2)
    run.drop(reason, run.pool())
    run.store.release_lease()
    run.push("a.0", rollout_ids=["a.0/1", "a.0/2"])
    served.serve(BatcherConfig(64, step_groups=1))
    served.wait_for(lambda: served.said("drop") or run.store.wait_step(1, block_seconds=0))
    closes = Trait.CLOSES in reason.traits
    late = [drop["group_id"] for drop in served.said("drop", reason="late")]
    trained = [(step.group_ids, step.rollouts) for step in run.store.headers()]
    assert (late, trained) == ((["a.0"], []) if closes else ([], [(("a.0",), 2)]))
    assert run.store.closed_groups() == ["a.0"]
    assert run.store.verify().findings == ()


def test_drop_of_more_entries_than_one_call_takes_is_carried_out_whole(run):
    run.lead()
    group = {"env": "a", "group": "a.0", "key": "u.1", "rollouts": "1", "tokens": "2", "metadata": b""}
    for _ in range(1003):
        run.client.xadd(run.store.keys.pool, group)
    run.client.hset(run.store.keys.ledger, mapping={"a:pushed:rollouts": 1003, "a:pushed:tokens": 2006})
    run.drop("small", run.store.read_pool(count=2000))
    assert run.pool() == []
    assert run.store.ledger().envs["a"].dropped == {"small": (1003, 2006)}
    assert [r["rollouts"] for r in run.store.history()] == [1003]


def test_commit_of_more_groups_than_one_command_takes_consumes_them_all(run):
    run.lead()
    infos = [make_group(env="a", size=1, group_id=f"a.{i}").info() for i in range(1003)]
    with run.client.pipeline(transaction=False) as pipe:
        for info in infos:
            entry = {"env": "a", "group": info.group_id, "key": "u.1", "rollouts": 1, "tokens": info.tokens}
            pipe.xadd(run.store.keys.pool, entry | {"metadata": payload.encode_info(info)})
        pipe.execute()
    entries = run.store.read_pool(count=2000)
    groups = [info.group_id for info in infos]
    assert [entry.group_id for entry in entries] == groups
    assert run.commit(entries=entries)[0] == "ok"
    assert run.pool() == []
    assert sorted(run.store.closed_groups()) == sorted(groups)
    garbage = run.client.zrange(run.store.keys.garbage, 0, -1, withscores=True)
    assert sorted(garbage) == sorted([run.store.keys.payload(g, "u.1").encode(), 1.0] for g in groups)
    assert run.store.ledger().envs["a"].packed[0] == 1003


def test_pin_names_what_is_missing_or_of_another_size(run, monkeypatch):
    for i in range(5):
        run.push(f"a.{i}")
    entries = run.pool()
    used = {e.entry_id: e for e in entries}
    refs = plan_of(entries, 1).rollouts
    for entry in (entries[1], entries[4]):
        run.client.delete(entry.payload_key)
    run.client.hset(entries[2].payload_key, "1", b"short")
    run.client.hdel(entries[3].payload_key, "0")
    run.client.set(entries[4].payload_key, b"no hash")
    assert run.store.pin(refs, used) == [e.entry_id for e in entries[1:]]
    monkeypatch.setattr("rlbuffer.store.leader.PIN_ROLLOUTS", 3)  # of two rollouts each: in several calls
    assert run.store.pin(refs, used) == [e.entry_id for e in entries[1:]]
    assert run.store.pin(rollouts_of(entries[:1]), used) == []


def test_pin_takes_the_rollouts_of_a_push_as_the_plan_orders_them(run):
    run.push("a.0", size=4)
    run.push("a.1", size=3)
    entries = run.pool()
    used = {e.entry_id: e for e in entries}
    one, two = plan_of(entries, 1).entries
    refs = PlannedRollouts([replace(one, places=[3, 1, 0]), replace(two, places=[1, 2])])
    assert run.store.pin(refs, used) == []
    run.client.hset(entries[0].payload_key, "2", b"short")  # of no use
    assert run.store.pin(refs, used) == []
    run.client.hset(entries[1].payload_key, "1", b"short")
    assert run.store.pin(refs, used) == [entries[1].entry_id]


def test_waiting_reader_is_woken_by_the_commit(run):
    run.lead()
    run.push()
    got = []
    thread = threading.Thread(target=lambda: got.append(run.store.wait_step(1, block_seconds=10)))
    thread.start()
    time.sleep(0.1)
    run.commit()
    thread.join(5)
    assert got[0].step == 1


def test_step_that_was_not_committed_is_waited_for_and_then_none(run):
    begun = time.monotonic()
    assert run.store.wait_step(1, block_seconds=0.05) is None
    assert 0.04 < time.monotonic() - begun < 2
    with pytest.raises(NotFound, match="has no step 1"):
        run.store.read_parts(1)


def test_only_trained_steps_retire(run):
    for i in range(3):
        run.step(f"a.{i}")
    run.train(2)
    assert [run.store.retire(step) for step in (99, 1)] == [2, 0]
    assert run.store.meta().retired == 2
    assert [h.step for h in run.store.headers()] == [3]
    assert len(run.payload_keys()) == 1
    assert run.store.verify().findings == ()


def test_dropped_payloads_stay_until_the_steps_beside_them_retire(run):
    run.step("a.0")
    run.push("a.1")
    run.drop("stale", run.pool())
    run.train(1)
    assert len(run.payload_keys()) == 2
    assert run.store.retire(1) == 2
    assert run.payload_keys() == []
    assert run.client.zcard(run.store.keys.garbage) == 0


def test_payloads_of_drops_are_found_once_while_others_come(run, monkeypatch):
    run.lead()
    for number in (5, 6):
        run.push(f"a.{number}")
    keys = {entry.group_id: [entry.payload_key] for entry in run.pool()}
    run.drop("stale", run.pool()[:1])
    run.drop("stale", run.pool())
    execute, others = run.client.execute_command, iter(range(5))

    def meanwhile(*command, **options):
        reply = execute(*command, **options)
        for number in others if command[0] in ("ZRANGE", "ZSCAN") else ():
            execute("ZADD", run.store.keys.garbage, 0, f"{run.store.keys.payload_prefix}a.{number}:x.1")
            break
        return reply

    monkeypatch.setattr(run.client, "execute_command", meanwhile)
    assert run.store.dropped_payloads([*keys]) == keys


@pytest.mark.parametrize("steps", [1, 2])
def test_retired_step_is_said_to_be_retired(run, steps):
    # With one step the stream is empty afterwards, with two the read gives the next step: both must be noticed.
    for i in range(steps):
        run.step(f"a.{i}")
    run.train(1)
    run.store.retire(1)
    for pull in (lambda: run.store.wait_step(1, block_seconds=5), lambda: run.store.read_parts(1)):
        with pytest.raises(StepRetired) as caught:
            pull()
        assert "steps up to 1 are gone" in str(caught.value)


def test_sweep_takes_more_keys_than_fit_one_round_trip(run):
    run.step("a.0")
    run.train(1)
    run.client.zadd(run.store.keys.garbage, {f"rlb:{run.store.run}:g:x:{i}": 0 for i in range(1100)})
    assert run.store.retire(1) == 1101


def test_headers_are_found_by_range(run):
    for i in range(4):
        run.step(f"a.{i}")
    assert [h.step for h in run.store.headers(2, 3)] == [2, 3]
    assert [h.step for h in run.store.headers(3)] == [3, 4]


def test_run_without_a_step_has_no_state(run):
    assert run.store.load_state() is None
    assert list(run.store.headers()) == []
