"""Two ranks whose loop compares nothing, and a server that loses the step that one of them has."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import waits
from rolled_back import Loop, Saved
from store_runs import Run

import rlbuffer.client.ranks
from rlbuffer.client.reader import Reader
from rlbuffer.client.writer import Writer
from rlbuffer.errors import BatchTimeout
from rlbuffer.records.micro_batch import Step
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.records.waiting import Wait, Waiting
from rlbuffer.testing import make_group

pytest_plugins = ("store_fixtures",)


class Job:
    """The ranks of a loop of one's own, a worker, and a batcher."""

    def __init__(self, run: Run, pool: ThreadPoolExecutor) -> None:
        self.run, self._pool = run, pool
        self._writer, self._pushed = Writer(run.again(), "w", epoch=run.meta.epoch), 0
        self.readers = [self.reader(0), self.reader(1)]
        self.readers[0].start(0)
        self.readers[0].announce(PolicyVersion(version=0))
        self._steps = [reader.steps() for reader in self.readers]
        self.batcher = Loop(run.again())

    def reader(self, rank: int) -> Reader:
        return self.run.closes(Reader(self.run.again(), rank=rank, world_size=2, timeout_seconds=30))

    def push(self) -> None:
        """As much as a step takes."""
        for _ in range(2):
            self._pushed += 1
            name = f"a.{self._pushed}"
            self._writer.push(make_group(env="a", size=2, version=0, group_id=name, seed=self._pushed))

    def asks(self, rank: int) -> Future[Step]:
        return self._pool.submit(next, self._steps[rank])

    def train(self, asked: list[Future[Step]]) -> list[Step]:
        """Both ranks train what they were given."""
        given = [future.result(timeout=30) for future in asked]
        for reader, step in zip(self.readers, given, strict=True):
            reader.trained(step)
        return given

    def train_two_steps(self, kept: int) -> Saved:
        """-> the server's state after step `kept`."""
        for number in (1, 2):
            self.push()
            self.train([self.asks(0), self.asks(1)])
            if number == kept:
                self.batcher.close()
                saved = Saved(self.run)
                self.batcher = Loop(self.run.again())
        return saved

    def loses(self, saved: Saved) -> None:
        """The server comes back as it was, and gets enough for another step."""
        self.batcher.close()
        saved.put_back()
        self.batcher = Loop(self.run.again())
        self.push()
        self.push()


@pytest.fixture
def job(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    run = Run(redis_url, tmp_path_factory.mktemp("run"))
    with ThreadPoolExecutor(4) as pool:
        made = Job(run, pool)
        yield made
        made.batcher.close()
        run.close()
    assert made.batcher.errors == []


def until(fact: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not fact():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_rank_that_asks_before_rank_0_is_given_the_step_that_rank_0_is_given(job: Job) -> None:
    saved = job.train_two_steps(kept=2)
    job.push()
    until(lambda: job.run.store.meta().step == 3)
    early = job.asks(1)
    time.sleep(0.5)  # it would have the step by now, were rank 0 not asked
    lost = job.run.store.meta().digest
    job.loses(saved)
    given = job.train([job.asks(0), early])
    assert given[0].digest == given[1].digest != lost


def test_a_rank_that_asks_after_rank_0_is_given_the_step_that_rank_0_has(job: Job) -> None:
    saved = job.train_two_steps(kept=1)
    job.push()
    first = job.asks(0)
    until(lambda: first.done() and not job.readers[1]._fetches)  # rank 1 has pulled it ahead
    job.loses(saved)
    until(lambda: waits.said(job.batcher.store) == Waiting(kind=Wait.STEP_IN_HAND, step=3))
    given = job.train([first, job.asks(1)])
    assert given[0].digest == given[1].digest
    job.push()
    following = job.train([job.asks(0), job.asks(1)])
    assert [step.number for step in following] == [4, 4]
    assert following[0].digest == following[1].digest
    assert job.run.store.verify().findings == ()


def test_a_rank_that_can_never_get_the_step_of_rank_0_ends_and_the_next_trainer_goes_on(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rlbuffer.client.ranks, "LOST_SECONDS", 1.5)
    state = job.readers[0].state_dict()
    saved = job.train_two_steps(kept=2)
    job.push()
    lost = job.asks(0).result(timeout=30)
    job.loses(saved)
    slow = job.reader(1)
    slow.load_state_dict(job.readers[1].state_dict())
    with pytest.raises(BatchTimeout):
        next(slow.steps())
    assert job.run.store.meta().step == 2
    for reader in (slow, *job.readers):
        reader.close()

    job.readers = [job.reader(0), job.reader(1)]
    for reader in job.readers:
        reader.load_state_dict(state)
        reader.start()
    steps = [reader.steps() for reader in job.readers]
    while (given := job.train([job._pool.submit(next, its) for its in steps]))[0].number < 3:
        assert given[0].digest == given[1].digest
    assert given[0].digest == given[1].digest != lost.digest


def test_a_step_that_the_server_has_lost_is_trained_by_its_number_as_well(job: Job) -> None:
    saved = job.train_two_steps(kept=1)
    job.push()
    asked = [job.asks(0), job.asks(1)]
    given = [future.result(timeout=30) for future in asked]
    job.loses(saved)
    for reader, step in zip(job.readers, given, strict=True):
        reader.trained(step.number)
    ours, its = job.train([job.asks(0), job.asks(1)])
    assert ours.number == given[0].number + 1
    assert ours.digest == its.digest
