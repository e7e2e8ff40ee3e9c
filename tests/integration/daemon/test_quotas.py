"""Quotas in bytes, payloads of nobody, and what the leader does about those who write past PUSH."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from daemon_runs import Served
from store_runs import Run

import rlbuffer
from rlbuffer.client.writer import Writer
from rlbuffer.config.batcher import EnvConfig
from rlbuffer.daemon import guard
from rlbuffer.daemon.pending import Pending
from rlbuffer.errors import RlbufferError
from rlbuffer.records.group import Group
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.testing import make_group
from rlbuffer.wire import payload

pytestmark = pytest.mark.server
pytest_plugins = ("store_fixtures",)
QUOTA = 600_000


def config(**changes: Any) -> rlbuffer.BatcherConfig:
    return rlbuffer.BatcherConfig(64, step_groups=2, max_age=100, order="oldest_first", **changes)


def heavy(number: int, env: str = "a", **fields: Any) -> Group:
    """A group of 256 KiB."""
    column = {"x": np.zeros((8, 4096), np.float32)}
    return make_group(env=env, lengths=[8, 8], columns=[column] * 2, group_id=f"{env}.{number}", **fields)


@pytest.fixture
def served(run: Run) -> Iterator[Served]:
    made = Served(run)
    yield made
    made.close()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds through the server's keys follow each other."""
    for name in ("ROUND_SECONDS", "STRAY_SECONDS"):
        monkeypatch.setattr(guard, name, 0.2)


@pytest.fixture
def pushing(served: Served) -> Iterator[Any]:
    """Pushes in a thread. -> the thread, and what the writer said while it waited."""
    threads = []

    def push(groups: list[Group], name: str = "w") -> tuple[threading.Thread, list[RlbufferError]]:
        said: list[RlbufferError] = []
        writer = Writer(served.run.store, name, epoch=served.run.meta.epoch, on_retry=said.append)
        thread = threading.Thread(target=lambda: [writer.push(group) for group in groups])
        thread.start()
        threads.append(thread)
        return thread, said

    yield push
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def train(served: Served, steps: int, *, retires: bool = True) -> None:
    """A trainer that takes what comes."""
    store = served.run.store
    attempt = store.attempt(uuid="t", world_size=1, resume_step=0)
    store.announce(attempt.number, PolicyVersion(version=0))
    for step in range(1, steps + 1):
        header = store.wait_step(step, block_seconds=60.0)
        assert header is not None, store.waiting()
        kept = step if retires else 0
        store.report(attempt.number, epoch=attempt.epoch, trained=step, digest=header.digest, oldest_kept=kept)


def test_pushes_wait_at_the_quota_of_their_env_and_go_on_when_steps_have_taken_some(
    served: Served, pushing: Any
) -> None:
    store = served.run.store
    served.serve(config(envs={"a": EnvConfig(quota_bytes=QUOTA)}))
    served.wait_for(lambda: store.client.hgetall(store.keys.room))
    thread, said = pushing([heavy(n) for n in range(8)])
    served.wait_for(lambda: store.ledger().refused)
    assert store.ledger().envs["a"].pushed[0] == 6  # the third push begins below the quota
    store.push(heavy(0, "b"), producer="v", incarnation="v", sequence=1, epoch=served.run.meta.epoch)
    served.wait_for(lambda: said)
    assert re.sub("[0-9]{6}", "262480", str(said[0])) == (
        "push a.3 of 262480 bytes waits: what is pending of env a has used up its quota (batcher.quota_bytes). It is "
        "taken when steps have taken some of that"
    )
    train(served, 4)
    thread.join(60)
    assert store.ledger().envs["a"].pushed[0] == 16
    assert served.said("drop") == []


def test_the_step_says_whose_pushes_wait_and_gives_them_no_tickets(served: Served, pushing: Any) -> None:
    store = served.run.store
    attempt = store.attempt(uuid="t", world_size=1, resume_step=0)
    store.announce(attempt.number, PolicyVersion(version=0))
    waits = rlbuffer.BatcherConfig(64, step_groups=20, max_age=100, budgets={"a": 0.5}, quota_bytes=QUOTA)
    served.serve(waits)
    served.wait_for(lambda: store.allowances().get("a", 0) > 0)
    pushing([heavy(n) for n in range(4)])
    served.wait_for(lambda: "Pushes of env a wait: 787440 bytes" in store.waiting().get("batcher", ""))
    assert "Normal" not in store.waiting()["batcher"]
    served.wait_for(lambda: store.allowances().get("a") == 0)
    served.stop()
    served.run.lead()
    store.set_room(served.run.token, {})


def test_a_worker_process_has_a_quota_of_its_own(served: Served, pushing: Any) -> None:
    store = served.run.store
    served.serve(config(worker_quota_bytes=QUOTA))
    served.wait_for(lambda: store.client.hgetall(store.keys.room))
    _, said = pushing([heavy(n) for n in range(4)], "greedy")
    served.wait_for(lambda: said)
    assert "what is pending of greedy has used up its quota (batcher.worker_quota_bytes)" in str(said[0])
    other, heard = pushing([heavy(n, "b") for n in range(2)], "modest")
    other.join(60)
    assert heard == []
    train(served, 3)


def test_what_takes_the_place_of_a_pending_push_never_waits(served: Served) -> None:
    run, store = served.run, served.run.store
    group = heavy(0, needs=["ref_logprobs"])
    _, entry = store.push(group, producer="w", incarnation="w", sequence=1, epoch=run.meta.epoch)
    run.lead()
    store.set_room(run.token, {"env *": 0, "worker *": 0})
    status, _ = store.push(heavy(0), producer="s", incarnation="s", sequence=1, epoch=run.meta.epoch, replaces=entry)
    assert str(status) == "stored"
    with pytest.raises(RlbufferError, match="has used up its quota"):
        store.push(heavy(1), producer="s", incarnation="s", sequence=2, epoch=run.meta.epoch)
    assert store.ledger().refused == 1


def write_past_push(run: Run, group: Group, uuid: str, *, extra: bytes = b"") -> str:
    """A push as somebody writes it who has a worker's login and does not use the script. -> its payload's key."""
    push, keys, client = payload.encode_push(group), run.store.keys, run.client
    own, key = keys.unnamed_payload(group.group_id, f"{uuid}.1"), keys.payload(group.group_id, f"{uuid}.1")
    fields: dict[Any, Any] = {str(i): data for i, data in enumerate(push.payloads)}
    client.hset(own, mapping=fields | ({"junk": extra} if extra else {}))
    client.rename(own, key)
    entry = {"env": group.env, "group": group.group_id, "key": f"{uuid}.1", "rollouts": len(group.rollouts)}
    client.xadd(keys.pool, {**entry, "tokens": push.info.tokens, "metadata": push.metadata})
    return key


def test_who_writes_past_push_is_held_to_a_quota_under_whatever_names(served: Served) -> None:
    run = served.run
    served.serve(config(quota_bytes=QUOTA, budgets={"a": 0.5}))
    run.push("a.0")
    served.wait_for(lambda: run.client.hgetall(run.store.keys.room))
    for number in range(20):  # another env, another producer each time
        write_past_push(run, heavy(0, f"e{number}"), f"u{number}")
    served.wait_for(lambda: len(run.pool()) == 4)
    dropped = served.wait_for(lambda: drops if len(drops := served.said("drop")) == 17 else None)
    assert {drop["reason"] for drop in dropped} == {"invalid"}
    assert dropped[0]["detail"] == "beyond the quota of env *: 600000 bytes were pending, and a quarter more"
    assert run.pool()[0].env == "a"


def test_a_payload_that_is_heavier_than_its_metadata_says_is_dropped(served: Served, quick: None) -> None:
    run = served.run
    served.serve(config(quota_bytes=10**9))
    if run.store.server()["name"] == "memory":
        pytest.skip("the model of a server has no memory to speak of")
    run.push("a.0")
    write_past_push(run, make_group(env="a", group_id="a.1"), "u", extra=bytes(1 << 20))
    (drop,) = served.wait_for(lambda: served.said("drop"))
    assert drop["reason"] == "invalid"
    assert drop["detail"].startswith("its payload takes 1")
    assert [entry.group_id for entry in run.pool()] == ["a.0"]


def test_payloads_of_nobody_are_removed_and_all_others_stay(served: Served, quick: None) -> None:
    run, keys = served.run, served.run.store.keys
    served.serve(config())
    run.push("a.0")
    run.push("b.0")
    train(served, 1, retires=False)
    run.push("a.2", needs=["ref_logprobs"])
    ours = set(run.payload_keys())
    assert len(ours) == 3
    run.client.hset(keys.unnamed_payload("a.9", "u.1"), "0", b"x" * 1000)  # for ever
    run.client.hset(keys.unnamed_payload("a.8", "u.1"), "0", b"x")
    run.client.pexpire(keys.unnamed_payload("a.8", "u.1"), 10**9)
    run.client.hset(keys.payload("a.7", "u.1"), "0", b"x")  # renamed by hand, and announced to nobody
    other = f"rlb:{run.store.run}x:g:a.1:u.1"
    run.client.hset(other, "0", b"another run's")
    served.wait_for(lambda: sum(event["payloads"] for event in swept(served)) == 3)
    events = swept(served)
    assert sum(event["bytes"] for event in events) >= (1000 if run.store.server()["name"] != "memory" else 0)
    assert events[-1]["sentence"].endswith(
        " that no push had made pending: of writers that died, or of somebody who fills the server"
    )
    assert set(run.payload_keys()) == ours
    assert run.client.delete(other) == 1


def test_payloads_of_pushes_that_wait_for_a_leader_that_is_behind_stay(
    served: Served, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, ingest, read = served.run, Pending.ingest, list[int]()

    def slow(self: Pending, *, block_seconds: float) -> int:
        time.sleep(0.4)
        read.append(ingest(self, block_seconds=block_seconds))
        return read[-1]

    monkeypatch.setattr("rlbuffer.daemon.pending.POOL_PAGE", 1)
    monkeypatch.setattr(Pending, "ingest", slow)
    served.serve(config())
    served.wait_for(lambda: read)  # it leads
    for number in range(6):
        run.push(f"a.{number}")
    served.wait_for(lambda: sum(read) == 6)
    assert len(run.payload_keys()) == 6
    assert swept(served) == []


def swept(served: Served) -> list[dict[str, Any]]:
    return served.said("memory", state="swept")


def test_a_push_whose_payload_was_removed_before_its_script_is_sent_whole_again(
    served: Served, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, store = served.run, served.run.store
    served.serve(config())
    send, waited = store._send, []

    def slow(source: Any, batch: Any, new: Any, replies: Any) -> None:
        if not waited:  # the connection hangs between the payload and the script
            store._store_payloads(new)
            new = []
            waited.append(served.wait_for(lambda: swept(served)))
        send(source, batch, new, replies)

    monkeypatch.setattr(store, "_send", slow)
    Writer(store, "w", epoch=run.meta.epoch).push(make_group(env="a", group_id="a.1"))
    assert [entry.group_id for entry in run.pool()] == ["a.1"]
    assert len(run.payload_keys()) == 1
