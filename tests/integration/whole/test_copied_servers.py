"""Back up and move, as the guide says: a server that begins with another's file, and a replica that is promoted."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from daemon_runs import Served, start_trainer
from own_server import OwnServer
from pairs import Node
from store_runs import Run

import rlbuffer
from rlbuffer.client.reader import Reader

CONFIG = rlbuffer.BatcherConfig(64, step_groups=1, lookahead=0, max_age=8)
Take = Callable[[Node, Path], OwnServer]
"""The server of a run and a folder -> another server, which has all that the first one had."""


def by_file(server: Node, folder: Path) -> OwnServer:
    server.ask("SAVE")
    folder.mkdir()
    shutil.copy(server.directory / "dump.rdb", folder)
    taken = OwnServer(folder, options={"appendonly": "no"})
    taken.ask("CONFIG", "SET", "appendonly", "yes")
    taken.wait_for(lambda ask: ask("INFO", "persistence")["aof_enabled"] == 1)
    return taken


def by_replica(server: Node, folder: Path) -> OwnServer:
    replica = Node(folder, options={"repl-diskless-sync-delay": "0"})
    replica.follow(server)
    replica.ask("REPLICAOF", "NO", "ONE")
    return replica


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Node]:
    with Node(tmp_path / "old", options={"repl-diskless-sync-delay": "0"}) as server:
        yield server


def train(run: Run, *steps: int) -> None:
    """A trainer that begins before the first of these steps and leaves after the last."""
    with closing(Reader(run.again(), rank=0, world_size=1, timeout_seconds=60)) as reader:
        for number, step in zip(steps, reader.steps(start=steps[0]), strict=False):
            assert (step.number, step.damaged) == (number, ())
            reader.trained(step)


@pytest.mark.parametrize("take", [by_file, by_replica])
def test_a_run_goes_on_from_another_server_that_has_all_of_it(server: Node, tmp_path: Path, take: Take) -> None:
    with closing(Run(server.url, tmp_path / "home")) as run:
        start_trainer(run)
        Served(run).serve(CONFIG)
        for number in range(3):
            run.push(f"a.{number}")
        train(run, 1, 2)
    with closing(Run(server.url, tmp_path / "home", run.store.run)) as left:
        before = left.control_keys()
    with take(server, tmp_path / "new") as taken:
        server.kill()
        with closing(Run(taken.url, tmp_path / "home", run.store.run)) as moved:
            assert moved.control_keys() == before
            assert moved.store.verify().findings == ()
            moved.sequence = run.sequence  # its producer goes on
            Served(moved).serve(CONFIG)
            moved.push("b.0", version=2)
            train(moved, 3, 4)
            assert moved.store.verify().findings == ()
            assert moved.store.ledger().total().trained[0] == 8
