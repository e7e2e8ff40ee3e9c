"""`verify` finds nothing in a healthy run, and each kind of damage in a damaged one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from store_runs import Run

from rlbuffer.testing import make_group
from rlbuffer.wire import payload
from rlbuffer.wire.checksum import sealed, unsealed

pytest_plugins = ("store_fixtures",)


@pytest.fixture
def busy(run: Run) -> Run:
    """Step 1 retired, step 2 trained, steps 3 and 4 packed, one push pending, one dropped."""
    run.lead()
    run.store.set_config({"max_age": 1, "envs": {"b": {"max_age": 0}}}, "d")
    for i in range(4):
        run.step(f"a.{i}", f"b.{i}")
    run.train(2, oldest_kept=1)
    run.store.retire(1)
    run.push("a.8", version=4)
    run.drop("stale", run.pool())
    run.push("a.9", version=4)
    return run


def test_healthy_run_has_no_findings(busy):
    report = busy.store.verify()
    assert report.findings == ()
    assert report.ok
    assert report.checked == {
        "entries": 1,
        "rollouts": 14,
        "steps": 3,
        "payloads": 14,
        "payloads_decoded": 8,
        "payload_keys_unreferenced": 0,
        "open_rollouts": 0,
        "open_rollouts_ended": 0,
        "open_rollouts_pushed": 0,
    }


def _payload(run: Run, step: int = 3) -> str:
    return run.store.read_parts(step)[0].rollouts[0].payload_key


def _rewrite(run: Run, entry_id: str, **fields: bytes | str | None) -> None:
    """Changes an entry of the steps stream in place: the stream is built again, as ids cannot be used twice."""
    key = run.store.keys.steps
    stream = run.client.xrange(key)
    run.client.delete(key)
    for stored_id, old in stream:
        new = {**old, **({k.encode(): v for k, v in fields.items()} if stored_id.decode() == entry_id else {})}
        if None not in new.values():
            run.client.xadd(key, new, id=stored_id)


def _header(run: Run, step: int, /, **changes: object) -> None:
    fields = dict(run.client.xrange(run.store.keys.steps, f"{step}-0", f"{step}-0")[0][1])
    record = {**payload.loads(unsealed(fields[b"header"], "header"), limit=2**20), **changes}
    _rewrite(run, f"{step}-0", header=sealed(payload.dumps(record)))


def _same_rollouts_again(run: Run) -> None:
    # A second push of what step 4 holds, committed as step 5: only possible when the batcher fails.
    group = make_group(env="a", size=2, version=3, group_id="a.3")
    run.sequence += 1
    run.store.push(group, producer="w", incarnation="u", sequence=run.sequence, epoch=run.meta.epoch)
    run.commit(entries=run.pool()[1:])


def _too_old(run: Run) -> None:
    run.drop("stale", run.pool())
    run.push("b.4", version=3)
    run.commit()


def _damage(run: Run) -> None:
    key = _payload(run)
    data = bytearray(run.client.hget(key, "0"))
    data[-1] ^= 1
    run.client.hset(key, "0", bytes(data))


def _orphan(run: Run) -> None:
    run.client.hset(run.store.keys.payload("x.1", "u.77"), "0", b"x")


def _twice_pending(run: Run) -> None:
    key = _payload(run, 4)
    group, suffix = key.removeprefix(run.store.keys.payload_prefix).rsplit(":", 1)
    (_, fields) = run.client.xrange(run.store.keys.pool)[0]
    run.client.xadd(run.store.keys.pool, {**fields, b"group": group, b"key": suffix})


def _expiring(run: Run, key: str) -> None:
    run.client.pexpire(key, 60_000)


CORRUPTIONS: dict[str, tuple[str, Callable[[Run], object]]] = {
    "expiring step": ("I11", lambda r: _expiring(r, _payload(r))),
    "expiring pool": ("I11", lambda r: _expiring(r, r.pool()[0].payload_key)),
    "expiring producer": ("I11", lambda r: _expiring(r, r.store.keys.producer("w", "u"))),
    "pushed": ("I10", lambda r: r.client.hincrby(r.store.keys.ledger, "a:pushed:rollouts", 1)),
    "tokens": ("I10", lambda r: r.client.hincrby(r.store.keys.ledger, "a:dropped:stale:tokens", -1)),
    "trained": ("I10", lambda r: r.client.hset(r.store.keys.ledger, "b:trained:rollouts", 1)),
    "negative": ("I10", lambda r: r.client.hset(r.store.keys.ledger, "a:dropped:late:rollouts", -1)),
    "lost push": ("I10", lambda r: r.client.xdel(r.store.keys.pool, r.pool()[0].entry_id)),
    # The counts that COMMIT wrote down and those of the stored parts.
    "commit totals": ("I10", lambda r: _rewrite(r, "4-0", packed="a 2 1 1 b 2 1 1")),
    "hole": ("I4", lambda r: [r.client.xdel(r.store.keys.steps, f"3-{i}") for i in range(3)]),
    "part lost": ("I4", lambda r: r.client.xdel(r.store.keys.steps, "3-2")),
    "header lost": ("I4", lambda r: r.client.xdel(r.store.keys.steps, "3-0")),
    "part junk": ("I4", lambda r: _rewrite(r, "3-1", part=b"\xc1")),
    "header changed": ("I4", lambda r: _header(r, 3, closed_by="fill")),
    "header normaliser": ("I4", lambda r: _header(r, 3, normalizers={"loss_tokens": 1, "rollouts": 4, "groups": 2})),
    "header step": ("I4", lambda r: _header(r, 3, step=2)),
    "chain": ("I4", lambda r: _rewrite(r, "3-0", digest="0" * 64)),
    "last digest": ("I4", lambda r: r.client.hset(r.store.keys.meta, "digest", "x")),
    "trained digest": ("I3", lambda r: r.client.hset(r.store.keys.trainer, "digest", "x")),
    "used twice": ("I1", _same_rollouts_again),
    "pending and packed": ("I1", _twice_pending),
    "too old": ("I5", _too_old),
    "foreign group": ("I6", lambda r: _header(r, 3, group_ids=["a.2"])),
    "tombstone": ("I6", lambda r: r.client.zrem(r.store.keys.closed, "a.2")),
    "trained ahead": ("I8", lambda r: r.client.hset(r.store.keys.trainer, "trained", 9)),
    "retired ahead": ("I8", lambda r: r.client.hset(r.store.keys.meta, "retired", 3)),
    "settings of a revision to come": ("I8", lambda r: r.client.hset(r.store.keys.meta, "revision", 0)),
    "payload damaged": ("I2", _damage),
    "payload gone": ("I11", lambda r: r.client.delete(_payload(r))),
    "pending is garbage": ("I11", lambda r: r.client.zadd(r.store.keys.garbage, {r.pool()[0].payload_key: 4})),
    "live is swept": ("I11", lambda r: r.client.zadd(r.store.keys.garbage, {_payload(r): 1})),
    "never swept": ("I11", lambda r: r.client.zrem(r.store.keys.garbage, _payload(r))),
    "orphan": ("I11", _orphan),
    "unreadable push": ("I13", lambda r: r.client.xadd(r.store.keys.pool, UNREADABLE)),
}
UNREADABLE = {"env": "c", "group": "c.0", "key": "u.50", "rollouts": "3", "tokens": "30", "metadata": b"\xc1"}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_damage_is_found(busy, name):
    if busy.is_cluster and name == "expiring pool":
        pytest.skip("what is pending has a time to live there until a leader has read it")
    invariant, corrupt = CORRUPTIONS[name]
    corrupt(busy)
    assert invariant in {finding.invariant for finding in busy.store.verify().findings}


def test_payload_that_a_dead_producer_left_is_no_finding_while_it_will_expire(busy):
    _orphan(busy)
    busy.client.pexpire(busy.store.keys.payload("x.1", "u.77"), 60_000)
    report = busy.store.verify()
    assert report.findings == ()
    assert report.checked["payload_keys_unreferenced"] == 1


def test_what_retires_while_verify_looks_is_no_finding(busy, monkeypatch):
    # The sizes are asked after the snapshot: between the two the leader may retire a step.
    look = busy.store.look
    calls = []

    def slow(command):
        calls.append(command)
        if len(calls) == 2:
            busy.train(3, oldest_kept=3)
            busy.store.retire(3)
        return look(command)

    monkeypatch.setattr(busy.store, "look", slow)
    assert busy.store.verify().findings == ()


@pytest.mark.parametrize("expires", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        "rlb:RUN:g:another program's",
        "rlb:RUN:g:",
        "rlb:RUN:g:lock:7",
        "rlb:RUNx:g:a.0:u.1",
        "rlb:RUN",
        "{rlb:RUN}:cache:users",
        "{rlb:RUN}:",
        "{rlb:RUN}",
        "{rlb:RUNx}:meta",
        "sessions",
    ],
)
def test_keys_of_other_programs_are_no_findings(busy: Run, name: str, expires: bool) -> None:
    """A server may be shared, also by who puts keys into the run's slot or behind its prefix."""
    name = name.replace("RUN", busy.store.run)
    busy.client.set(name, "somebody else's", ex=3600 if expires else None)
    try:
        assert busy.store.verify().findings == ()
    finally:
        busy.client.delete(name)


def test_a_payload_of_the_run_that_belongs_to_nothing_is_a_finding(busy: Run) -> None:
    name = busy.store.keys.payload("a:b.7", "u.99")
    busy.client.hset(name, "0", "x")
    assert [(f.invariant, name in f.message) for f in busy.store.verify().findings] == [("I11", True)]
