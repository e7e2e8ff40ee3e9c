"""The notes that ranks leave each other tell a rank that hangs in its data from one that is busy."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.distributed import HashStore

from rlbuffer.errors import BatchTimeout, RlbufferError
from rlbuffer.process.ranks import Ranks
from rlbuffer.trainer.ranks.stalls import StallWatch

CPU = torch.device("cpu")


def there() -> bool:
    return True


def watch(store: HashStore, rank: int, heard: list[RlbufferError], told: threading.Event) -> StallWatch:
    def on_stall(error: RlbufferError) -> None:
        heard.append(error)
        told.set()

    return StallWatch(Ranks(rank, 3, CPU), store, seconds=0.2, on_stall=on_stall)


def test_a_rank_that_still_pulls_what_another_has_hangs() -> None:
    store, heard, told = HashStore(), list[RlbufferError](), threading.Event()
    with watch(store, 0, heard, told) as first, watch(store, 1, [], told) as second, watch(store, 2, [], told):
        first.pulling(4)
        second.pulling(4)
        with first.holding(4, there):
            assert told.wait(30)
    (error,) = heard
    assert isinstance(error, BatchTimeout)
    assert error.exit_code == 5
    assert str(error) == (
        "rank 0 has step 4, and rank 1 has been pulling it for 0.2 s more: rank 1 hangs in its data. Look at its host "
        "and its connection to the server"
    )


@pytest.mark.parametrize("note", ["has the step", "is busy with the one before", "pulls the one before"])
def test_a_rank_that_is_busy_does_not_hang(note: str) -> None:
    store, heard, told = HashStore(), list[RlbufferError](), threading.Event()
    with watch(store, 0, heard, told) as first, watch(store, 1, [], told) as second, watch(store, 2, [], told):
        if note == "has the step":
            with second.holding(4, there):
                pass
        elif note == "pulls the one before":
            second.pulling(3)
        with first.holding(4, there):
            assert not told.wait(1.5)
    assert heard == []


def test_a_rank_that_pulls_what_the_server_has_lost_does_not_hang() -> None:
    store, heard, told = HashStore(), list[RlbufferError](), threading.Event()
    asked, is_back = threading.Semaphore(0), False

    def is_there() -> bool:
        asked.release()
        return is_back

    with watch(store, 0, heard, told) as first, watch(store, 1, [], told) as second, watch(store, 2, [], told):
        second.pulling(4)
        with first.holding(4, is_there):
            for _ in range(4):
                assert asked.acquire(timeout=30)
            assert heard == []
            is_back = True
            assert told.wait(30)
    assert "rank 1 hangs in its data" in str(heard[0])


def test_a_rank_alone_watches_nobody() -> None:
    with StallWatch(Ranks(0, 1, CPU), None, seconds=0.1, on_stall=None) as alone, alone.holding(1, there):
        alone.pulling(2)
