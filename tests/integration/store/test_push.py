"""PUSH and INGEST: exactly once, and what happens to what cannot be read."""

from __future__ import annotations

import threading
import time

import pytest
from store_runs import Run

from rlbuffer.client.writer import Writer
from rlbuffer.errors import ConfigError, ServerRefused
from rlbuffer.store.producer import PushOrigin, _Push
from rlbuffer.store.records import PartRollout
from rlbuffer.testing import make_group
from rlbuffer.wire import payload

pytest_plugins = ("store_fixtures",)


def send(run: Run, sequence: int, *, group_id: str = "a.0", epoch: int | None = None, store=None) -> tuple[str, str]:
    group = make_group(env="a", size=2, group_id=group_id)
    where = store or run.store
    return where.push(group, producer="w", incarnation="u", sequence=sequence, epoch=epoch or run.meta.epoch)


def test_pushed_group_is_pending_and_counted_as_pushed(run):
    status, entry_id = send(run, 1)
    (entry,) = run.pool()
    assert (status, entry.entry_id, entry.group_id, entry.env) == ("stored", entry_id, "a.0", "a")
    account = run.store.ledger().envs["a"]
    assert account.pushed == account.pending == (2, entry.tokens)
    assert entry.payload_key == f"rlb:{run.store.run}:g:a.0:u.1"
    assert run.client.pttl(entry.payload_key) == -1


def test_payloads_come_back_as_they_were_pushed(run):
    group = run.push("a.0", size=3, answer="42")
    (entry,) = run.pool()
    refs = [
        PartRollout(payload_key=entry.payload_key, index=i, info=r, group_id="a.0", env="a", adapter="", advantage=0.0)
        for i, r in enumerate(entry.info.rollouts)
    ]
    # Out of order and one twice: the answer follows the question.
    order = [2, 0, 2, 1]
    payloads = run.store.read_payloads([refs[i] for i in order])
    assert [payload.decode_rollout(p, expected=refs[i].info) for i, p in zip(order, payloads, strict=True)] == [
        group.rollouts[i] for i in order
    ]
    assert run.store.read_payloads([]) == []
    (answer,) = run.store.read_group_payloads([entry.payload_key])
    assert payload.decode_group_payload(answer)[0] == "42"


def test_a_push_that_is_sent_again_by_anybody_is_a_duplicate_and_touches_nothing(run):
    # PEXPIRE on a persisted hash gives it a time to live again: a week later a committed step would lose its payload.
    run.step("a.0")
    stored = [send(run, sequence, group_id=f"a.{sequence}") for sequence in (2, 3)]
    before = run.control_keys(), run.payload_keys()
    for store in (run.store, run.again()):
        again = [send(run, sequence, group_id=f"a.{sequence - 1}", store=store) for sequence in (1, 2, 3)]
        assert again == [("duplicate", ""), ("duplicate", ""), ("duplicate", stored[1][1])]
    assert (run.control_keys(), run.payload_keys()) == before
    assert run.store.verify().ok


def test_push_is_a_duplicate_however_long_its_producer_was_silent(run):
    stored = send(run, 1)
    for key in run.client.scan_iter(match=f"*{run.store.run}*"):
        run.client.pexpire(key, 1, xx=True)  # a week and more passes: what has a time to live is gone
    assert send(run, 1, store=run.again()) == ("duplicate", stored[1])
    assert len(run.pool()) == 1


def _phase_1(run: Run, sequence: int, group_id: str) -> None:
    """The first half of a push that comes when the second half was carried out long ago."""
    source = PushOrigin(run.store.keys, "w", "u", run.meta.epoch, is_spread=run.is_cluster)
    run.store._store_payloads([_Push(source, sequence, make_group(env="a", size=2, group_id=group_id))])


def test_first_half_of_a_push_that_comes_late_gives_nothing_in_use_a_time_to_live(run):
    run.step("a.0")
    send(run, 2, group_id="a.1")
    keys = run.payload_keys()
    _phase_1(run, 1, "a.0")
    _phase_1(run, 2, "a.1")
    assert [run.client.pttl(key) for key in keys] == [-1, -1]
    assert len(run.payload_keys()) == (2 if run.is_cluster else 4)  # the late ones expire, or find their names taken
    assert run.store.verify().ok


def test_late_first_half_goes_with_the_next_repetition_of_its_push(run):
    send(run, 1)
    _phase_1(run, 1, "a.0")
    assert send(run, 1)[0] == "duplicate"
    assert len(run.payload_keys()) == 1


def test_push_whose_payload_expired_between_its_halves_does_not_become_pending(run, monkeypatch):
    if run.is_cluster:
        pytest.skip("PUSH does not reach the payload's shard: PIN finds it, test_clusters.py")
    monkeypatch.setattr("rlbuffer.store.producer.WEEK_MS", 0)
    with pytest.raises(ServerRefused) as caught:
        send(run, 1)
    name = run.store.keys.unnamed_payload("a.0", "u.1")
    assert str(caught.value) == f"the payload of push u.1 is not on the server any more ({name}): sent again"
    assert run.pool() == []
    monkeypatch.undo()
    assert send(run, 1)[0] == "stored"


def test_changed_group_of_fewer_rollouts_may_be_pushed_under_the_sequence_that_was_refused(run):
    # The refused one has left its payload under the same name.
    run.client.hset(run.store.keys.unnamed_payload("a.0", "u.1"), "7", b"of another")
    assert send(run, 1)[0] == "stored"
    assert set(run.client.hkeys(run.pool()[0].payload_key)) == {b"0", b"1"}


def test_push_whose_payload_was_lost_before_it_became_pending_is_sent_whole_again(run):
    # As after a power cut between the two phases: the writer repeats the same sequence.
    send(run, 1)
    for key in (*run.payload_keys(), run.store.keys.producer("w", "u"), run.store.keys.pool):
        run.client.delete(key)
    assert send(run, 1)[0] == "stored"
    assert run.client.hlen(run.payload_keys()[0]) >= 2


def test_entry_with_unreadable_metadata_is_named_and_still_accounted(run):
    keys = run.store.keys
    fields = {"env": "a", "group": "a.9", "key": "u.9", "rollouts": "3", "tokens": "30", "metadata": b"\xc1junk"}
    run.client.xadd(keys.pool, fields)
    (entry,) = run.pool()
    assert entry.info is None
    assert entry.error.startswith("metadata: ")
    assert (entry.env, entry.group_id, entry.rollouts, entry.tokens) == ("a", "a.9", 3, 30)


def test_entry_whose_metadata_disagrees_with_its_counts_is_invalid(run):
    group = make_group(env="a", size=2, group_id="a.0", lengths=[5, 5])
    fields = {"env": "a", "group": "a.0", "key": "u.1", "rollouts": "2", "tokens": "11"}
    run.client.xadd(run.store.keys.pool, {**fields, "metadata": payload.encode_push(group).metadata})
    (entry,) = run.pool()
    assert entry.info is None
    assert "disagrees" in entry.error


def test_pool_is_read_in_pages_each_entry_once(run):
    for i in range(5):
        run.push(f"a.{i}")
    seen, cursor = [], "0-0"
    while page := run.store.read_pool(cursor, count=2):
        assert len(page) <= 2
        seen += [entry.group_id for entry in page]
        cursor = page[-1].entry_id
    assert seen == [f"a.{i}" for i in range(5)]


def test_blocked_reader_of_the_pool_is_woken_by_a_push(run):
    got = []
    thread = threading.Thread(target=lambda: got.extend(run.store.read_pool(block_seconds=1.9)))
    thread.start()
    time.sleep(0.1)
    send(run, 1)
    thread.join(5)
    assert [entry.group_id for entry in got] == ["a.0"]


@pytest.mark.parametrize("character", " :.\n\t\0{}*?[é\u202e")
def test_a_character_that_divides_keys_and_records_is_refused_in_an_incarnation(run, character):
    group = make_group(env="a", size=2, group_id="a.0")
    for make in (
        lambda: Writer(run.store, "w", epoch=run.meta.epoch, incarnation=f"a{character}b"),
        lambda: run.store.push(
            group, producer="w", incarnation=f"a{character}b", sequence=1, epoch=run.meta.epoch, replaces=""
        ),
    ):
        with pytest.raises(ConfigError) as caught:
            make()
        assert str(caught.value).startswith("the incarnation must match [A-Za-z0-9_-]{1,64}, got ")
    assert run.pool() == []


@pytest.mark.parametrize("name", ["", "a b", "a\x1b[2J", "a\u202eb", "w" * 129, "w\n"])
def test_a_worker_name_that_cannot_stand_in_a_key_is_refused(run, name):
    with pytest.raises(ConfigError, match=r"the worker name must match \[A-Za-z0-9_\.:@/-\]\{1,128\}, got "):
        Writer(run.store, name, epoch=run.meta.epoch)


@pytest.mark.parametrize("suffix", ["first second.1", "u:1.1", "", "u.1 8 9", "u.x"])
def test_an_entry_whose_payload_no_writer_can_have_stored_is_invalid(run, suffix):
    """A push by hand: COMMIT would keep it for another use as a record that a space divides."""
    keys, source = run.store.keys, PushOrigin(run.store.keys, "w", "u", run.meta.epoch, is_spread=run.is_cluster)
    push = _Push(source, 1, make_group(env="a", size=2, group_id="a.0"))
    push.key, push.name = keys.unnamed_payload("a.0", suffix), keys.payload("a.0", suffix)
    push.args[2] = push.args[2] and push.key
    push.args[5] = suffix
    run.store._store_payloads([push])
    run.store.move(
        "push",
        (keys.meta, keys.pool, source.key, keys.ledger, keys.garbage),
        push.args,
        repeat=False,
    )
    (entry,) = run.pool()
    assert entry.info is None
    assert "not with INCARNATION.SEQUENCE" in entry.error
