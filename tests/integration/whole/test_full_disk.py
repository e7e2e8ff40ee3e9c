"""A server whose disk is full says so to everybody, loses nothing that it acknowledged, and goes on when there is room.

The disk is a limit on the size of the server's files (RLIMIT_FSIZE): it needs no rights, and the error reaches the
server where a full disk's does, in the write to its append-only file.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon_runs import Served
from own_server import Disk, OwnServer
from store_runs import Run

import rlbuffer
from rlbuffer.client.reader import Reader
from rlbuffer.client.writer import Writer
from rlbuffer.errors import ServerRefused
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.testing import make_group

CONFIG = rlbuffer.BatcherConfig(64, step_groups=2, max_age=1000)
ROOM_BYTES = 40_000


@pytest.fixture
def server(tmp_path: Path) -> Iterator[OwnServer]:
    # Sized by its log too, which a full disk would cut off.
    with OwnServer(tmp_path / "server", options={"appendfsync": "everysec"}) as made:
        yield made


def test_pushes_are_refused_with_the_reason_and_pass_when_there_is_room(server: OwnServer, tmp_path: Path) -> None:
    run = Run(server.url, tmp_path)
    disk = Disk(server)
    disk.fill(room_bytes=ROOM_BYTES)
    refused, acknowledged = None, 0
    while refused is None and acknowledged < 10_000:
        try:
            run.push(f"a.{acknowledged}", size=4)
            acknowledged += 1
        except ServerRefused as error:
            refused = str(error)
    assert refused is not None
    # The server's own words follow, without the command: that holds a payload.
    assert refused.startswith(
        f"the server at {server.url} refused: it cannot write to its disk. Free space where its data are, then look at "
        "its log (MISCONF Errors writing to the AOF file: "
    )
    assert refused.isprintable()
    assert acknowledged > 5
    disk.clear()
    run.push(f"a.{acknowledged}", size=4)  # the same sequence: it was not stored
    ledger = run.store.ledger()
    assert ledger.envs["a"].pushed[0] == 4 * (acknowledged + 1)
    server.kill()
    server.start()
    assert run.store.ledger() == ledger
    assert run.store.verify().findings == ()
    run.close()


def test_a_run_waits_out_a_full_disk(server: OwnServer, tmp_path: Path) -> None:
    run = Run(server.url, tmp_path)
    disk = Disk(server)
    served = Served(run)
    said: list[Exception] = []
    writer = Writer(run.again(), "w", epoch=run.meta.epoch, on_retry=said.append)
    reader = Reader(run.again(), rank=0, world_size=1, timeout_seconds=120)
    reader.start(0)
    reader.announce(PolicyVersion(version=0))
    served.serve(CONFIG)
    stop = threading.Event()
    pushed = 0

    def push() -> None:
        nonlocal pushed
        while not stop.is_set():
            writer.push(make_group(env="a", size=4, version=0, seed=pushed))
            pushed += 1
            stop.wait(0.005)

    pushing = threading.Thread(target=push)
    pushing.start()
    steps = reader.steps()
    step = next(steps)
    seen = [sample.rollout_id for mb in step for sample in mb.samples if sample.rollout_id]
    disk.fill(room_bytes=ROOM_BYTES)
    served.wait_for(lambda: said and any("MISCONF" in e.get("reason", "") for e in served.events), seconds=60)
    assert "it cannot write to its disk" in str(said[0])
    reader.trained(step)  # no error: the heartbeat says it when there is room
    assert reader.announce(PolicyVersion(version=1))
    disk.clear()
    for _ in range(3):
        step = next(steps)  # acknowledges the one before
        seen += [sample.rollout_id for mb in step for sample in mb.samples if sample.rollout_id]
    reader.trained(step)
    stop.set()
    pushing.join(timeout=60)
    assert len(seen) == len(set(seen))
    assert run.store.ledger().total().pushed[0] == 4 * pushed
    assert run.store.verify().findings == ()
    assert served.errors == []
    steps.close()
    reader.close()
    served.close()
    run.close()
