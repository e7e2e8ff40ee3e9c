"""Data that ends: which numbers are given, when an env is done, and how a run ends with success."""

from __future__ import annotations

import threading

import pytest
import waits
from daemon_runs import Served
from store_runs import Run

import rlbuffer
from rlbuffer.client.reader import Reader
from rlbuffer.client.writer import Writer
from rlbuffer.errors import EnvDone, EpochChanged, NotFound, RunGone
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.records.waiting import Wait, Waiting
from rlbuffer.store.viewer import Viewer
from rlbuffer.testing import make_group

pytest_plugins = ("store_fixtures",)

CONFIG = rlbuffer.BatcherConfig(64, step_groups=2, max_age=8)


def take(run: Run, size: int | None, *, n: int = 9, env: str = "a") -> list[int]:
    return run.store.take_tickets(env, n, ttl_seconds=60, size=size)


def is_done(run: Run, size: int | None, env: str = "a") -> bool:
    try:
        return bool(take(run, size, env=env)) and False
    except EnvDone:
        return True


def opened(run: Run, tickets: int = 9) -> Run:
    run.lead()
    run.store.set_allowances({"a": tickets})
    return run


# -- tickets -----------------------------------------------------------------------------------------------------------
def test_no_number_is_given_from_the_end_on_and_the_env_is_done_once_none_is_out(run: Run) -> None:
    opened(run)
    assert take(run, 3) == [0, 1, 2]
    assert take(run, 3) == []  # the others are at work on the last ones
    assert (run.store.sources().done, run.store.sources().open) == (frozenset(), {"a"})
    run.store.close_tickets("a", [0, 2])
    assert not is_done(run, 3)
    run.store.close_tickets("a", [1])
    assert is_done(run, 3)
    assert (run.store.sources().done, run.store.sources().declared) == ({"a"}, frozenset())


def test_what_a_killed_worker_held_is_given_again_before_the_env_is_done(run: Run) -> None:
    opened(run)
    assert take(run, 2) == [0, 1]
    run.store.close_tickets("a", [0])
    run.store.release_tickets("a", [1])  # as if its time were over
    assert run.store.sources().done == frozenset()
    assert take(run, 2) == [1]  # it expired with its worker
    assert not is_done(run, 2)
    run.store.close_tickets("a", [1])
    assert is_done(run, 2)


@pytest.mark.parametrize(
    ("sizes", "end"),
    [
        ((3, 5), 5),  # of two workers with different ends none stops the other early
        ((5, 3), 5),
        ((None, 3), 3),
        ((3, None), 3),
        ((None, None), None),
    ],
)
def test_which_of_two_ends_counts(run: Run, sizes: tuple[int | None, ...], end: int | None) -> None:
    for size in sizes:
        take(run, size, n=1)
    assert run.store.sources().ends == ({} if end is None else {"a": end})


def test_a_worker_that_knows_of_no_end_hears_of_one_that_was_said(run: Run) -> None:
    opened(run)
    assert take(run, None, n=2) == [0, 1]
    run.store.say_done("a", epoch=run.meta.epoch)
    assert take(run, None) == []
    run.store.close_tickets("a", [0, 1])
    assert is_done(run, None)
    assert is_done(run, 1000)  # what a person says counts before what a worker's data says
    run.store.say_done("a", epoch=run.meta.epoch)
    assert run.store.sources().ends == {"a": 2}
    assert run.store.forget_end("a") is True
    assert take(run, 1000, n=1) == [2]
    assert run.store.sources().ends == {"a": 1000}


def test_an_env_that_never_took_a_ticket_is_done_when_its_producer_says_so(run: Run) -> None:
    run.push("a.0")
    run.store.say_done("a", epoch=run.meta.epoch)
    assert (run.store.sources().done, run.store.sources().ends) == ({"a"}, {"a": 0})
    assert run.store.sources().declared == {"a"}
    assert run.store.forget_end("b") is False


def test_a_producer_of_another_epoch_says_nothing(run: Run) -> None:
    with pytest.raises(EpochChanged, match="it was reset, rewound or recovered"):
        run.store.say_done("a", epoch=run.meta.epoch - 1)
    assert run.store.sources().done == frozenset()
    run.store.delete_run()
    with pytest.raises(RunGone, match="is not on the server any more"):
        run.store.say_done("a", epoch=run.meta.epoch)


def test_a_worker_that_is_to_come_is_waited_for_until_it_has_asked_for_tickets(run: Run) -> None:
    run.store.expect(["x", "old"])
    run.store.expect(["x", "y"])
    assert run.store.sources().expected == {"x", "y"}
    assert run.store.take_tickets("a", 1, ttl_seconds=60, size=1, section="x") == []
    assert run.store.sources().expected == {"y"}
    with pytest.raises(EnvDone):
        run.store.take_tickets("b", 1, ttl_seconds=60, size=0, section="y")
    sources = run.store.sources()
    assert (sources.expected, sources.done, sources.open) == (frozenset(), {"b"}, {"a"})


@pytest.mark.parametrize(
    "lets_it_go_on",
    [
        lambda store: store.forget_end("a"),
        lambda store: store.expect(["x"]),
        lambda store: store.take_tickets("b", 1, ttl_seconds=60, size=9),
    ],
    ids=["resume", "expect", "another env"],
)
def test_a_run_does_not_end_by_a_look_at_its_sources_that_is_too_old(run: Run, lets_it_go_on) -> None:
    opened(run)
    run.store.say_done("a", epoch=run.meta.epoch)
    seen = run.store.sources().written
    lets_it_go_on(run.store)
    assert run.store.set_ended(0, seen) is False
    assert run.store.meta().ended is None
    assert run.store.set_ended(0, run.store.sources().written) is True


def test_what_stands_where_ends_and_numbers_should_is_an_env_without_an_end(run: Run) -> None:
    run.client.hset(run.store.keys.ends, mapping={"a": "=x", "b": "-1", "c": "9" * 99, "d": "2"})
    run.client.hset(run.store.keys.numbers, "d", "many")
    sources = run.store.sources()
    assert (sources.done, sources.open) == (frozenset(), {"a", "b", "c", "d"})


def test_a_writer_says_it_after_what_it_has_pushed_and_checks_the_name(run: Run) -> None:
    writer = Writer(run.store, "w", epoch=run.meta.epoch)
    writer.push(make_group(env="a", group_id="a.0"))
    writer.done("a")
    assert run.store.sources().done == {"a"}
    with pytest.raises(EnvDone):
        writer.take("a", timeout_seconds=0)
    with pytest.raises(ValueError, match=r"done: env: expected the name of an env, .*, got 'a b'"):
        writer.done("a b")
    with pytest.raises(ValueError, match="take: size: expected an integer from 0 on, got -1"):
        writer.take("a", size=-1)


# -- a run from its first group to its end -----------------------------------------------------------------------------
class Loop:
    """A trainer's loop in a thread: reads until the run has ended."""

    def __init__(self, run: Run) -> None:
        self.reader = run.closes(Reader(run.again(), rank=0, world_size=1, timeout_seconds=30.0))
        self.steps: list[int] = []
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._read)
        self.thread.start()

    def _read(self) -> None:
        try:
            for step in self.reader.steps():
                self.steps.append(step.number)
                self.reader.announce(PolicyVersion(version=step.number))
        except BaseException as error:
            self.error = error

    def end(self) -> list[int]:
        self.thread.join(timeout=40)
        assert not self.thread.is_alive()
        assert self.error is None, self.error
        return self.steps


def wait_until_ended(served: Served, count: int = 1) -> None:
    served.wait_for(lambda: len(served.said("ended")) >= count, 20)


def rollouts(store: Viewer) -> tuple[int, int, int]:
    """(trained, dropped, pending)."""
    total = store.ledger().total()
    return total.trained[0], sum(rollouts for rollouts, _ in total.dropped.values()), total.pending[0]


def test_groups_that_make_no_whole_number_of_steps_all_train_and_everybody_ends(served: Served) -> None:
    run = served.run
    loop = Loop(run)
    served.serve(CONFIG)
    served.serve(CONFIG)  # stands by, and ends when it takes over
    for n in range(5):
        run.push(f"a.{n}")
    Writer(run.store, "w", epoch=run.meta.epoch).done("a")
    wait_until_ended(served, 2)
    assert loop.end() == [1, 2, 3]
    assert loop.reader.has_ended
    assert [event["closed_by"] for event in served.said("step")] == ["groups", "groups", "end"]
    assert run.store.meta().ended == 3
    assert rollouts(run.store) == (10, 0, 0)
    assert waits.said(run.store) == Waiting(kind=Wait.ENDED, step=3)
    assert served.errors == []
    assert run.store.verify().ok


def test_an_env_that_pushes_after_the_end_trains_when_the_run_is_started_again(served: Served) -> None:
    run = served.run
    served.serve(CONFIG)
    loop = Loop(run)
    run.push("a.0")
    run.store.say_done("a", epoch=run.meta.epoch)
    wait_until_ended(served)
    assert loop.end() == [1]
    run.push("a.1")
    assert run.store.has_ended() is False  # so a trainer that is started now waits for it
    reader = run.closes(Reader(run.again(), rank=0, world_size=1, timeout_seconds=30.0))
    reader.load_state_dict(loop.reader.state_dict())
    found: list[int] = []
    again = threading.Thread(target=lambda: found.extend(step.number for step in reader.steps()))
    again.start()
    served.serve(CONFIG)
    wait_until_ended(served, 2)
    again.join(timeout=40)
    assert found == [2]
    assert rollouts(run.store) == (4, 0, 0)
    with pytest.raises(NotFound):
        reader.pull(9)
    assert run.store.verify().ok


def test_a_step_that_is_taken_back_after_the_end_makes_the_run_end_before_it(served: Served) -> None:
    run = served.run
    served.serve(CONFIG)
    loop = Loop(run)
    for n in range(3):
        run.push(f"a.{n}")
    run.store.say_done("a", epoch=run.meta.epoch)
    wait_until_ended(served)
    assert loop.end() == [1, 2]
    loop.reader.close()
    run.store.void_from(2, force=True)
    assert run.store.meta().ended is None
    number = run.store.attempt(uuid="t", world_size=1, resume_step=1).number
    meta = run.store.meta()
    run.store.announce(number, PolicyVersion(version=1))
    served.serve(CONFIG)
    served.wait_for(
        lambda: (
            run.store.report(number, epoch=meta.epoch, trained=1, digest=meta.digest, oldest_kept=0)
            and len(served.said("ended")) == 2
        ),
        20,
    )
    assert run.store.meta().ended == 1
    assert rollouts(run.store) == (4, 2, 0)
    assert run.store.verify().ok


def test_a_drain_beside_it_lets_the_run_end(served: Served) -> None:
    run = served.run
    served.serve(CONFIG)
    loop = Loop(run)
    run.push("a.0")
    run.store.ask_drain()
    run.store.say_done("a", epoch=run.meta.epoch)
    wait_until_ended(served)
    assert loop.end() == [1]
