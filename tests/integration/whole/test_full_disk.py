"""A server whose disk is full says so to everybody, loses nothing that it acknowledged, and goes on when there is room.

The disk is a limit on the size of the server's files (RLIMIT_FSIZE): it needs no rights, and the error reaches the
server where a full disk's does, in the write to its append-only file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from own_server import Disk, OwnServer
from store_runs import Run

import rlbuffer
from rlbuffer.errors import ServerRefused

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
