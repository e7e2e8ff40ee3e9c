"""Payloads of nobody, which the leader removes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from daemon_runs import Served
from store_runs import Run

import rlbuffer
from rlbuffer.client.writer import Writer
from rlbuffer.daemon import guard
from rlbuffer.daemon.pending import Pending
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.testing import make_group

pytestmark = pytest.mark.server
pytest_plugins = ("store_fixtures",)


def config(**changes: Any) -> rlbuffer.BatcherConfig:
    return rlbuffer.BatcherConfig(64, step_groups=2, max_age=100, order="oldest_first", **changes)


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
