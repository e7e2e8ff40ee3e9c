"""The end of a run whose trainer has made its last step: who says it, who hears it, and what takes it back."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import waits
from worker_stage import eventually

import rlbuffer
from rlbuffer.daemon import Daemon
from rlbuffer.errors import RunEnded
from rlbuffer.records.waiting import Wait, Waiting
from rlbuffer.testing import make_group

CONFIG = rlbuffer.BatcherConfig(64, step_groups=1, max_age=8)


@contextmanager
def serving(buffer: rlbuffer.Buffer) -> Iterator[None]:
    """A batcher in a thread."""
    stop = threading.Event()
    thread = threading.Thread(target=Daemon(buffer, CONFIG).run, args=(stop,))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(30)
        assert not thread.is_alive()


@pytest.fixture
def buffer() -> Iterator[rlbuffer.Buffer]:
    with rlbuffer.connect("memory://", run="finished") as made:
        yield made


def push_all(writer: rlbuffer.Writer) -> int:
    """A worker of one's own. -> the groups that it has pushed until the run ended."""
    count = 0
    for ticket in writer.tickets("math"):
        writer.push(ticket, make_group(rollout_ids=["", ""], version=0).rollouts)
        count += 1
    return count


def train(buffer: rlbuffer.Buffer, last: int, state: dict[str, object] | None = None) -> dict[str, object]:
    """A trainer of one's own, to step `last`. -> its state."""
    with buffer.reader(timeout_seconds=30.0) as reader:
        if state is not None:
            reader.load_state_dict(state)
        buffer.policy.announce(reader.step, location="", size=0, checksum="")
        for step in reader.steps(last=last):
            assert step.number <= last
            buffer.policy.announce(step.number, location="", size=0, checksum="")
        return reader.state_dict()


def eventually_says(buffer: rlbuffer.Buffer, waiting: Waiting) -> None:
    eventually(lambda: waits.said(buffer.store) == waiting)


def test_a_trainer_that_leaves_its_block_well_ends_the_run_for_batcher_and_workers(buffer: rlbuffer.Buffer) -> None:
    pushed: list[int] = []
    worker = threading.Thread(target=lambda: pushed.append(push_all(buffer.writer("w"))))
    with serving(buffer):
        worker.start()
        state = train(buffer, 3)
        worker.join(30)
        assert pushed
        assert pushed[0] >= 3
        eventually_says(buffer, Waiting(kind=Wait.ENDED, step=3))
        assert state["step"] == 3
    with serving(buffer):  # whoever leads later says the same, and nobody is told to start the trainer again
        eventually_says(buffer, Waiting(kind=Wait.ENDED, step=3))


def test_a_worker_that_comes_behind_the_end_waits_for_the_trainer_that_goes_on(buffer: rlbuffer.Buffer) -> None:
    with serving(buffer):
        before = buffer.writer("before")
        writer = buffer.writer("w")
        worker = threading.Thread(target=push_all, args=(writer,))
        worker.start()
        state = train(buffer, 1)
        worker.join(30)
        with pytest.raises(RunEnded, match=r"^run 'finished' has ended: its trainer has made its last step, 1$"):
            before.take("math")
        later = buffer.writer("later")
        assert later.take("math", timeout_seconds=0.2) == []
        worker = threading.Thread(target=push_all, args=(later,))
        worker.start()
        assert train(buffer, 3, state)["step"] == 3
        worker.join(30)
        assert not worker.is_alive()


def leave_by_an_exception(reader: rlbuffer.Reader) -> None:
    def crash() -> None:
        with reader:
            next(reader.steps())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        crash()


def leave_when_asked_to_stop(reader: rlbuffer.Reader) -> None:
    asked = iter([False, True])
    with reader:
        for _ in reader.steps(until=lambda: next(asked, True)):
            pass


def leave_without_having_begun(reader: rlbuffer.Reader) -> None:
    with reader:
        pass


@pytest.mark.parametrize("leave", [leave_by_an_exception, leave_when_asked_to_stop, leave_without_having_begun])
def test_a_trainer_that_means_to_go_on_ends_no_run(buffer: rlbuffer.Buffer, leave: object) -> None:
    with serving(buffer):
        writer = buffer.writer("w")
        writer.push(make_group(env="math"))
        assert callable(leave)
        leave(buffer.reader(timeout_seconds=30.0))
        writer.take("math", timeout_seconds=0.2)
        assert not buffer.store.trainer().is_finished


def test_only_rank_0_ends_a_run(buffer: rlbuffer.Buffer) -> None:
    first, second = (buffer.reader(rank, 2, timeout_seconds=30.0) for rank in (0, 1))
    first.start()
    with second:
        second.start()
    assert not buffer.store.trainer().is_finished
    first.finished()
    assert buffer.store.trainer().is_finished
    buffer.reader(0, 2).start()
    assert not buffer.store.trainer().is_finished
