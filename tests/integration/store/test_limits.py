"""The moves under a full server, a lost reply and many producers at once. On a real server only."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from store_runs import Run

from rlbuffer.config.settings import ServerSettings
from rlbuffer.errors import ServerRefused
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.store.server import embedded

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
