"""Writes of a worker's own hand end no batcher, no scorer and no view, and `verify` names it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from daemon_runs import Served
from every_role import EveryRole
from looks import evaluations
from store_runs import Run

from rlbuffer.config.batcher import BatcherConfig
from rlbuffer.errors import InvalidRollout, LeaseLost, RunDamaged, ServerRefused, WrongType
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.testing import make_group
from rlbuffer.wire.payload import encode_push

pytest_plugins = ("store_fixtures",)
CONFIG = BatcherConfig(64, step_groups=1, max_age=9)
LARGEST = "18446744073709551615-18446744073709551615"


def set_string(name: str) -> Callable[[Run], object]:
    return lambda run: run.client.set(getattr(run.store.keys, name), "x")


def entry_with(run: Run, **changed: str | bytes) -> dict[str, str | bytes]:
    """A pool entry as PUSH makes it, with some fields changed."""
    group = make_group(env="a", group_id="a.77")
    push = encode_push(group)
    fields = {"env": "a", "group": "a.77", "key": "u.77", "rollouts": "2", "tokens": str(push.info.tokens)}
    return {**fields, "metadata": push.metadata, **changed}


MOVES: list[tuple[str, Callable[[Run], object], str]] = [
    ("ledger value", lambda r: r.client.hset(r.store.keys.ledger, "a:packed:rollouts", "x"), ":ledger holds no number"),
    ("ledger largest", lambda r: r.client.hset(r.store.keys.ledger, "a:packed:tokens", str(2**63 - 1)), "I10"),
    ("ledger field", lambda r: r.client.hset(r.store.keys.ledger, b"\xff:x", "1"), ""),
    ("ledger type", set_string("ledger"), ":ledger holds a string"),
    ("entry of nothing", lambda r: r.client.xadd(r.store.keys.pool, {"x": "y"}), ""),
    ("entry of garbage", lambda r: r.client.xadd(r.store.keys.pool, entry_with(r, metadata=b"\x81\xa1")), ""),
    ("entry of a wrong total", lambda r: r.client.xadd(r.store.keys.pool, entry_with(r, tokens="9" * 30)), ""),
    ("entry of a spaced key", lambda r: r.client.xadd(r.store.keys.pool, entry_with(r, key="u 77")), ""),
    ("entry of a long key", lambda r: r.client.xadd(r.store.keys.pool, entry_with(r, key="u.7" + "7" * 5_000_000)), ""),
    ("entry without payload", lambda r: r.client.xadd(r.store.keys.pool, entry_with(r)), ""),
    ("entry of the future", lambda r: r.client.xadd(r.store.keys.pool, entry_with(r), id="9999999999999-0"), ""),
    ("largest entry", lambda r: r.client.xadd(r.store.keys.pool, entry_with(r), id=LARGEST), ""),
    ("heartbeat", lambda r: r.client.hset(r.store.keys.heartbeats("worker"), "w", "x"), ""),
    ("record", lambda r: r.client.hset(r.store.keys.heartbeats("scorer"), "w", b"5 \x93\x01"), ""),
    ("heartbeats type", lambda r: r.client.set(r.store.keys.heartbeats("scorer"), "x"), ":scorers holds a string"),
    ("ticket", lambda r: r.client.zadd(r.store.keys.tickets("a"), {"x": 0, "5": float("inf")}), ""),
    ("number", lambda r: r.client.hset(r.store.keys.numbers, "a", "-1"), ":numbers holds no number"),
    ("producer", lambda r: r.client.hset(r.store.keys.producer("w", "u"), "sequence", "x"), ""),
    ("result", lambda r: r.client.xadd(r.store.keys.eval, {"env": b"\xff"}), ""),
    ("garbage", lambda r: r.client.zadd(r.store.keys.garbage, {"rlb:other:g:x": "inf"}), ""),
]


@pytest.mark.parametrize(("name", "move", "finding"), MOVES, ids=[name for name, _, _ in MOVES])
def test_no_value_that_a_worker_writes_ends_a_batcher_or_a_view(
    run: Run, served: Served, name: str, move: Callable[[Run], object], finding: str
) -> None:
    run.push("a.1")
    served.serve(CONFIG)
    store = run.again()
    move(run)
    served.wait_for(lambda: run.client.hget(run.store.keys.meta, "config"))
    served.stop()
    served.serve(CONFIG)  # one that begins with it, too

    found = [f"{f.invariant} {f.message}" for f in store.verify().findings]
    assert not finding or any(finding in line for line in found), found
    for kind in ("worker", "scorer"):
        assert "w" not in store.heartbeats(kind)
    evaluations(store)
    store.ledger()
    if "type" not in name:
        assert all(0 <= number < 10**15 for number in store.take_tickets("a", 4, ttl_seconds=60))

    trained(store, served)
    assert served.errors == []


def trained(store: EveryRole, served: Served) -> None:
    """A trainer asks for a step and gets it."""
    number = store.trainer().number or store.attempt(uuid="t", world_size=1, resume_step=0).number
    store.announce(number, PolicyVersion(version=0))

    def has_step() -> bool:
        store.report(number, epoch=store.meta().epoch, trained=0, digest="", oldest_kept=0)
        return store.meta().step >= 1

    served.wait_for(has_step)


def test_a_leader_reads_on_once_a_pool_that_took_no_push_any_more_is_removed(run: Run, served: Served) -> None:
    served.serve(CONFIG)
    served.wait_for(lambda: served.said("ready"))
    run.client.xadd(run.store.keys.pool, entry_with(run), id=LARGEST)
    served.wait_for(lambda: served.said("drop"))
    with pytest.raises(ServerRefused, match=r"takes no push .*Remove the pool \(DEL\)"):
        run.push("a.1")
    run.client.delete(run.store.keys.pool)
    run.push("a.1")
    store = run.again()
    trained(store, served)
    assert store.wait_step(1, block_seconds=0).group_ids == ("a.1",)


def test_a_payload_of_another_type_is_one_that_is_not_there(run: Run, served: Served) -> None:
    run.push("a.1")
    run.push("a.2")
    bad, good = run.pool()
    run.client.delete(bad.payload_key)
    run.client.set(bad.payload_key, "x")
    served.serve(CONFIG)
    store = run.again()
    trained(store, served)
    assert served.said("drop")[0]["detail"] == "a payload is missing or of another size than its metadata says"
    assert store.ledger().envs["a"].dropped["invalid"][0] == bad.rollouts
    assert store.wait_step(1, block_seconds=0).group_ids == ("a.2",)

    members = store.read_parts(1)[0].rollouts
    run.client.delete(good.payload_key)
    run.client.set(good.payload_key, "x")
    assert store.read_payloads(members) == [None] * len(members)
    assert store.read_group_payloads([good.payload_key]) == [None]
    missing = [f for f in store.verify().findings if f.message.endswith("is missing")]
    assert len(missing) == len(members)


def test_the_sweep_removes_only_payloads_of_its_own_run(run: Run) -> None:
    run.lead()
    other = f"{{rlb:other-{run.store.run}}}:meta"
    own = f"{run.store.keys.payload_prefix}a.1:u.1"
    run.client.hset(other, "schema", "3")
    run.client.hset(own, "0", "x")
    run.client.zadd(run.store.keys.garbage, {other: 0, run.store.keys.meta: 0, own: 0})
    assert run.store.retire(0) == 1
    assert run.client.exists(other) == 1
    assert run.store.meta() == run.meta
    assert run.client.exists(own) == 0
    assert run.client.zcard(run.store.keys.garbage) == 0
    run.client.delete(other)


def test_an_entry_can_only_say_that_it_took_the_place_of_the_same_rollouts(run: Run, served: Served) -> None:
    run.push("a.1")
    victim = run.pool()[0].entry_id
    run.client.xadd(run.store.keys.pool, entry_with(run, replaces=victim))
    served.serve(CONFIG)
    store = run.again()
    trained(store, served)
    assert store.wait_step(1, block_seconds=0).group_ids == ("a.1",)


def test_a_key_of_another_type_is_waited_out_and_named(run: Run, served: Served) -> None:
    run.client.set(run.store.keys.pool, "x")
    with pytest.raises(WrongType) as caught:
        run.pool()
    assert str(caught.value) == (
        f"the server at {run.store.connection.address} refused: a key of the run holds another type than rlbuffer puts "
        "there. `rlbuffer verify` names it"
    )
    served.serve(CONFIG)
    served.wait_for(lambda: served.said("leader", state="lost"))
    assert f"{run.store.keys.pool} holds a string, not a stream: remove it (DEL)" in {
        finding.message for finding in run.store.verify().findings
    }
    run.client.delete(run.store.keys.pool)
    served.wait_for(lambda: served.said("ready"))


def test_an_entry_that_was_exchanged_behind_the_leader_is_read_again(run: Run) -> None:
    run.push("a.1")
    run.lead()
    read = run.pool()
    run.client.delete(run.store.keys.pool)
    run.client.xadd(run.store.keys.pool, entry_with(run, rollouts="7"), id=read[0].entry_id)
    with pytest.raises(LeaseLost, match=r"^pool entry .* of run .* is another one than was read: read again$"):
        run.commit(entries=read)


@pytest.mark.parametrize("missing", ["env", "group", "key"])
def test_an_entry_that_was_exchanged_for_no_push_is_gone_and_the_commit_writes_nothing(run: Run, missing: str) -> None:
    run.push("a.1")
    run.lead()
    read = run.pool()
    fields = entry_with(run, tokens=str(read[0].tokens))
    del fields[missing]
    run.client.delete(run.store.keys.pool)
    run.client.xadd(run.store.keys.pool, fields, id=read[0].entry_id)
    before = run.control_keys()
    assert run.commit(entries=read) == ("gone", [read[0].entry_id])
    assert run.control_keys() == before


# -- a run without its meta --------------------------------------------------------------------------------------------
def without_meta(run: Run) -> str:
    """Takes the meta away. Returns the message for whoever opens the run."""
    run.client.delete(run.store.keys.meta)
    keys, name = run.store.keys, run.store.run
    return (
        f"run {name!r} has no meta ({keys.meta}), but {keys.pool} is there: it would begin anew at step 0 beside "
        f"that. `rlbuffer runs reset {name} --yes` removes what is left"
    )


def test_a_run_without_its_meta_is_not_begun_anew(run: Run, served: Served) -> None:
    run.push("a.1")
    told = without_meta(run)
    for ask in (run.store.open_run, run.store.meta):
        with pytest.raises(RunDamaged) as caught:
            ask()
        assert str(caught.value) == told
    keys = (run.store.keys.meta, run.store.keys.pool)
    assert run.store.move("open", keys, (2,)) == [b"LEFT", run.store.keys.pool.encode()]  # where it is decided
    served.serve(CONFIG)
    served.wait_for(lambda: served.errors, checks_errors=False)
    assert [str(error) for error in served.errors] == [told]
    assert run.client.exists(run.store.keys.meta) == 0
    run.store.delete_run()
    assert run.store.open_run().step == 0


def test_a_batcher_at_work_waits_for_a_person_when_the_meta_goes(run: Run, served: Served) -> None:
    run.push("a.1")
    served.serve(CONFIG)
    served.wait_for(lambda: served.said("ready"))
    told = without_meta(run)
    served.wait_for(lambda: any(event["reason"] == told for event in served.said("leader", state="lost")))
    run.store.delete_run()
    served.wait_for(lambda: len(served.said("ready")) == 2)


def test_a_batcher_at_work_says_that_its_run_begins_again(run: Run, served: Served) -> None:
    """A server without a file that starts again is empty; so is one after FLUSHALL."""
    served.serve(CONFIG)
    served.wait_for(lambda: served.said("ready"))
    run.store.delete_run()
    served.wait_for(lambda: len(served.said("ready")) == 2)
    assert [event["run"] for event in served.said("begins again")] == [run.store.run]
    assert run.store.meta().step == 0


# -- a trainer that says nonsense --------------------------------------------------------------------------------------
def test_a_batcher_at_work_waits_for_another_trainer_where_one_has_written_what_is_no_number(
    run: Run, served: Served
) -> None:
    served.serve(CONFIG)
    served.wait_for(lambda: served.said("ready"))
    run.client.hset(run.store.keys.trainer, mapping={"number": 1, "world_size": "2.0"})
    why = (
        f"{run.store.keys.trainer} of run {run.store.run!r} holds '2.0' as world_size, which is no whole number: start "
        "the trainer again, which writes a new one"
    )
    served.wait_for(lambda: any(event["reason"] == why for event in served.said("leader", state="lost")))
    with pytest.raises(InvalidRollout, match=r"^world_size: expected an integer, got 2\.0$"):
        run.store.attempt(uuid="t", world_size=2.0, resume_step=0)  # type: ignore[arg-type]
    run.store.attempt(uuid="t", world_size=2, resume_step=0)
    served.wait_for(lambda: len(served.said("ready")) == 2)


def test_a_record_of_a_drop_is_short_whatever_its_pushes_say(run: Run, served: Served) -> None:
    group = make_group(env="a", group_id="a.5", size=70)
    for k, rollout in enumerate(group.rollouts[:64]):
        run.push(replace(group, rollouts=(rollout,), needs=tuple(f"{k:03d}{n:060d}" for n in range(900))))
    config = replace(CONFIG, group_timeout_seconds=1.0)
    served.serve(config)
    store = run.again()
    number = store.attempt(uuid="t", world_size=1, resume_step=0).number
    store.announce(number, PolicyVersion(version=0))

    def has_dropped() -> bool:
        store.report(number, epoch=store.meta().epoch, trained=0, digest="", oldest_kept=0)
        return bool(served.said("drop"))

    served.wait_for(has_dropped)
    assert all(len(fields[b"record"]) < 20_000 for _, fields in run.client.xrange(run.store.keys.history))
    served.stop()
    served.serve(config)
    run.push("a.1")
    trained(store, served)
    assert served.errors == []


def test_a_record_that_cannot_be_read_ends_no_leader(run: Run, served: Served) -> None:
    for data in (b"\xc1", b"\x01", bytes([0xDB, 0, 80, 0, 0]) + b"7" * 80 * 2**16):
        run.client.xadd(run.store.keys.history, {"record": data})
    served.serve(CONFIG)
    run.push("a.1")
    trained(run.again(), served)
    assert served.errors == []
    assert len(run.store.history()) >= 3
