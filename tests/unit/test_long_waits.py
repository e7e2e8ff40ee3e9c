"""A loop of one's own that waits for long says for what: nothing else on its terminal would."""

from __future__ import annotations

import logging
import time

import pytest

import rlbuffer
from rlbuffer.client import refusals
from rlbuffer.client.refusals import LongWait
from rlbuffer.errors import BatchTimeout
from rlbuffer.narration import waiting

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
        silent = "run math: waiting for a ticket of gsm8k for 0 s. No batcher has said anything: is `rlbuffer serve` "
        assert told(caplog) == [f"{silent}running?"]
        buffer.store.lease("batcher", ttl_seconds=60.0)
        buffer.store.set_waiting("batcher", "No trainer has joined yet.")
        writer.take("gsm8k", timeout_seconds=0.05)
        assert told(caplog)[1] == "run math: waiting for a ticket of gsm8k for 0 s. No trainer has joined yet."


def test_what_a_batcher_said_that_was_killed_since_holds_no_more(caplog: pytest.LogCaptureFixture) -> None:
    gone = "No batcher leads the run, and the last one has ended without a word: start `rlbuffer serve` again."
    with rlbuffer.connect("memory://", run="math") as buffer:
        buffer.store.open_run()
        buffer.store.lease("batcher", ttl_seconds=0.001)
        buffer.store.set_waiting("batcher", "Step 1 is 0 % full. No env has sent a group that can train yet.")
        time.sleep(0.01)
        with pytest.raises(BatchTimeout, match=f"no batch for step 1 within 0.05 s. {gone} No worker has been seen."):
            next(buffer.reader(timeout_seconds=0.05).steps())
        assert buffer.writer("w0").take("gsm8k", timeout_seconds=0.05) == []
        assert told(caplog)[-1].partition(" s. ")[2] == gone
        buffer.store.heartbeat("batcher", "leader", {})  # it may be taking over
        assert refusals.batcher_says(buffer.store).startswith("Step 1 is 0 % full.")
        buffer.store.lease("other", ttl_seconds=60.0)
        token = buffer.store.lease("other", ttl_seconds=60.0).token
        buffer.store.set_error(token, "ConfigError: no")
        buffer.store.release_lease("other")
        assert refusals.batcher_says(buffer.store) == "The batcher failed: ConfigError: no"
        for last_word in (
            *(waiting.STOPPED, waiting.at_end(3), waiting.ended(3), waiting.interrupted(3)),
            waiting.failed(3, 1, "run.log"),
        ):
            buffer.store.set_waiting("batcher", last_word)
            assert refusals.batcher_says(buffer.store) == last_word


def test_rank_0_without_a_step_says_so_and_others_do_not(caplog: pytest.LogCaptureFixture) -> None:
    with rlbuffer.connect("memory://", run="math") as buffer:
        buffer.store.open_run()
        for rank in (1, 0):
            looks = iter((False, True))
            assert list(buffer.reader(rank, 2).steps(until=lambda looks=looks: next(looks))) == []
    assert [text.partition(" for ")[2].split(" for ")[0] for text in told(caplog)] == ["step 1"]


def test_a_long_wait_is_told_again_only_after_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    with rlbuffer.connect("memory://", run="math") as buffer:
        buffer.store.open_run()
        wait = LongWait(buffer.store)
        for _ in range(3):
            wait.look("step 1")
    assert len(told(caplog)) == 1
