"""Why nothing more of an env comes, by what its workers say: the first that is true, and nothing that is not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rlbuffer.records.waiting import Cause, Problem, Trouble, Wait, Waiting
from rlbuffer.state.env_causes import explained
from rlbuffer.state.heartbeats import Process

STUCK = Problem(kind=Trouble.WORKER_STUCK, detail="no server can sample")
FAILS = Problem(kind=Trouble.ENV_FAILS, count=3, detail="KeyError 3")
LOADS = Waiting(kind=Wait.LOADING, version=7, seconds=80.0)
TICKET = Waiting(kind=Wait.TICKET, env="a")


def worker(name: str = "w", **fields: Any) -> Process:
    return Process(
        **{"kind": "worker", "name": name, "env": "a", "seconds_ago": 1.0, "version": 3, "groups": 5} | fields
    )


@pytest.mark.parametrize(
    ("workers", "heard", "cause", "detail"),
    [
        ([], {}, Cause.NO_WORKER, ""),
        ([], {"a": 40.0}, Cause.NO_WORKER, "the last push came 40 s ago"),
        ([], {"a": 12.0}, Cause.WRITERS, "the last push came 12 s ago"),
        ([], {"b": 1.0}, Cause.NO_WORKER, ""),
        ([worker(env="b")], {}, Cause.NO_WORKER, ""),
        ([worker(seconds_ago=40.0)], {}, Cause.NO_WORKER, "w was last seen 40 s ago"),
        ([worker(has_stopped=True)], {"a": 1.0}, Cause.WRITERS, "the last push came 1.0 s ago"),
        ([worker(has_stopped=True)], {}, Cause.NO_WORKER, "w ended 1.0 s ago"),
        ([worker()], {}, Cause.GENERATING, ""),
        ([worker(waiting=TICKET, sampling=2)], {}, Cause.GENERATING, ""),
        ([worker(waiting=TICKET)], {}, Cause.WAITING, f"w: {TICKET}"),
        ([worker(version=-1)], {}, Cause.WAITING, "w has no policy version yet."),
        ([worker(waiting=LOADS, sampling=2)], {}, Cause.LOADING, "w: Loading policy version 7, for 80 s so far."),
        ([worker(waiting=LOADS), worker("x")], {}, Cause.GENERATING, ""),
        ([worker(waiting=LOADS), worker("x", waiting=TICKET)], {}, Cause.LOADING, f"w: {LOADS}"),
        ([worker(problems=(STUCK,))], {}, Cause.TROUBLE, "The worker w of a says: no server can sample."),
        ([worker(problems=(FAILS,))], {}, Cause.GENERATING, ""),
        ([worker(problems=(FAILS,), groups=0)], {}, Cause.TROUBLE, str(replace(FAILS, env="a", worker="w"))),
    ],
)
def test_the_first_cause_that_is_true_is_said(
    workers: list[Process], heard: dict[str, float], cause: Cause, detail: str
) -> None:
    for kind in (Wait.FILLING, Wait.ENV_SHORT, Wait.ENV_DEAD):
        told = explained(Waiting(kind=kind, env="a"), workers, heard)
        assert told is not None
        assert (told.cause, told.detail) == (cause, detail)
        assert detail in str(told)
        assert ("workers are generating" in str(told)) == (cause is Cause.GENERATING)
        assert told.is_normal == (kind is not Wait.ENV_DEAD and cause not in (Cause.NO_WORKER, Cause.TROUBLE))


@pytest.mark.parametrize(
    ("workers", "heard", "gateway", "cause", "detail"),
    [
        ([], {}, {"open_rollouts": {"a": 3, "b": 2}}, Cause.AGENTS, "3 open rollouts"),
        ([], {"a": 12.0}, {"open_rollouts": {"a": 1}}, Cause.AGENTS, "1 open rollout"),
        ([], {"a": 40.0}, {"open_rollouts": {"b": 2}}, Cause.AGENTS, ""),
        ([], {"a": 12.0}, {}, Cause.WRITERS, "the last push came 12 s ago"),
        ([worker()], {}, {"open_rollouts": {"a": 3}}, Cause.GENERATING, ""),
        ([worker(has_stopped=True)], {}, {}, Cause.NO_WORKER, "w ended 1.0 s ago"),
        ([worker(has_stopped=True)], {}, {"open_rollouts": {"a": 3}}, Cause.AGENTS, "3 open rollouts"),
        ([], {}, {"open_rollouts": {"a": 3}, "seconds_ago": 40.0}, Cause.NO_WORKER, ""),
    ],
)
def test_an_env_that_agents_make_needs_no_worker_while_a_gateway_lives(
    workers: list[Process], heard: dict[str, float], gateway: dict[str, Any], cause: Cause, detail: str
) -> None:
    gateways = [Process(**{"kind": "gateway", "name": "gateway", "seconds_ago": 1.0} | gateway)]
    told = explained(Waiting(kind=Wait.FILLING, env="a"), workers, heard, gateways)
    assert told is not None
    assert (told.cause, told.detail) == (cause, detail)
    assert detail in str(told)
    assert told.is_normal == (cause is not Cause.NO_WORKER)


def test_where_no_env_has_sent_anything_all_workers_are_asked() -> None:
    told = explained(Waiting(kind=Wait.FILLING), [worker(env="b", waiting=LOADS)], {})
    assert told is not None
    assert told.cause is Cause.LOADING


def test_what_is_no_wait_for_groups_and_what_the_pool_knows_stays_as_it_is() -> None:
    for waiting in (None, Waiting(kind=Wait.TAKEOVER), Waiting(kind=Wait.FILLING, env="a", cause=Cause.SCORER)):
        assert explained(waiting, [worker()], {}) is waiting
