"""A stream: whole groups in one order, several held at once, acknowledged by place, on the trainer's own clock."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
from daemon_runs import Served
from store_runs import Run

import rlbuffer
from rlbuffer.client.buffer import Buffer
from rlbuffer.client.stream import Stream, Taken
from rlbuffer.config.settings import RunSettings
from rlbuffer.errors import ConfigError, ResumeRefused, RlbufferError, UnknownLabel
from rlbuffer.records.rollout import Rollout, TokenSequence
from rlbuffer.testing import make_group

pytest_plugins = ("store_fixtures",)

STREAM = rlbuffer.BatcherConfig(1024, feeds="stream", max_age=3)
SECONDS = 60.0


def opened(run: Run) -> Buffer:
    return run.closes(Buffer(run.again(), settings=RunSettings()))


def streamed(run: Run, state: object = None) -> Stream:
    """A trainer of the stream that has announced what it begins with."""
    stream = opened(run).stream(timeout_seconds=SECONDS)
    stream.resume(json.loads(json.dumps(state)) if state is not None else None)
    stream.version("start")
    return stream


def pushed(run: Run, number: int, *, version: int = 0, size: int = 2) -> rlbuffer.Group:
    """A group whose first rollout has two sequences and metadata."""
    group = make_group(env="a", group_id=f"a.{number}", size=size, seed=number, version=version)
    other = make_group(env="a", seed=1000 + number, version=version).rollouts[0]
    further = TokenSequence(
        tokens=other.tokens, loss_mask=other.loss_mask, logprobs=other.logprobs, version_spans=other.version_spans
    )
    first = replace(group.rollouts[0], further=(further,), metadata={"number": number}, text="said")
    group = replace(group, rollouts=(first, *group.rollouts[1:]), answer=number, metadata={"of": "group"})
    opened(run).writer(f"w{number}").push(group)
    return group


def same(one: Rollout, other: Rollout) -> bool:
    return one == other


def taken(stream: Stream, count: int) -> list[Taken]:
    return list(islice(stream, count))


def account(run: Run) -> tuple[int, int, int]:
    """Rollouts packed, trained and unused."""
    its = run.store.ledger().envs["a"]
    return its.packed[0], its.trained[0], its.dropped.get("unused", (0, 0))[0]


def clean(run: Run) -> None:
    report = opened(run).verify()
    assert report.ok, report.findings


def test_groups_come_whole_and_in_order_and_as_many_as_the_trainer_holds(served: Served) -> None:
    run = served.run
    served.serve(STREAM)
    stream = streamed(run)
    groups = [pushed(run, number) for number in range(25)]
    got = taken(stream, 25)
    assert [its.place for its in got] == list(range(1, 26))
    assert sorted(its.group_id for its in got) == sorted(group.group_id for group in groups)
    by_id = {group.group_id: group for group in groups}
    for its in got:
        group = by_id[its.group_id]
        assert len(its.rollouts) == len(group.rollouts)
        assert all(map(same, its.rollouts, group.rollouts))
        assert (its.answer, dict(its.metadata)) == (group.answer, {"of": "group"})
        assert (its.version, its.age) == (0, 0)
    assert account(run) == (50, 0, 0)
    stream.trained(25)
    assert account(run) == (0, 50, 0)
    clean(run)


def test_a_trainer_that_resumes_is_given_the_same_groups_and_its_part_again(served: Served) -> None:
    run = served.run
    served.serve(STREAM)
    stream = streamed(run)
    for number in range(6):
        pushed(run, number)
    first = taken(stream, 5)
    stream.trained(2, part=3, unused=[first[1].rollouts[0].rollout_id, first[2].rollouts[1].rollout_id])
    state = stream.state
    stream.trained(4)
    stream.close()

    again = streamed(run, state)
    second = taken(again, 3)
    assert [(its.place, its.group_id, its.digest) for its in second] == [
        (its.place, its.group_id, its.digest) for its in first[2:5]
    ]
    assert all(map(same, second[0].rollouts, first[2].rollouts))
    assert [its.part for its in second] == [3, 0, 0]
    assert again.state["unused"] == [first[2].rollouts[1].rollout_id]
    again.trained(5)
    assert account(run) == (2 if run.store.meta().step == 6 else 0, 8, 2)
    clean(run)


def test_a_trainer_is_given_groups_that_teach_nothing_by_the_runs_own_rule(served: Served) -> None:
    run = served.run
    served.serve(STREAM)
    stream = streamed(run)
    writer = opened(run).writer("w")
    untrained = make_group(env="a", group_id="a.0", rewards=[0.0, 1.0])
    rollouts = [replace(its, loss_mask=np.zeros_like(its.loss_mask)) for its in untrained.rollouts]
    writer.push(replace(untrained, rollouts=tuple(rollouts)))
    writer.push(make_group(env="a", group_id="a.1", rewards=[1.0, 1.0]))
    writer.done("a")  # nothing more comes
    got = []
    for its in stream:
        got.append(its.group_id)
        stream.trained(its)
    assert sorted(got) == ["a.0", "a.1"]
    assert account(run) == (0, 4, 0)
    clean(run)


def test_a_trainer_with_fresh_weights_is_given_the_groups_from_the_first_one_on(served: Served) -> None:
    run = served.run
    served.serve(STREAM)
    stream = streamed(run)
    for number in range(4):
        pushed(run, number)
    first = taken(stream, 3)
    stream.trained(2, unused=[first[0].rollouts[0].rollout_id])
    stream.close()
    again = streamed(run, Stream.BEGINNING)
    assert [its.digest for its in taken(again, 3)] == [its.digest for its in first]
    again.trained(3)
    assert account(run) == (2, 5, 1)
    clean(run)


def test_a_stream_without_a_state_goes_on_behind_what_is_trained(served: Served) -> None:
    run = served.run
    served.serve(STREAM)
    stream = streamed(run)
    for number in range(4):
        pushed(run, number)
    taken(stream, 3)
    stream.trained(2)
    stream.close()
    assert [its.place for its in taken(streamed(run), 2)] == [3, 4]


@pytest.mark.parametrize(
    ("place", "unused", "what"), [(9, [], "place 9 was not taken"), (1, ["nobody/7"], "no group that is taken")]
)
def test_what_was_not_taken_is_not_acknowledged(served: Served, place: int, unused: list[str], what: str) -> None:
    run = served.run
    served.serve(STREAM)
    stream = streamed(run)
    pushed(run, 0)
    taken(stream, 1)
    with pytest.raises(ValueError, match=what):
        stream.trained(place, unused=unused)
    assert account(run) == (2, 0, 0)


def test_what_was_unused_goes_when_its_step_is_taken_back_or_retires(served: Served) -> None:
    run = served.run
    served.serve(STREAM)
    stream = streamed(run)
    for number in range(4):
        pushed(run, number)
    groups = taken(stream, 4)
    stream.trained(3, unused=[groups[0].rollouts[0].rollout_id, *(r.rollout_id for r in groups[2].rollouts)])
    assert account(run) == (2, 3, 3)
    stream.checkpointed(1)
    served.wait_for(lambda: run.store.meta().retired == 1)
    assert set(run.store.unused()) == {3}
    clean(run)
    stream.close()
    served.stop()
    run.store.void_from(3, force=True)
    assert account(run) == (0, 3, 1)
    assert run.store.ledger().envs["a"].dropped["void"][0] == 4
    assert run.store.policy().version == 0
    clean(run)


# -- the clock ---------------------------------------------------------------------------------------------------------
def test_versions_count_what_the_trainer_announces_over_all_of_its_starts(served: Served) -> None:
    run = served.run
    served.serve(STREAM)
    writer = opened(run).writer("w")
    stream = opened(run).stream(timeout_seconds=SECONDS)
    stream.resume()
    assert [stream.version(label) for label in (0, 0, 1)] == [0, 0, 1]
    assert (writer.version(0), writer.version("1")) == (0, 1)
    pushed(run, 0, version=writer.version(1))
    assert [(its.version, its.age) for its in taken(stream, 1)] == [(1, 0)]
    stream.trained(1)
    state = stream.state
    stream.close()
    second = opened(run).stream(timeout_seconds=SECONDS)
    second.resume(state)
    assert second.version(0) == 2  # another process counts its own from 0 again
    assert writer.version(0) == 2
    pushed(run, 1, version=1)
    (its,) = taken(second, 1)
    assert (its.version, its.age) == (2, 1)
    with pytest.raises(UnknownLabel, match=r"'7'.*'0', '1'"):
        writer.version(7)
    for label in range(10, 16):
        second.version(label)
    with pytest.raises(UnknownLabel):
        writer.version(1)
    assert [writer.version(label) for label in range(11, 16)] == [4, 5, 6, 7, 8]


def test_a_group_that_no_version_can_train_any_more_is_dropped_as_stale(served: Served) -> None:
    run = served.run
    served.serve(STREAM)
    stream = streamed(run)
    for label in range(4):
        stream.version(label)
    pushed(run, 0, version=0)
    pushed(run, 1, version=1)
    (its,) = taken(stream, 1)
    assert (its.group_id, its.version, its.age) == ("a.1", 4, 3)
    served.wait_for(lambda: run.store.ledger().envs["a"].dropped.get("stale", (0, 0))[0] == 2)
    clean(run)


# -- who reads what ----------------------------------------------------------------------------------------------------
def test_a_reader_and_a_stream_refuse_each_others_runs(served: Served) -> None:
    run = served.run
    served.serve(STREAM)
    served.wait_for(lambda: run.store.meta().config)
    with pytest.raises(ConfigError, match=r"buffer\.stream\(\)"):
        opened(run).reader()


def test_a_stream_refuses_rows_also_where_the_batcher_comes_later(served: Served) -> None:
    run = served.run
    stream = opened(run).stream(timeout_seconds=SECONDS)
    errors: list[RlbufferError] = []

    def wait() -> None:
        try:
            taken(stream, 1)
        except RlbufferError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    served.serve(rlbuffer.BatcherConfig(1024, step_groups=1))
    thread.join()
    assert isinstance(errors[0], ConfigError)
    with pytest.raises(ConfigError, match=r"buffer\.reader\(\)"):
        opened(run).stream()


def test_a_place_that_the_run_does_not_reach_is_refused(served: Served) -> None:
    run = served.run
    served.serve(STREAM)
    stream = streamed(run)
    pushed(run, 0)
    taken(stream, 1)
    stream.trained(1)
    state = json.loads(json.dumps(stream.state))
    stream.close()
    state["reader"] |= {"step": 9, "steps": [], "digest": ""}
    other = opened(run).stream(timeout_seconds=SECONDS)
    with pytest.raises(ResumeRefused):
        other.resume(state)


# -- tickets -----------------------------------------------------------------------------------------------------------
def test_a_loop_has_as_many_groups_open_as_it_holds_and_asks_without_waiting(served: Served) -> None:
    run = served.run
    served.serve(replace(STREAM, max_age=0))
    streamed(run)
    writer = opened(run).writer("w")
    out = writer.take("a", 20, hold=16, timeout_seconds=SECONDS)
    while more := writer.take("a", 20, hold=16, wait=False):
        out += more
    assert len(out) == 16
    other = opened(run).writer("other")
    assert other.take("a", wait=False) == []
    assert len(other.take("a", 20, hold=3, wait=False)) == 3
    writer.release(out[:2])
    assert len(writer.take("a", 20, hold=16, wait=False)) == 2


# -- its end -----------------------------------------------------------------------------------------------------------
WAITS = """
import sys, threading, time
import rlbuffer
buffer = rlbuffer.connect(sys.argv[1], run=sys.argv[2])
stream = buffer.stream()
stream.resume()
threading.Thread(target=next, args=(iter(stream),), daemon=True).start()
while not any(t.name == "rlbuffer-prefetch" for t in threading.enumerate()):
    time.sleep(0.01)
print("waits")
"""


def test_a_stream_that_waits_and_is_not_closed_ends_with_its_process(served: Served) -> None:
    run = served.run
    served.serve(STREAM)
    done = subprocess.run(
        [sys.executable, "-c", WAITS, run.url, run.store.run], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, "waits\n"), done.stderr


def test_iterating_ends_with_the_run(served: Served) -> None:
    run = served.run
    served.serve(STREAM)
    stream = streamed(run)
    pushed(run, 0)
    opened(run).writer("last").done("a")

    def places() -> Iterator[int]:
        for its in stream:
            stream.trained(its.place)
            yield its.place

    assert list(places()) == [1]
    assert stream.has_ended


def test_the_age_of_what_waits_counts_announced_versions(served: Served) -> None:
    run = served.run
    served.serve(replace(STREAM, lookahead=0))
    stream = streamed(run)
    for number in range(6):
        pushed(run, number)
    taken(stream, 3)
    stream.version("next")
    buffer = opened(run)
    ages = {view.age for view in buffer.groups("state:ready")}
    assert ages == {1}
    assert min(view.age or 0 for view in buffer.groups("state:packed")) == 0
