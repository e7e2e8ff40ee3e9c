"""Readers whose run changes under them: they say what happened and end, instead of waiting for what cannot come."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from store_runs import Run

from rlbuffer.client.reader import Reader
from rlbuffer.errors import BatchTimeout, RlbufferError, RunGone
from rlbuffer.store.claim import decode_claim

pytest_plugins = ("store_fixtures",)


def make_reader(run: Run, *, timeout_seconds: float = 30.0, **options: Any) -> Reader:
    return Reader(run.again(), rank=0, world_size=1, timeout_seconds=timeout_seconds, **options)


def test_a_trainer_that_is_ahead_of_the_server_hands_back_what_it_has(run: Run) -> None:
    headers = [run.step(f"a.{n}", world_size=1) for n in range(2)]
    reader = make_reader(run, timeout_seconds=3)
    for step in (1, 2):
        reader.trained(reader.pull(step))
    # The contents of a server that lost its newest second.
    run.client.hset(run.store.keys.meta, mapping={"step": 1})
    run.client.hset(run.store.keys.trainer, mapping={"trained": 1, "digest": ""})
    with pytest.raises(BatchTimeout, match=r"no batch for step 3 within 3 s\."):
        reader.pull(3)
    claim = decode_claim(run.store.trainer().claim)
    assert (claim.step, claim.epoch, claim.digest) == (2, run.meta.epoch, headers[1].digest)
    assert [(step.step, step.group_ids) for step in claim.steps] == [(1, ("a.0",)), (2, ("a.1",))]
    assert claim.steps[1].envs == {"a": (2, headers[1].tokens)}
    reader.close()


def test_a_rank_that_acknowledges_nothing_waits_for_the_recovery(run: Run) -> None:
    run.step("a.0", world_size=2)
    reader = Reader(run.again(), rank=1, world_size=2, timeout_seconds=3)
    reader.trained(reader.pull(1))
    run.client.hset(run.store.keys.meta, mapping={"step": 0})
    with pytest.raises(BatchTimeout):
        reader.pull(2)
    # Another run under the name: nothing can come any more.
    run.client.hset(run.store.keys.meta, mapping={"epoch": run.meta.epoch + 500, "since": run.meta.epoch + 500})
    with pytest.raises(
        RunGone, match=rf"is in epoch {run.meta.epoch + 500}, the trainer in {run.meta.epoch}: it was r"
    ):
        reader.pull(2)
    reader.close()


def test_a_run_that_is_gone_ends_a_waiting_trainer_with_a_word(run: Run) -> None:
    run.step("a.0", world_size=1)
    reader = make_reader(run)
    reader.trained(reader.pull(1))
    for key in (*run.control_keys(), *run.payload_keys()):
        run.client.delete(key)
    with pytest.raises(RunGone, match="is not on the server"):
        reader.pull(2)
    with pytest.raises(RunGone, match=r"run .* is not on the server any more, nor is attempt \d+ of its trainer"):
        reader._progress.report()
    reader.close()


def test_abandoned_iterations_do_not_keep_the_threads_that_the_next_one_needs(run: Run) -> None:
    run.step("a.0", world_size=1)
    reader = make_reader(run, timeout_seconds=5)
    for _ in range(4):
        steps = reader.steps(1)
        assert next(steps).number == 1
        time.sleep(0.1)  # the prefetch of step 2 has begun
        steps.close()
    reader.close()


def test_closing_a_reader_ends_whoever_waits_in_it(run: Run) -> None:
    run.step("a.0", world_size=1)
    reader = make_reader(run)
    reader.start(0)
    caught: list[BaseException] = []

    def wait_for_ever(step: int) -> None:
        try:
            reader.pull(step)
        except BaseException as error:
            caught.append(error)

    threads = [threading.Thread(target=wait_for_ever, args=(step,)) for step in (2, 3, 4)]
    for thread in threads:
        thread.start()
    time.sleep(0.3)  # they wait by now; if not, the test is weaker, not wrong
    reader.close()
    for thread in threads:
        thread.join()
    assert sorted((type(error), str(error)) for error in caught) == [
        (RlbufferError, f"the reader was closed while it waited for step {step}") for step in (2, 3, 4)
    ]
    with pytest.raises(RlbufferError, match=r"the reader was closed$"):
        reader.pull(1)


def test_steps_end_for_a_caller_that_does_not_want_to_wait_any_longer(run: Run) -> None:
    run.step("a.0", world_size=1)
    reader = make_reader(run)
    asked: list[int] = []

    def until() -> bool:
        asked.append(1)
        return True

    assert [step.number for step in reader.steps(1, until=until)] == [1], "what is there is given without asking"
    assert asked == [1]
    assert reader._waiting is None, "nobody waits any more"
    reader.close()


def test_a_rank_whose_heartbeat_fails_for_any_reason_ends_with_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.step("a.0", world_size=1)
    store = run.again()
    reader = Reader(store, rank=0, world_size=1, timeout_seconds=30.0)
    reader.start()
    begun = threading.Event()

    def fail(*args: Any) -> None:
        begun.set()
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(type(store), "heartbeat", fail)
    assert begun.wait(30)
    with pytest.raises(RlbufferError, match=r"the heartbeat of rank 0 failed: ZeroDivisionError: a defect"):
        reader.pull(2)
    reader.close()


def test_a_rank_that_may_not_say_that_it_lives_trains_all_the_same(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run.step("a.0", world_size=1)
    reader = make_reader(run)
    run.client.delete(run.store.keys.heartbeats("rank"))
    run.client.set(run.store.keys.heartbeats("rank"), "no hash")  # and no right to write it ends the same way
    step = reader.pull(1)
    reader.trained(step)
    assert run.store.trainer().trained == 1
    assert any("now and later" in record.getMessage() for record in caplog.records)
    reader.close()
