"""Several groups in one call of a writer: stored once each, in order, whatever breaks in between."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from every_role import EveryRole
from faults import CuttingProxy
from rolled_back import roll_back

import rlbuffer
from rlbuffer.config.settings import ServerSettings
from rlbuffer.errors import EpochChanged, InvalidRollout, PushBroken, ServerRefused, ServerUnreachable
from rlbuffer.store.leader import LeaderStore
from rlbuffer.store.member import Member
from rlbuffer.store.session import open_store
from rlbuffer.store.worker import WorkerStore
from rlbuffer.testing import make_group
from rlbuffer.wire import payload


@pytest.fixture
def buffer(redis_url: str) -> Iterator[rlbuffer.Buffer]:
    with rlbuffer.connect(redis_url, run=f"many-{uuid.uuid4().hex[:8]}") as made:
        yield made


@pytest.fixture
def proxied(redis_url: str, tmp_path: Path) -> Iterator[tuple[EveryRole, CuttingProxy]]:
    """A store whose connections lead through a proxy, on a server that knows the script of a push."""
    run = f"many-{uuid.uuid4().hex[:8]}"
    with CuttingProxy(redis_url) as proxy:
        store = open_store(EveryRole, proxy.url, run=run, home=tmp_path, server=ServerSettings())
        store.client.script_load(store.script("push").text)
        yield store, proxy
        store.close()


def groups(*seeds: int) -> list[rlbuffer.Group]:
    return [make_group(seed=seed, size=2, lengths=[8, 8]) for seed in seeds]


def writer_of(store: Any, **terms: Any) -> rlbuffer.Writer:
    return rlbuffer.Writer(store, "w", epoch=store.open_run().epoch, **terms)


def statuses(pushed: list[rlbuffer.records.Pushed]) -> list[str]:
    return [str(one.status) for one in pushed]


def pending(store: Any) -> list[str]:
    return [entry.group_id for entry in store.read_pool()]


def sequence(store: Any, writer: rlbuffer.Writer) -> int:
    return int(store.client.hget(store.keys.producer("w", writer.incarnation), "sequence") or 0)


def after(store: Any, name: str, call: Callable[[int], None]) -> None:
    """Calls `call` with the number of the call, from 1, before each call of the store's method `name`."""
    made, calls = getattr(store, name), 0

    def wrapped(*args: Any, **values: Any) -> Any:
        nonlocal calls
        calls += 1
        call(calls)
        return made(*args, **values)

    setattr(store, name, wrapped)


def test_groups_are_stored_in_order_each_under_its_own_sequence(buffer: rlbuffer.Buffer) -> None:
    writer, store = buffer.writer("w"), buffer.store.role(WorkerStore)
    assert writer.push_many([]) == []
    assert writer.push(groups(0)[0]).status == "stored"
    pushed = writer.push_many(groups(1, 2, 3))
    assert [one.entry_id for one in pushed] == [entry.entry_id for entry in store.read_pool()][1:]
    assert writer.push(groups(4)[0]).status == "stored"
    assert pending(store) == ["a.0", "a.1", "a.2", "a.3", "a.4"]
    assert sequence(store, writer) == 5
    assert buffer.ledger().envs["a"].pushed == (10, 80)
    assert buffer.verify().ok


def test_far_more_groups_than_a_round_trip_takes_share_their_round_trips_by_sixteen(
    buffer: rlbuffer.Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, calls = buffer.writer("w"), []
    writer.push(groups(0)[0])
    connection: Any = buffer.store.connection  # type: ignore[attr-defined]
    call = connection.call
    monkeypatch.setattr(connection, "call", lambda *args, **values: (calls.append(1), call(*args, **values))[1])
    assert statuses(writer.push_many(groups(*range(1, 41)))) == ["stored"] * 40
    # In a cluster the payloads have a round trip of their own, and so has making their names permanent.
    assert len(calls) == (9 if connection.is_cluster else 3)
    assert pending(buffer.store) == [f"a.{n}" for n in range(41)]


def test_large_groups_share_no_round_trip(buffer: rlbuffer.Buffer, monkeypatch: pytest.MonkeyPatch) -> None:
    size = sum(len(data) for data in payload.encode_push(groups(0)[0]).payloads)
    monkeypatch.setattr("rlbuffer.store.producer.BATCH_BYTES", 2 * size)
    sent: list[int] = []
    after(buffer.store.role(WorkerStore), "_send", sent.append)
    assert statuses(buffer.writer("w").push_many(groups(1, 2, 3))) == ["stored"] * 3
    assert len(sent) == 2


def test_the_same_call_again_by_number_is_answered_as_duplicates(buffer: rlbuffer.Buffer) -> None:
    writer = buffer.writer("w")
    assert statuses(writer.push_many(groups(1, 2), sequence=1)) == ["stored", "stored"]
    assert statuses(writer.push_many(groups(1, 2, 3), sequence=1)) == ["duplicate", "duplicate", "stored"]
    again = buffer.writer("w", incarnation=writer.incarnation)
    assert statuses(again.push_many(groups(1, 2, 3, 4), sequence=1)) == ["duplicate"] * 3 + ["stored"]
    assert pending(buffer.store) == ["a.1", "a.2", "a.3", "a.4"]
    assert buffer.ledger().envs["a"].pushed == (8, 64)
    with pytest.raises(InvalidRollout, match="push_many: sequence: 0 is outside"):
        writer.push_many(groups(5), sequence=0)


def test_an_invalid_group_keeps_the_others_of_its_call_from_being_stored(buffer: rlbuffer.Buffer) -> None:
    writer = buffer.writer("w")
    bad = make_group(seed=2, size=2, lengths=[8, 8], metadata={"large": b"x" * (5 << 20)})
    with pytest.raises(InvalidRollout, match=r"group a\.2: answer and metadata take"):
        writer.push_many([*groups(1), bad, *groups(3)])
    with pytest.raises(InvalidRollout, match="push_many: expected a Group, got '"):
        writer.push_many([*groups(1), "a.2"])  # type: ignore[list-item]
    assert pending(buffer.store) == []
    assert statuses(writer.push_many(groups(1, 3))) == ["stored"] * 2
    assert sequence(buffer.store, writer) == 2


@pytest.mark.parametrize("whole", [0, 1, 3])
def test_a_connection_that_breaks_inside_the_second_phase_loses_and_doubles_nothing(
    proxied: tuple[EveryRole, CuttingProxy], whole: int
) -> None:
    store, proxy = proxied
    heard: list[Exception] = []
    writer = writer_of(store, on_retry=heard.append)
    writer.push(groups(0)[0])
    proxy.cut_inside(b"EVALSHA", whole)
    expected = ["duplicate"] * whole + ["stored"] * (3 - whole)
    assert statuses(writer.push_many(groups(1, 2, 3))) == expected
    assert proxy.seen >= 1
    assert heard == []  # the batch counts against no push, and no patience is used up
    assert pending(store) == ["a.0", "a.1", "a.2", "a.3"]
    assert sequence(store, writer) == 4
    assert store.verify().ok
    assert len(list(store.client.scan_iter(match=f"{store.keys.payload_prefix}*"))) == 4


@pytest.mark.parametrize("whole", [0, 2, 3])
def test_a_connection_that_breaks_inside_a_payload_stores_what_is_sent_again(
    proxied: tuple[EveryRole, CuttingProxy], whole: int
) -> None:
    store, proxy = proxied
    writer = writer_of(store)
    writer.push(groups(0)[0])
    proxy.cut_inside(b"PEXPIRE", whole)
    carried = 0 if store.connection.is_cluster else whole  # script and all
    assert statuses(writer.push_many(groups(1, 2, 3))) == ["duplicate"] * carried + ["stored"] * (3 - carried)
    assert pending(store) == ["a.0", "a.1", "a.2", "a.3"]
    assert store.verify().ok


def test_what_a_call_left_is_settled_and_answered_by_the_same_call(proxied: tuple[EveryRole, CuttingProxy]) -> None:
    store, proxy = proxied
    writer = writer_of(store, patience_seconds=0.0)
    proxy.cut_inside(b"EVALSHA", 1)
    after(store, "push", lambda call: proxy.swallow_replies(b"EVALSHA", int(call == 2)))
    with pytest.raises(ServerUnreachable):
        writer.push_many(groups(1, 2, 3))
    assert pending(store) == ["a.1", "a.2"]
    # The first is settled, the second is stored without an answer, the third was never sent by itself.
    assert statuses(writer.push_many(groups(1, 2, 3, 4))) == ["duplicate", "duplicate", "stored", "stored"]
    assert pending(store) == ["a.1", "a.2", "a.3", "a.4"]
    assert sequence(store, writer) == 4


def test_what_a_call_left_is_settled_before_another_group(proxied: tuple[EveryRole, CuttingProxy]) -> None:
    store, proxy = proxied
    writer = writer_of(store, patience_seconds=0.0)
    proxy.swallow_replies(b"EVALSHA", 2)
    with pytest.raises(PushBroken):
        writer.push_many(groups(1, 2, 3))
    assert writer.push(groups(9)[0]).status == "stored"
    writer.push_many(groups(1))  # another call came between: this is a push of its own
    assert pending(store) == ["a.1", "a.2", "a.3", "a.9", "a.1"]
    writer.done("a")


def test_a_payload_that_is_gone_stops_the_batch_there_and_is_sent_again(buffer: rlbuffer.Buffer) -> None:
    store: Any = buffer.store.role(WorkerStore)
    if store.connection.is_cluster:
        pytest.skip("PUSH does not reach the payload's shard: PIN finds it, test_clusters.py")
    epoch = store.open_run().epoch
    move, pushes = store._move_pushes, [(group, "") for group in groups(1, 2, 3, 4)]

    def spoilt(source: Any, batch: Any) -> Any:
        if len(batch) > 1:
            batch[2].args[2] += "x"  # the script looks for it under another key
        return move(source, batch)

    store._move_pushes = spoilt
    outcomes, error = store.push_many(pushes, producer="w", incarnation="u", sequence=1, epoch=epoch)
    assert [status for status, _ in outcomes] == ["stored", "stored"]
    assert isinstance(error, ServerRefused)
    assert "the payload of push u.3 is not on the server any more" in str(error)
    # The script has refused the fourth as a gap.
    assert pending(store) == ["a.1", "a.2"]
    assert store.client.hget(store.keys.producer("w", "u"), "sequence") == b"2"
    writer = buffer.writer("w", incarnation="u")
    assert statuses(writer.push_many(groups(1, 2, 3, 4), sequence=1)) == ["duplicate"] * 2 + ["stored"] * 2
    assert pending(store) == ["a.1", "a.2", "a.3", "a.4"]
    assert statuses(writer.push_many(groups(5, 6, 7))) == ["stored"] * 3
    assert buffer.verify().ok


def test_a_refused_replacement_stops_the_batch(buffer: rlbuffer.Buffer) -> None:
    store: Any = buffer.store.role(WorkerStore)
    first, second, third = buffer.writer("p").push_many(groups(1, 2, 3))
    larger = make_group(env="a", size=3, group_id="a.2")
    pairs = [(groups(1)[0], first.entry_id), (larger, second.entry_id), (groups(3)[0], third.entry_id)]
    names = {"producer": "w", "incarnation": "u", "sequence": 1, "epoch": store.open_run().epoch}
    outcomes, error = store.push_many(pairs, **names)
    assert [status for status, _ in outcomes] == ["stored"]
    assert isinstance(error, InvalidRollout)
    assert "cannot replace" in str(error)
    assert pending(store) == ["a.2", "a.3", "a.1"]
    # What is not pending any more takes a sequence, and the batch goes on.
    late = [(groups(1)[0], first.entry_id), (groups(2)[0], second.entry_id)]
    outcomes, error = store.push_many(late, **(names | {"sequence": 2}))
    assert [status for status, _ in outcomes] == ["duplicate", "stored"]
    assert error is None
    assert buffer.verify().ok


@pytest.mark.parametrize("batch", [1, 3])
def test_what_the_server_forgets_during_a_call_is_sent_again_in_order(
    buffer: rlbuffer.Buffer, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlbuffer.store.producer.BATCH_PUSHES", 2)
    store = buffer.store.role(WorkerStore)
    writer = writer_of(store)
    writer.push_many(groups(0, 1, 2))
    # Before a batch, the server has lost the last two pushes.
    after(store, "_move_pushes", lambda call: call == batch and roll_back(store, writer, to=2 * batch - 1))
    assert statuses(writer.push_many(groups(*range(3, 11)))) == ["stored"] * 8
    assert pending(store) == [f"a.{n}" for n in range(11)]
    assert sequence(store, writer) == 11
    assert writer.push(groups(11)[0]).status == "stored"
    assert buffer.ledger().lost == 0
    assert buffer.verify().ok


def test_a_call_that_the_spool_cannot_fill_up_to_goes_on_under_another_incarnation(buffer: rlbuffer.Buffer) -> None:
    writer, store = buffer.writer("w"), buffer.store.role(WorkerStore)
    writer.push_many(groups(0, 1, 2))
    first = writer.incarnation
    writer._producer._spool.clear()
    roll_back(store, writer, to=1)
    assert statuses(writer.push_many(groups(3, 4, 5))) == ["stored"] * 3
    assert writer.incarnation != first
    assert sequence(store, writer) == 3
    assert buffer.ledger().lost == 2
    assert pending(store) == ["a.0", "a.3", "a.4", "a.5"]
    assert statuses(writer.push_many(groups(6, 7))) == ["stored"] * 2
    assert buffer.verify().ok


def test_pushes_are_counted_as_lost_once_however_often_their_follower_is_sent(buffer: rlbuffer.Buffer) -> None:
    store: Any = buffer.store.role(WorkerStore)
    writer = writer_of(store, patience_seconds=0.0)
    writer.push_many(groups(0, 1, 2))
    writer._producer._spool.clear()
    roll_back(store, writer, to=1)
    push = store.push

    def away(*args: Any, **names: Any) -> Any:
        if names["sequence"] == 1:
            store.push = push
            raise ServerUnreachable("away")
        return push(*args, **names)

    store.push = away  # the first push of the new incarnation does not get through
    with pytest.raises(ServerUnreachable, match="away"):
        writer.push(groups(3)[0])
    assert writer.push(groups(3)[0]).status == "stored"
    assert buffer.ledger().lost == 2


def test_a_new_epoch_that_goes_on_from_this_one_is_followed_in_the_middle(buffer: rlbuffer.Buffer) -> None:
    writer, store = buffer.writer("w"), buffer.store.role(WorkerStore)
    keys, client = store.keys, store.client  # type: ignore[attr-defined]
    epoch = store.open_run().epoch
    writer.push(groups(0)[0])
    client.hset(keys.meta, mapping={"epoch": epoch + 1, "since": epoch, "line": epoch})
    assert statuses(writer.push_many(groups(1, 2))) == ["stored"] * 2
    client.hset(keys.meta, mapping={"epoch": epoch + 9, "since": epoch + 9, "line": epoch + 9})
    with pytest.raises(EpochChanged):
        writer.push_many(groups(3, 4))
    assert writer._producer._call == []
    assert pending(store) == ["a.0", "a.1", "a.2"]


def test_groups_are_cut_as_single_pushes_are(buffer: rlbuffer.Buffer) -> None:
    config = rlbuffer.BatcherConfig(10, oversized="truncate")
    buffer.store.role(Member).open_run()
    buffer.store.role(LeaderStore).lease("leader", ttl_seconds=30.0)
    buffer.store.role(LeaderStore).set_config(config.as_dict(), "digest")
    long = [make_group(seed=seed, size=1, lengths=[20]) for seed in (1, 2)]
    writer = buffer.writer("w")
    assert statuses(writer.push_many(long, sequence=1)) == ["stored"] * 2
    assert statuses(writer.push_many(long, sequence=1)) == ["duplicate"] * 2
    assert [e.info.rollouts[0].length for e in buffer.store.read_pool() if e.info] == [10, 10]


def test_calls_of_two_threads_do_not_mix(buffer: rlbuffer.Buffer) -> None:
    writer = buffer.writer("w")
    threads = [
        threading.Thread(target=lambda first=first: writer.push_many(groups(*range(first, first + 8))))  # type: ignore[misc]
        for first in (0, 100)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ids = pending(buffer.store)
    calls = [[f"a.{n}" for n in range(first, first + 8)] for first in (0, 100)]
    assert ids in (calls[0] + calls[1], calls[1] + calls[0])
    assert sequence(buffer.store, writer) == 16


def test_a_server_that_has_forgotten_its_scripts_gets_them_in_the_same_call(buffer: rlbuffer.Buffer) -> None:
    store = buffer.store.role(WorkerStore)
    writer = writer_of(store)
    loaded: list[int] = []
    after(store, "push", loaded.append)
    store.client.script_flush()  # type: ignore[attr-defined]
    assert statuses(writer.push_many(groups(1, 2))) == ["stored"] * 2
    assert loaded == []  # none had to go by itself
