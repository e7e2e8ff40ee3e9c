"""Who was started a moment ago is not called missing, and says what it loads."""

from __future__ import annotations

from typing import Any

import pytest

from rlbuffer.process.heartbeat import starting
from rlbuffer.records.waiting import STARTING_SECONDS, Cause, Wait, Waiting
from rlbuffer.run.claim import SupervisorHeartbeat
from rlbuffer.state.heartbeats import (
    SUPERVISOR,
    Process,
    batcher_waiting,
    is_starting,
    while_starting,
    worker_problems,
)
from rlbuffer.state.run_state import RunState, ServerState
from rlbuffer_cli.run_tables import process_rows

LOADS = {"waiting": Waiting(kind=Wait.STARTING, seconds=9.0, detail="which loads its model").record()}
DEAD_SECONDS = 600.0


def process(kind: str, name: str, ago: float = 1.0, **beat: Any) -> Process:
    return Process.of(kind, name, beat, seconds_ago=ago)


SUPERVISOR_OF_A_START = process("batcher", SUPERVISOR, **LOADS)
OLD_WORKER = process("worker", "w", DEAD_SECONDS, env="a")


@pytest.mark.parametrize("kind", [Wait.NO_TRAINER, Wait.TRAINER_GONE])
def test_a_trainer_that_starts_is_not_missing(kind: Wait) -> None:
    missing = Waiting(kind=kind, step=3)
    assert while_starting(missing, [process("rank", "0")]) == missing
    for said in ([process("rank", "0", **LOADS)], [SUPERVISOR_OF_A_START]):
        told = while_starting(missing, said)
        assert told is not None
        assert (told.kind, told.is_normal) == (Wait.STARTING, True)
    left = process("rank", "0", left=True, **LOADS)
    assert while_starting(missing, [left]) == missing


def test_the_silent_of_a_run_that_was_started_a_moment_ago_are_no_problem() -> None:
    assert [len(worker_problems([OLD_WORKER], is_starting=starts)) for starts in (False, True)] == [1, 0]
    nothing = Waiting(kind=Wait.FILLING, step=1, cause=Cause.NO_WORKER)
    assert [len(worker_problems([], nothing, is_starting=starts)) for starts in (False, True)] == [1, 0]
    assert worker_problems([process("worker", "w", STARTING_SECONDS - 1, env="a", **LOADS)]) == ()
    assert len(worker_problems([process("worker", "w", STARTING_SECONDS + 1, env="a", **LOADS)])) == 1
    told = while_starting(nothing, [SUPERVISOR_OF_A_START])
    assert told is not None
    assert (nothing.is_normal, told.is_normal) == (False, True)


def test_a_batcher_that_is_still_to_come_is_not_missing() -> None:
    stopped = process("batcher", "leader", DEAD_SECONDS, waiting=Waiting(kind=Wait.STOPPED).record())
    for leader, other in ((None, Wait.NO_BATCHER), (stopped, Wait.STOPPED)):
        for starts, kind in ((True, Wait.STARTING), (False, other)):
            told = batcher_waiting(leader, is_led=False, is_starting=starts)
            assert told is not None
            assert told.kind is kind
    failed = batcher_waiting(None, is_led=False, error="no", is_starting=True)
    assert failed is not None
    assert failed.kind is Wait.NO_BATCHER, "what failed is said at once"


def test_a_supervisor_says_for_a_minute_that_all_start() -> None:
    claim = SupervisorHeartbeat(None, "r")  # type: ignore[arg-type]
    for ago, starts in ((0.0, True), (STARTING_SECONDS - 1, True), (STARTING_SECONDS, False)):
        claim._started -= ago
        assert is_starting([process("batcher", SUPERVISOR, **claim.record())]) == starts
        claim._started += ago


@pytest.mark.parametrize("goodbye", ["left", "stopped"])
def test_who_has_left_waits_for_nothing_but_says_how_the_run_ended(goodbye: str) -> None:
    supervisor = process("batcher", SUPERVISOR, **LOADS, **{goodbye: True})
    assert supervisor.waiting is None
    ended = process("batcher", "leader", waiting=Waiting(kind=Wait.ENDED, step=4).record(), **{goodbye: True})
    assert ended.waiting is not None
    state = RunState(
        run="r", at=0.0, server=ServerState(address="a"), processes=(supervisor, ended), waiting=ended.waiting
    )
    assert {row.title: str(row.says) for row in process_rows(state)} == {
        "supervisor": "",
        "batcher": str(ended.waiting),
    }


@pytest.mark.parametrize(("ago", "says"), [(1.0, True), (DEAD_SECONDS, False)])
def test_a_silent_rank_of_a_run_that_has_ended_waits_no_more(ago: float, says: bool) -> None:
    rank = process("rank", "0", ago, waiting=Waiting(kind=Wait.STEP, step=4).record())
    ended = Waiting(kind=Wait.ENDED, step=3)
    state = RunState(run="r", at=0.0, server=ServerState(address="a"), processes=(rank,), waiting=ended)
    (row,) = process_rows(state)
    assert bool(str(row.says)) == says
    assert [line for line in row.lines if line.startswith("waits")] == ["waits: " + str(rank.waiting)] * says


def test_who_loads_says_so_until_it_is_done_and_says_goodbye_where_it_fails() -> None:
    said: list[Process] = []

    def tell(record: dict[str, Any]) -> None:
        said.append(process("worker", "w", **record))

    with starting(tell, "which loads its model", env="a"):
        while not said:
            pass
    assert (said[0].env, said[0].is_starting) == ("a", True)
    assert not any(each.has_stopped for each in said), "the work's own heartbeats follow"
    with pytest.raises(RuntimeError), starting(tell, "which loads its model"):
        raise RuntimeError
    assert said[-1].has_stopped


def test_a_trainer_that_goes_on_from_a_checkpoint_says_how_far_it_is() -> None:
    busy = Waiting(kind=Wait.TRAINER_BUSY, step=65, trained=63, at=57, checkpoint=50)
    assert "at 57 of 63, from checkpoint 50" in str(busy)
    assert "slower" not in str(busy)


@pytest.mark.parametrize("kind", [Wait.FILLING, Wait.ENV_SHORT, Wait.ENV_DEAD])
def test_where_no_worker_is_at_work_that_is_the_sentence(kind: Wait) -> None:
    said = Waiting(kind=kind, step=7, env="a", groups=3, done=0.5, forming=2, seconds=40.0, cause=Cause.NO_WORKER)
    assert str(said).startswith("No worker of a is at work")


def test_a_version_is_a_trouble_only_where_it_does_not_come() -> None:
    assert Waiting(kind=Wait.VERSION, step=1).is_normal
    assert not Waiting(kind=Wait.VERSION, step=1, seconds=STARTING_SECONDS).is_normal
