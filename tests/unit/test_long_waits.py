"""A loop of one's own that waits for long says for what: nothing else on its terminal would."""

from __future__ import annotations

import logging
import time

import pytest
import waits
from every_role import EveryRole

import rlbuffer
from rlbuffer.client import refusals
from rlbuffer.client.refusals import LongWait
from rlbuffer.errors import BatchTimeout
from rlbuffer.records.waiting import Wait, Waiting
from rlbuffer.store.leader import LeaderStore
from rlbuffer.store.member import Member

pytest.importorskip("fakeredis")


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "LONG_WAIT_SECONDS", 0.0)


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_a_writer_without_a_ticket_says_what_the_batcher_waits_for(caplog: pytest.LogCaptureFixture) -> None:
    with rlbuffer.connect("memory://", run="math") as buffer:
        writer = buffer.writer("w0")
        assert writer.take("gsm8k", timeout_seconds=0.05) == []
        assert str(Waiting(kind=Wait.NO_BATCHER)) in told(caplog)[0]
        buffer.store.role(LeaderStore).lease("batcher", ttl_seconds=60.0)
        waits.says(buffer.store.role(Member), Waiting(kind=Wait.NO_TRAINER))
        writer.take("gsm8k", timeout_seconds=0.05)
        assert str(Waiting(kind=Wait.NO_TRAINER)) in told(caplog)[1]


def test_a_reader_of_a_run_whose_batcher_was_killed_is_told_that_there_is_none() -> None:
    with rlbuffer.connect("memory://", run="math") as buffer:
        store = buffer.store.role(EveryRole)
        store.open_run()
        store.lease("batcher", ttl_seconds=0.001)
        time.sleep(0.01)
        with pytest.raises(BatchTimeout) as caught:
            next(buffer.reader(timeout_seconds=0.05).steps())
        assert str(Waiting(kind=Wait.NO_BATCHER)) in str(caught.value)


def test_rank_0_without_a_step_says_so_and_others_do_not(caplog: pytest.LogCaptureFixture) -> None:
    with rlbuffer.connect("memory://", run="math") as buffer:
        buffer.store.role(Member).open_run()
        for rank in (1, 0):
            looks = iter((False, True))
            assert list(buffer.reader(rank, 2).steps(until=lambda looks=looks: next(looks))) == []
    assert [text.partition(" for ")[2].split(" for ")[0] for text in told(caplog)] == ["step 1"]


def test_a_long_wait_is_told_again_only_after_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    with rlbuffer.connect("memory://", run="math") as buffer:
        buffer.store.role(Member).open_run()
        wait = LongWait(buffer.store)
        for _ in range(3):
            wait.warn("step 1")
    assert len(told(caplog)) == 1
