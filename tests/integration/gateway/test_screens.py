"""What the screens and the metrics say of agents before a gateway: how many, how fast, and what is open."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from gateway_stage import Stage
from looks import lines_of
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Group

from rlbuffer.client.run_state import read_run_state
from rlbuffer.client.texts import Texts
from rlbuffer.records.waiting import Cause
from rlbuffer.state.heartbeats import Process
from rlbuffer.state.prometheus import RunCollector
from rlbuffer.state.run_state import RunState
from rlbuffer.store.operator import OperatorStore
from rlbuffer_cli.dashboard import Dashboard
from rlbuffer_cli.view import run_head, run_view
from rlbuffer_cli.web.pages import Sources
from rlbuffer_cli.web.routes import route
from rlbuffer_cli.whole_run import WholeRun

Call = Callable[..., tuple[int, str, str]]
TEXT = "the words of an agent"
COUNTED = {
    "agent_rollouts_total": 2.0,
    "open_rollouts": 1.0,
    "ended_rollouts": 0.0,
    "agent_calls_total": 1.0,
    "gateway_calls_total": 1.0,
    "gateway_calls_open": 1.0,
    "gateway_ticket_waits": 1.0,
    "gateway_rollouts_total": 1.0,
}


@pytest.fixture
def stage(redis_url: str, run_name: str) -> Iterator[Stage]:
    made = Stage(redis_url, run_name)
    made.first.gateway.pulse.start()
    yield made
    made.first.gateway.pulse.close()
    made.close()


@pytest.fixture
def call(stage: Stage, typed: Call) -> Call:
    """Types a command about the run. -> exit code, stdout, stderr."""
    return lambda *words: typed(*words, "--redis", stage.server, "--run", stage.run)


def state_of(stage: Stage, holds: Callable[[Process], Any]) -> RunState:
    """The run, once this holds of the gateway's heartbeat."""

    def looked() -> RunState | None:
        state = read_run_state(stage.buffer.store, history=10)
        return state if any(map(holds, state.of_kind("gateway"))) else None

    found: RunState = stage.wait_for(looked)
    return found


def samples_of(state: RunState) -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(RunCollector(lambda: state, state.run))
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {sample.name: sample.value for family in families for sample in family.samples}


def test_what_agents_and_a_gateway_do_is_said_by_metrics_and_screens(stage: Stage, call: Call) -> None:
    one, other = (stage.agent() for _ in range(2))
    one.ask(f"say {TEXT}")
    one.end()
    stage.rollouts()
    stage.engine.holds = True
    operator = stage.buffer.store.role(OperatorStore)
    operator.pause("later")
    waits = [
        threading.Thread(target=other.ask, args=("say two",)),
        threading.Thread(target=stage.begin, kwargs={"env": "later", "wait": 60}),
    ]
    for wait in waits:
        wait.start()
    try:
        state = state_of(stage, lambda gateway: gateway.calls and gateway.open_calls and gateway.ticket_waits)
        said = samples_of(state)
        assert {name: said[f"rlbuffer_{name}"] for name in COUNTED} == COUNTED
        assert said["rlbuffer_gateway_own_seconds_total"] > 0
        assert said["rlbuffer_gateway_engine_seconds_total"] > 0
        gateway = next(process for process in state.of_kind("gateway"))
        assert TEXT not in str(gateway)
        screens = [
            lines_of(run_view(state)),
            lines_of(Group(*run_head(state, 140))),
            lines_of(Dashboard(title="top", run=state.run, state=state), 140),
            re.sub(r"<[^>]*>", " ", "".join(route(WholeRun(stage.buffer), Sources(texts=Texts()), "", {}) or ())),
        ]
        for screen in screens:
            words = " ".join(" ".join(screen if isinstance(screen, list) else [screen]).split())
            assert re.search(r"open rollouts 1 calls [\d.]+/s calls open 1 waiting for a ticket 1", words)
    finally:
        stage.engine.holds = False
        operator.resume("later")
        for wait in waits:
            wait.join()
    assert call("alive", "gateway")[:2][0] == 0
    code, _, err = call("alive", "gateway-7")
    assert (code, "Seen were: " in err, "gateway" in err) == (1, True, True)


def test_a_run_that_only_agents_feed_misses_no_worker(stage: Stage) -> None:
    stage.agent()

    def waits() -> RunState | None:
        state = read_run_state(stage.buffer.store)
        return state if state.waiting is not None and state.waiting.cause == Cause.AGENTS else None

    state = stage.wait_for(waits)
    assert state.waiting.is_normal
    assert not state.problems
