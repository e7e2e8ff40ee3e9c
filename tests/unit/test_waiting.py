"""Waits and problems as records: what travels in a heartbeat, and what is made of heartbeats."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

import msgpack
import pytest

from rlbuffer.errors import RlbufferError, clause
from rlbuffer.records.waiting import Cause, Problem, Trouble, Wait, Waiting
from rlbuffer.state.heartbeats import Process, processes, rank_problems, run_problems, worker_problems
from rlbuffer.wire.bounded_msgpack import dumps, loads

STRANGE: list[Any] = [
    *(None, "", b"\xff", 7, [], ["no_trainer"], {}, {"kind": "of another version"}, {"kind": ["no_trainer"]}),
    *({"kind": 2**63}, {"kind": None}, {b"kind": b"no_trainer"}),
]


@pytest.mark.parametrize("kind", Wait)
def test_a_wait_of_each_kind_travels_as_a_map_and_has_a_sentence(kind: Wait) -> None:
    for waiting in (
        Waiting(kind=kind, detail="why"),
        Waiting(
            kind=kind, step=7, env="a", groups=2, done=0.5, version=3, seconds=300.0, dropped="stale", detail="why"
        ),
    ):
        assert Waiting.of(msgpack.unpackb(msgpack.packb(waiting.record()))) == waiting
        assert str(waiting)


def test_a_trainer_that_was_taken_back_is_told_what_its_checkpoints_need() -> None:
    """After a take-back it would be refused with its last checkpoint; one that only went is not."""
    taken_back, silent = (Waiting(kind=Wait.TRAINER_GONE, step=15, trained=15, seconds=s) for s in (0.0, 20.0))
    assert "Move those of steps that were taken back away first." in str(taken_back)
    assert "reads the same steps" not in str(taken_back)
    assert str(silent).endswith("it resumes from its last checkpoint and reads the same steps.")


@pytest.mark.parametrize("kind", Trouble)
def test_a_problem_of_each_kind_travels_as_a_map_and_has_a_sentence(kind: Trouble) -> None:
    for problem in (Problem(kind=kind), Problem(kind=kind, env="a", worker="w", step=7, count=2, detail="why")):
        assert Problem.of(msgpack.unpackb(msgpack.packb(problem.record()))) == problem
        assert str(problem)


@pytest.mark.parametrize("value", STRANGE)
def test_what_is_no_record_counts_as_none(value: Any) -> None:
    said = Process.of("worker", "w", {"waiting": value, "problems": value}, seconds_ago=1.0)
    assert (said.waiting, said.problems) == (None, ())
    said = Process.of("worker", "w", {"problems": [value, {"kind": "memory"}]}, seconds_ago=1.0)
    assert said.problems == (Problem(kind=Trouble.MEMORY),)


@pytest.mark.parametrize("value", [*STRANGE, math.nan, math.inf, True, -1, 1.5, 2**64 - 1, {1: 2}, [[]]])
def test_whatever_a_heartbeat_holds_makes_a_process_that_is_json(value: Any) -> None:
    beat = {field.name: value for field in fields(Process)} | {"left": value, "stopped": value}
    process = Process.of("worker", "w", beat, seconds_ago=1.0)
    assert (process.kind, process.name, process.seconds_ago) == ("worker", "w", 1.0)
    assert process.title
    json.dumps(asdict(process), allow_nan=False)


def test_fields_of_another_type_are_left_out() -> None:
    strange = {"step": "7", "env": b"a", "groups": 1.5, "done": math.nan, "seconds": math.inf, "limit": True, "x": 1}
    waiting = Waiting.of({"kind": "filling", "forming": 3, **strange})
    assert waiting == Waiting(kind=Wait.FILLING, forming=3)
    assert str(waiting)


def beat(*problems: Problem, ago: float = 1.0, env: str = "a", **more: Any) -> Mapping[str, Any]:
    return {"env": env, "seconds_ago": ago, "problems": [problem.record() for problem in problems], **more}


FAILS = Problem(kind=Trouble.ENV_FAILS, count=3, detail="KeyError 3")


def test_the_problems_of_an_envs_workers_are_one_of_each_kind() -> None:
    workers = {f"w{n}": beat(FAILS) for n in range(5)} | {"x": beat(FAILS, env="b")}
    first, second = worker_problems(processes("worker", workers))
    assert (first.kind, first.env, first.count, first.worker) == (Trouble.ENV_FAILS, "a", 15, "w0, w1, w2 and 2 more")
    assert (second.env, second.count) == ("b", 3)


def test_of_an_env_that_fails_it_is_said_what_to_do_and_what_the_run_does_meanwhile() -> None:
    (problem,) = worker_problems(processes("worker", {"w": beat(FAILS)}))
    what, remedy = str(problem).split(": KeyError 3. ")
    assert what == "a fails: w has abandoned 3 groups"
    assert "start the worker again" in remedy
    assert "The run goes on without a prompt that fails" in remedy
    assert "`rlbuffer inspect processes`" in remedy


def test_of_what_several_ranks_lack_the_source_of_most_is_named() -> None:
    lacks = {"0": (40, "40 of env a by worker evil"), "1": (1, "1 of env b by worker good")}
    ranks = {
        name: beat(Problem(kind=Trouble.DAMAGED, step=5, count=count, detail=detail))
        for name, (count, detail) in lacks.items()
    }
    (problem,) = rank_problems(processes("rank", ranks))
    assert (problem.count, problem.detail) == (41, "40 of env a by worker evil")


def test_the_last_words_of_a_worker_count_until_another_one_samples_its_env() -> None:
    gone = beat(FAILS, ago=9.0)
    assert [p.kind for p in worker_problems(processes("worker", {"w": gone}))] == [Trouble.ENV_FAILS]
    assert worker_problems(processes("worker", {"w": gone, "heir": beat()})) == ()


def test_an_env_whose_workers_are_silent_has_none() -> None:
    assert [(p.kind, p.env) for p in worker_problems(processes("worker", {"w": beat(ago=13.0)}))] == [
        (Trouble.NO_WORKER, "a")
    ]
    assert worker_problems(processes("worker", {"w": beat(ago=13.0), "other": beat(ago=9.0)})) == ()


@pytest.mark.parametrize(
    ("kind", "problems"), [(Wait.ENDED, 0), (Wait.STOPPED, 0), (Wait.FAILED, 1), (Wait.FILLING, 1)]
)
def test_silent_workers_of_a_run_at_rest_are_no_problem(kind: Wait, problems: int) -> None:
    workers = processes("worker", {"w": beat(ago=600.0)})
    assert len(worker_problems(workers, Waiting(kind=kind))) == problems
    assert [p.kind for p in worker_problems(processes("worker", {"w": beat(FAILS)}), Waiting(kind=kind))] == [
        FAILS.kind
    ]


def test_a_run_without_a_worker_is_told_of_while_nothing_has_come() -> None:
    assert worker_problems(()) == ()
    assert worker_problems((), Waiting(kind=Wait.FILLING, env="a")) == ()
    assert worker_problems((), Waiting(kind=Wait.FILLING)) == (Problem(kind=Trouble.NO_WORKER),)
    assert worker_problems((), Waiting(kind=Wait.FILLING, cause=Cause.AGENTS)) == ()


def test_what_a_gateway_says_must_be_cured_is_a_problem_of_the_run() -> None:
    stuck = {"gateway-1": beat(Problem(kind=Trouble.SERVER, detail="no room"))}
    (problem,) = run_problems(processes("gateway", stuck), None)
    assert (problem.kind, problem.worker) == (Trouble.SERVER, "gateway-1")


def test_what_utf_8_cannot_hold_keeps_no_process_from_saying_what_is_wrong() -> None:
    for said in (Problem(kind=Trouble.ENV_FAILS, detail="no tool \ud83d"), Waiting(kind=Wait.PROMPT, detail="\ud83d")):
        record = loads(dumps(said.record()), limit=1000)
        assert "\\ud83d" in record["detail"]
        assert type(said).of(record).kind is said.kind


@pytest.mark.parametrize("detail", ["it broke", "it broke.", "it broke. ", "It broke. Mend it."])
@pytest.mark.parametrize("kind", [*Wait, *Trouble])
def test_a_sentence_has_one_full_stop_behind_what_somebody_else_said(kind: Wait | Trouble, detail: str) -> None:
    record = Waiting if isinstance(kind, Wait) else Problem
    values: dict[str, Any] = {"kind": kind, "env": "a", "step": 7, "detail": detail}
    said = str(record(**values))
    assert not re.search(r"\.\s*[.;,:)]", said), said
    assert detail.strip().rstrip(".") in said or "it broke" not in said


@pytest.mark.parametrize("text", ["it broke", "it broke.", "it broke. "])
def test_a_clause_has_no_full_stop_at_its_end(text: str) -> None:
    assert clause(text) == clause(RlbufferError(text)) == "it broke"
    assert clause("cut off here...") == "cut off here..."
