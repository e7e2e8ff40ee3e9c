"""What a gateway that is stuck says: it is waited for something by name, or somebody is told what to cure."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from gateway_stage import Stage

from rlbuffer.client.run_state import read_run_state
from rlbuffer.errors import ServerFull
from rlbuffer.gateway import heartbeat
from rlbuffer.gateway.engines import fleet
from rlbuffer.records.waiting import Problem, Trouble, Wait, Waiting
from rlbuffer.state.heartbeats import run_problems
from rlbuffer.store.gateway import GatewayStore
from rlbuffer.store.operator import OperatorStore


@pytest.fixture
def stage(redis_url: str, run_name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setattr(heartbeat, "TROUBLE_SECONDS", 0.5)
    monkeypatch.setattr(fleet, "WATCH_SECONDS", 0.5)
    made = Stage(redis_url, run_name)
    made.first.gateway.heartbeat.start()
    yield made
    made.first.gateway.heartbeat.close()
    made.close()


def said(stage: Stage) -> tuple[Waiting | None, list[Problem]]:
    """What the gateway waits for, and what the run says somebody must cure at it."""
    state = read_run_state(stage.buffer.store, history=10)
    (gateway,) = state.of_kind("gateway")
    problems = run_problems(state.processes, None)
    return gateway.waiting, [problem for problem in problems if problem.kind is Trouble.GATEWAY_STUCK]


def until(stage: Stage, holds: Callable[[Waiting | None, list[Problem]], Any]) -> tuple[Waiting | None, list[Problem]]:
    def looked() -> Any:
        found = said(stage)
        return found if holds(*found) else None

    stage.wait_for(lambda: stage.buffer.store.heartbeats("gateway"))
    found: tuple[Waiting | None, list[Problem]] = stage.wait_for(looked)
    return found


def fine(waiting: Waiting | None, problems: list[Problem]) -> bool:
    return waiting is None and not problems


@pytest.mark.parametrize("trouble", [{"is_gone": True}, {"status": 500}, {"status": 503}, {"version": "default"}])
def test_an_engine_that_cannot_be_used_is_said_while_calls_wait_for_it(stage: Stage, trouble: dict[str, Any]) -> None:
    until(stage, fine)
    agent = stage.agent()
    before = {name: getattr(stage.engine, name) for name in trouble}
    for name, value in trouble.items():
        setattr(stage.engine, name, value)
    asking = threading.Thread(target=agent.post, args=("say words-of-an-agent",))
    asking.start()
    waiting, (problem,) = until(stage, lambda waiting, problems: waiting and problems)
    assert waiting is not None
    assert waiting.kind is Wait.ENGINE
    assert "1 of 1 engine" in str(problem)
    assert stage.engine.url in str(problem)
    assert "words-of-an-agent" not in f"{waiting} {problem}"
    for name, value in before.items():
        setattr(stage.engine, name, value)
    asking.join()
    until(stage, fine)


def test_an_engine_that_comes_back_is_known_before_somebody_calls(stage: Stage) -> None:
    until(stage, fine)
    agent = stage.agent()
    stage.first.fleet._patience = 1.0
    stage.engine.is_gone = True
    assert agent.post("say x").status_code == 503
    until(stage, lambda waiting, problems: problems)
    stage.engine.is_gone = False
    until(stage, fine)


@pytest.mark.parametrize("wait", [0, 60])
def test_a_ticket_that_is_waited_for_is_said(stage: Stage, wait: float) -> None:
    stage.buffer.store.role(OperatorStore).pause("later")
    done = threading.Event()

    def open_one() -> None:
        while not done.is_set():
            body = {"env": "later", "wait": wait}
            httpx.post(f"{stage.first.url}/v1/open_rollouts", json=body, timeout=120)
            done.wait(0.5)

    opening = threading.Thread(target=open_one)
    opening.start()
    waiting, problems = until(stage, lambda waiting, problems: waiting)
    assert (waiting and waiting.kind, waiting and waiting.env, problems) == (Wait.TICKET, "later", [])
    done.set()
    stage.buffer.store.role(OperatorStore).resume("later")
    opening.join()
    until(stage, fine)


def test_a_group_that_cannot_be_pushed_is_said_with_the_reason(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise ServerFull("the memory of the server is full")

    store = stage.first.buffer.store.role(GatewayStore)
    monkeypatch.setattr(store, "push_rollouts", full)
    agent = stage.agent()
    agent.ask("say one")
    agent.end()
    _, (problem,) = until(stage, lambda waiting, problems: problems)
    assert "1 group cannot be pushed" in str(problem)
    assert "the memory of the server is full" in str(problem)
    monkeypatch.undo()
    stage.rollouts()
    until(stage, fine)


def test_a_server_without_room_is_said(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    store = stage.first.buffer.store.role(GatewayStore)
    monkeypatch.setattr(store, "may_sample", lambda: False)
    waiting, _ = until(stage, lambda waiting, problems: waiting)
    assert waiting is not None
    assert waiting.kind is Wait.SERVER
    assert "memory" in str(waiting)
    monkeypatch.undo()
    until(stage, fine)
