"""The moves under a full server, a lost reply and many producers at once. On a real server only."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from store_runs import Run

from rlbuffer.config.settings import ServerSettings
from rlbuffer.errors import ServerRefused, ServerUnreachable
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.records.step_plan import Drop
from rlbuffer.store.server import embedded
from rlbuffer.testing import make_group

pytestmark = pytest.mark.server


@pytest.fixture
def own(server_binary: object) -> Iterator[Run]:
    """A run on a server that nobody else uses."""
    home = Path(tempfile.mkdtemp(prefix="rlb-"))
    running = embedded.ensure(home, ServerSettings(appendfsync="no"))
    made = Run(running.address, home)
    yield made
    made.close()
    running.release()
    shutil.rmtree(home, ignore_errors=True)


def test_at_the_memory_limit_pushes_are_refused_and_every_control_move_passes(own):
    store = own.store
    own.step("a.0")
    own.push("a.1", version=1)
    own.push("a.2", version=1)
    store.set_allowances({"a": 2})
    tickets = store.take_tickets("a", 1, ttl_seconds=60)
    store.heartbeat("worker", "w9", {"version": 0})
    own.client.config_set("maxmemory", 1000)
    before = own.control_keys(), own.payload_keys()
    for refused in (lambda: own.push("a.3"), lambda: store.take_tickets("a", 1, ttl_seconds=60)):
        with pytest.raises(ServerRefused, match="memory limit"):
            refused()
    assert (own.control_keys(), own.payload_keys()) == before
    with pytest.raises(ServerRefused, match="memory limit"):
        store.ask("a", 1, worker="w9", beat={"version": 1}, ttl_seconds=60, size=None, section="")
    assert store.heartbeats("worker")["w9"]["version"] == 1  # heard all the same

    assert store.open_run().epoch == own.meta.epoch
    assert own.store.renew(ttl_seconds=60).token == own.token
    store.set_config({"max_age": 1}, "d")
    store.set_error("")
    store.set_allowances({"a": 0})
    store.renew_tickets("a", tickets, ttl_seconds=60)
    store.release_tickets("a", tickets)
    store.close_tickets("a", tickets)
    store.heartbeat("batcher", "leader", {})
    store.count_damaged(1, ["a.0/0"])
    first, second = own.pool()
    own.drop("stale", [first])
    assert own.commit(entries=[second])[0] == "ok"
    number = own.train(2, oldest_kept=2)
    assert store.announce(number, PolicyVersion(version=2))
    assert store.retire(2) == 3
    own.client.config_set("maxmemory", 0)
    assert store.verify().findings == ()
    assert own.push("a.3", version=2)


def test_producers_at_once_lose_and_double_nothing(own):
    def produce(name: str) -> None:
        for sequence in range(1, 21):
            group = make_group(env=name, size=2, group_id=f"{name}.{sequence}")
            for _ in range(2):  # each push twice, as after a lost reply
                own.store.push(group, producer=name, incarnation=name, sequence=sequence, epoch=own.meta.epoch)

    threads = [threading.Thread(target=produce, args=(f"p{i}",)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    groups = [entry.group_id for entry in own.pool()]
    assert sorted(groups) == sorted(f"p{i}.{n}" for i in range(6) for n in range(1, 21))
    assert own.store.ledger().total().pushed[0] == 240
    assert own.store.verify().findings == ()


class Lossy:
    """Stands before the connection's `call` and loses the reply of chosen calls, after the server did the work."""

    def __init__(self, connection: object, lose: set[int]) -> None:
        self._call = connection.call
        self._lose = lose
        self._calls = 0

    def __call__(self, fn, *, patience_seconds, repeat, **options):
        def once():
            self._calls += 1
            reply = fn()
            if self._calls in self._lose:
                raise ConnectionResetError("reply lost")
            return reply

        while True:
            try:
                return self._call(once, patience_seconds=patience_seconds, repeat=repeat, **options)
            except ConnectionResetError as error:
                if not repeat:
                    raise ServerUnreachable("reply lost") from error


@pytest.mark.parametrize("lost", [1, 2])
def test_push_with_a_lost_reply_is_repeated_without_doubling(own, monkeypatch, lost):
    own.store.connection.limits()
    # 1: payload and script; in a cluster 1: the payload, 2: the script.
    script = 2 if own.is_cluster else 1
    if lost > script:
        pytest.skip("a push has one reply less here")
    monkeypatch.setattr(own.store.connection, "call", Lossy(own.store.connection, {lost}))
    group = make_group(env="a", size=2, group_id="a.0")

    def push() -> tuple[str, str]:
        return own.store.push(group, producer="w", incarnation="u", sequence=1, epoch=own.meta.epoch)

    with pytest.raises(ServerUnreachable):
        push()
    status, entry_id = push()
    assert status == ("duplicate" if lost == script else "stored")
    assert [e.entry_id for e in own.pool()] == [entry_id]
    assert own.store.ledger().total().pushed[0] == 2
    assert own.store.verify().findings == ()


def test_commit_drop_and_report_with_lost_replies_happen_once(own, monkeypatch):
    own.lead()
    own.push("a.0")
    own.push("a.1")
    entries = own.pool()
    drop = Drop(group_id="a.1", env="a", reason="stale", rollouts=2, tokens=entries[1].tokens)
    monkeypatch.setattr(own.store.connection, "call", Lossy(own.store.connection, set(range(1, 100, 2))))
    assert own.commit(entries=entries[:1])[0] == "duplicate"
    own.store.drop([(drop, entries[1:])])
    own.train(1)
    monkeypatch.undo()
    total = own.store.ledger().total()
    assert (total.trained[0], total.packed[0], total.dropped["stale"][0], total.pending) == (2, 0, 2, (0, 0))
    assert len(own.store.history()) == 2
    assert own.store.verify().findings == ()


def test_commit_reads_entries_of_one_millisecond_with_their_neighbours(own):
    """Their ids differ by what follows the dash, where 10 comes after 2."""
    own.lead()
    for i in range(300):
        own.push(f"a.{i}", size=1)
    pushes = own.client.xrange(own.store.keys.pool)
    own.client.delete(own.store.keys.pool)
    for i, (_, fields) in enumerate(pushes):
        own.client.xadd(own.store.keys.pool, fields, id=f"9999999999999-{i}")
    entries = own.pool()
    before = own.client.info("commandstats")["cmdstat_xrange"]["calls"]
    assert own.commit(entries=entries)[0] == "ok"
    # 2, 4, 8, 16, 32 and then 64 entries a look; in the order of the ids as texts it would take 13 looks.
    assert own.client.info("commandstats")["cmdstat_xrange"]["calls"] - before == 9
