"""The notes that ranks leave each other tell a rank that hangs in its data from one that is busy."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch.distributed import HashStore

from rlbuffer.errors import BatchTimeout
from rlbuffer.process.ranks import Ranks
from rlbuffer.trainer.ranks import stalls
from rlbuffer.trainer.ranks.stalls import StallWatch


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stalls, "STALL_LOOK_SECONDS", 0.0)


@pytest.fixture
def watches() -> tuple[StallWatch, ...]:
    store = HashStore()
    return tuple(StallWatch(Ranks(rank, 3, torch.device("cpu")), store, seconds=0.1) for rank in range(3))


def looked(watch: StallWatch, is_there: Callable[[], bool] = lambda: True) -> None:
    """Looks for longer than a rank may pull what another one has."""
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        watch.check(4, is_there)
        time.sleep(0.01)


def test_a_rank_that_still_pulls_what_another_has_hangs(watches: tuple[StallWatch, ...]) -> None:
    first, second, _ = watches
    first.pulling(4)
    second.pulling(4)
    first.has(4)
    with pytest.raises(BatchTimeout, match=r"^rank 0 has step 4, and rank 1 has been pulling it for 0.1 s more: "):
        looked(first)


@pytest.mark.parametrize("note", ["has the step", "is busy with the one before", "pulls the one before"])
def test_a_rank_that_is_busy_does_not_hang(watches: tuple[StallWatch, ...], note: str) -> None:
    first, second, _ = watches
    if note == "has the step":
        second.has(4)
    elif note == "pulls the one before":
        second.pulling(3)
    first.has(4)
    looked(first)


def test_a_rank_that_pulls_what_the_server_has_lost_does_not_hang(watches: tuple[StallWatch, ...]) -> None:
    first, second, _ = watches
    second.pulling(4)
    first.has(4)
    looked(first, lambda: False)
    with pytest.raises(BatchTimeout):
        looked(first)


def test_a_rank_alone_watches_nobody() -> None:
    alone = StallWatch(Ranks(0, 1, torch.device("cpu")), None)
    alone.pulling(2)
    alone.has(2)
    alone.check(2, lambda: True)
