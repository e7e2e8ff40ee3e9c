"""The leader's request to a server that was started again, for its append-only file. The cuts are in tests/faults."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from daemon_runs import Served
from own_server import OwnServer
from store_runs import Run

from rlbuffer.config.batcher import BatcherConfig
from rlbuffer.errors import ServerUnsuitable
from rlbuffer.store.server import append_file

CONFIG = BatcherConfig(64, step_groups=1)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OwnServer]:
    """An older server where there is one; the bundled one is taken for one that needs help, too."""
    monkeypatch.setattr(append_file, "REVERTS_FROM", {})
    with OwnServer(tmp_path / "server", program=shutil.which("redis-server")) as made:
        yield made


@pytest.fixture
def served(server: OwnServer, tmp_path: Path) -> Iterator[Served]:
    run = Run(server.url, tmp_path)
    served = Served(run)
    yield served
    served.close()
    run.close()


def rewrites(run: Run) -> Any:
    with redis.Redis.from_url(run.url) as client:  # a connection of its own: the server may have been started again
        return client.info("persistence")["aof_rewrites"]


def test_the_file_is_rewritten_once_per_start_of_the_server_before_anything_is_decided(
    served: Served, server: OwnServer
) -> None:
    served.serve(CONFIG)
    served.wait_for(lambda: served.said("ready"), 60.0)
    assert rewrites(served.run) == 1
    served.stop()
    served.serve(CONFIG)
    served.wait_for(lambda: len(served.said("ready")) == 2, 60.0)
    assert rewrites(served.run) == 1
    server.kill()
    server.start()
    served.wait_for(lambda: len(served.said("ready")) == 3, 60.0)
    assert rewrites(served.run) == 1


def test_a_server_without_a_file_is_left_alone(served: Served) -> None:
    served.run.client.config_set("appendonly", "no")
    served.serve(CONFIG)
    served.wait_for(lambda: served.said("ready"), 60.0)
    assert rewrites(served.run) == 0


def test_a_leader_that_may_not_have_it_rewritten_refuses_and_names_the_cure(served: Served) -> None:
    client, store = served.run.client, served.run.store
    client.execute_command("ACL", "SETUSER", "default", "-bgrewriteaof")
    with pytest.raises(ServerUnsuitable) as caught:
        store.until_whole()
    assert "+bgrewriteaof" in str(caught.value)
    served.serve(CONFIG)
    assert isinstance(served.wait_for(lambda: served.errors, 60.0, checks_errors=False)[0], ServerUnsuitable)
