"""PUSH in the place of a pending push, and the claims of scorers: on a real server and in memory."""

from __future__ import annotations

import time

import pytest
from store_runs import Run

from rlbuffer.client.producer import Producer
from rlbuffer.errors import InvalidRollout
from rlbuffer.testing import make_group

pytest_plugins = ("store_fixtures",)


def group(**changes):
    return make_group(env="a", size=2, group_id="a.0", **changes)


def replace(run: Run, sequence: int, replaces: str, *, incarnation: str = "s", **changes) -> tuple[str, str]:
    return run.store.push(
        group(**changes),
        producer="s",
        incarnation=incarnation,
        sequence=sequence,
        epoch=run.meta.epoch,
        replaces=replaces,
    )


def test_a_push_takes_the_place_of_another_and_the_account_does_not_move(run: Run):
    run.push("a.0", needs=["ref_logprobs"])
    (old,) = run.pool()
    before = run.store.ledger()
    status, entry_id = replace(run, 1, old.entry_id)
    assert status == "stored"
    (new,) = run.pool()
    assert (new.entry_id, new.replaces, new.info.needs) == (entry_id, old.entry_id, ())
    assert new.pushed_ms == old.pushed_ms == int(old.entry_id.split("-")[0])
    assert run.store.ledger() == before
    assert run.store.verify().findings == ()
    # The replaced entry is garbage from now on, and swept with the next retirement.
    assert run.client.zscore(run.store.keys.garbage, old.payload_key) == 0
    run.lead()
    run.store.retire(0)
    assert run.payload_keys() == [new.payload_key]


def test_when_replaced_again_it_still_knows_when_it_was_first_pushed(run: Run):
    run.push("a.0", needs=["ref_logprobs", "reward"])
    (old,) = run.pool()
    _, between = replace(run, 1, old.entry_id, needs=["reward"])
    time.sleep(0.002)
    replace(run, 2, between)
    (new,) = run.pool()
    assert (new.replaces, new.pushed_ms) == (between, old.pushed_ms)


def test_the_second_scorer_of_a_push_is_a_duplicate_and_changes_nothing_but_its_sequence(run: Run):
    run.push("a.0", needs=["ref_logprobs"])
    (old,) = run.pool()
    replace(run, 1, old.entry_id, incarnation="first")
    pool, ledger = run.pool(), run.store.ledger()
    assert replace(run, 1, old.entry_id, incarnation="second") == ("duplicate", "")
    assert replace(run, 1, old.entry_id, incarnation="second") == ("duplicate", "")
    assert (run.pool(), run.store.ledger()) == (pool, ledger)
    # Its own payload is gone, and its next push follows.
    left = [key for key in run.payload_keys() if "second.1" in key]
    assert all(run.client.pttl(key) > 0 for key in left) if run.is_cluster else not left
    run.push("a.1", needs=["ref_logprobs"])
    last = run.pool()[-1]
    made = make_group(env="a", size=2, group_id="a.1")
    status, _ = run.store.push(
        made, producer="s", incarnation="second", sequence=2, epoch=run.meta.epoch, replaces=last.entry_id
    )
    assert status == "stored"
    assert run.store.verify().findings == ()


def test_a_repeated_replacement_is_a_duplicate_with_its_entry(run: Run):
    run.push("a.0", needs=["ref_logprobs"])
    (old,) = run.pool()
    _, entry_id = replace(run, 1, old.entry_id)
    before = run.control_keys()
    assert replace(run, 1, old.entry_id) == ("duplicate", entry_id)
    assert run.control_keys() == before


def test_other_rollouts_cannot_take_the_place_of_a_push(run: Run):
    run.push("a.0", needs=["ref_logprobs"])
    (old,) = run.pool()
    before = run.control_keys()
    other = make_group(env="a", size=3, group_id="a.0", lengths=[8, 8, 8])
    with pytest.raises(InvalidRollout) as raised:
        run.store.push(other, producer="s", incarnation="s", sequence=1, epoch=run.meta.epoch, replaces=old.entry_id)
    assert f"{old.entry_id}, which holds 2 rollouts and {old.tokens} tokens" in str(raised.value)
    assert run.control_keys() == before


def test_a_push_whose_id_another_group_has_got_is_as_gone_as_any(run: Run):
    """A server that lost writes, and whose clock was set back, gives an id again."""
    run.push("a.0", needs=["ref_logprobs"])
    (old,) = run.pool()
    fields = dict(run.client.xrange(run.store.keys.pool)[0][1])
    run.client.delete(run.store.keys.pool)
    run.client.xadd(run.store.keys.pool, fields | {b"group": b"a.1"}, id=old.entry_id)
    assert replace(run, 1, old.entry_id) == ("duplicate", "")
    assert [entry.group_id for entry in run.pool()] == ["a.1"]


def test_a_server_that_lost_a_replacement_gets_it_again(run: Run):
    """The writer keeps what it replaced with what."""
    run.push("a.0", needs=["ref_logprobs"])
    (old,) = run.pool()
    fields = dict(run.client.xrange(run.store.keys.pool)[0][1])
    scorer = Producer(run.store, "s", "s", epoch=run.meta.epoch)
    scorer.push([(group(), old.entry_id)])
    producer = run.store.keys.producer("s", "s")
    run.client.delete(run.store.keys.pool, producer)
    run.client.xadd(run.store.keys.pool, fields, id=old.entry_id)
    run.push("a.1", needs=["ref_logprobs"])
    last = run.pool()[-1]
    (pushed,) = scorer.push([(make_group(env="a", size=2, group_id="a.1"), last.entry_id)])
    assert pushed.status == "stored"
    assert [(e.group_id, e.info.needs, bool(e.replaces)) for e in run.pool()] == [("a.0", (), True), ("a.1", (), True)]


def test_a_claim_is_one_scorers_until_it_expires_or_is_given_back(run: Run):
    run.push("a.0", needs=["ref_logprobs"])
    run.push("a.1", needs=["ref_logprobs"])
    first, second = [entry.entry_id for entry in run.pool()]

    def claim(owner: str, *ids: str):
        return run.store.claim_scoring(ids, owner=owner, ttl_seconds=60)

    assert claim("one", first) == ({first}, frozenset())
    assert claim("two", first, second) == ({second}, frozenset())
    assert claim("one", first) == ({first}, frozenset())
    run.store.renew_scoring([first, second], owner="one", ttl_seconds=60)
    assert run.client.pttl(run.store.keys.scoring(first)) > 30_000
    run.store.release_scoring([first, second], owner="one")
    assert claim("three", first, second) == ({first}, frozenset())
    run.client.pexpire(run.store.keys.scoring(first), 1)
    deadline = time.monotonic() + 20
    while claim("four", first)[0] != {first}:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert claim("two", second) == ({second}, frozenset())


def test_what_is_not_pending_any_more_is_not_claimed_and_leaves_no_claim(run: Run):
    run.push("a.0", needs=["ref_logprobs"])
    (entry,) = run.pool()
    run.lead()
    run.drop("operator", [entry])
    assert run.store.claim_scoring([entry.entry_id], owner="one", ttl_seconds=60) == (frozenset(), {entry.entry_id})
    assert run.client.exists(run.store.keys.scoring(entry.entry_id)) == 0
    assert run.store.claim_scoring([], owner="one", ttl_seconds=60) == (frozenset(), frozenset())
