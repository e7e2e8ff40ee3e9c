"""What the screens and the metrics say of agents before a gateway: how many, how fast, and what is open."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable, Iterator
from html import unescape
from pathlib import Path
from typing import Any

import httpx
import pytest
from browsing import Person, browse
from chat_templates import tokenizer
from gateway_stage import TOOLS, Agent, Stage
from looks import allowances, lines_of
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Group

import rlbuffer
from rlbuffer.client.agent_calls import calls_in
from rlbuffer.client.run_state import read_run_state
from rlbuffer.client.texts import Texts
from rlbuffer.gateway import heartbeat
from rlbuffer.records.waiting import Cause
from rlbuffer.state.heartbeats import Process
from rlbuffer.state.prometheus import RunCollector
from rlbuffer.state.run_state import RunState
from rlbuffer.store.gateway import GatewayStore
from rlbuffer.store.operator import OperatorStore
from rlbuffer.testing import make_group
from rlbuffer_cli.dashboard import Dashboard
from rlbuffer_cli.view import run_head, run_view
from rlbuffer_cli.web.pages import sources_of
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
    made.first.gateway.heartbeat.start()
    yield made
    made.first.gateway.heartbeat.close()
    made.close()


@pytest.fixture
def tokenizer_folder(tmp_path: Path) -> Path:
    """The tokenizer of the engine's model."""
    folder = tmp_path / "model"
    folder.mkdir()
    tokenizer().save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def agent(stage: Stage) -> Agent:
    """One that has called a tool, and asked a helper."""
    made = stage.agent()
    made.ask('call look_up {"word": "tree"}', tools=TOOLS)
    made.result("a plant")
    made.ask(f"say {TEXT}", tools=TOOLS)
    helper = Agent(stage, made.opened)
    helper.messages.append({"role": "system", "content": "You are a helper."})
    helper.ask("say two")
    return made


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
    stage.wait_for(lambda: allowances(stage.buffer.store).get("later") == 0)  # until then it has those of any env
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
            page(stage, ""),
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


def test_what_a_gateway_waits_for_and_what_is_to_be_cured_there_is_on_every_screen(
    stage: Stage, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "TROUBLE_SECONDS", 0.5)
    agent = stage.agent()
    stage.engine.status = 500
    asking = threading.Thread(target=agent.ask, args=(f"say {TEXT}",))
    asking.start()
    try:
        state = state_of(stage, lambda gateway: gateway.waiting and gateway.problems)
        (gateway,) = state.of_kind("gateway")
        (problem,) = gateway.problems
        screens = [
            lines_of(run_view(state)),
            lines_of(Dashboard(title="top", run=state.run, state=state), 140),
            [page(stage, ""), page(stage, "processes"), page(stage, "problems")],
        ]
        for screen in screens:
            words = " ".join(" ".join(screen).split())
            assert problem.detail[:40] in words
            assert TEXT not in words
        assert str(gateway.waiting)[:40] in call("inspect", "processes")[1]
    finally:
        stage.engine.status = 200
        asking.join()


# -- open rollouts -------------------------------------------------------------------------------------------------
def page(stage: Stage, name: str, folder: Path | None = None, **query: str) -> str:
    """A page of `inspect --web` without its marks."""
    run = WholeRun(stage.buffer)
    run.texts = Texts(folder)
    pieces = "".join(route(run, sources_of(run), name, query) or ())
    tokens = re.sub(r"</?i[ >][^>]*>?|<style.*?</style>", "", pieces, flags=re.DOTALL)
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", tokens)).split())


def test_open_rollouts_are_a_table_of_every_screen(stage: Stage, agent: Agent, call: Call) -> None:
    opened = stage.begin(2)["open_rollouts"]
    httpx.post(opened[0]["end_url"], json={"failure": "lost"}, timeout=60)
    stage.buffer.store.role(GatewayStore).freeze(opened[1]["api_key"])
    names = [*(one["name"] for one in opened), agent.name]
    records = {record["name"]: record for record in map(json.loads, call("inspect", "open", "--json")[1].splitlines())}
    assert list(records) == names
    assert [(r["state"], r["calls"]) for r in records.values()] == [("ended", 0), ("open", 0), ("open", 3)]
    assert records[agent.name]["tokens"] == sum(len(sample.tokens) for sample in stage.engine.samples)
    printed = call("inspect", "open")[1]
    web = page(stage, "open")
    rows = [rf"{names[0]} +✕ failed: failed +0 ", rf"{names[1]} +◌ frozen +0 ", rf"{names[2]} +◌ open +3 "]
    for screen in (printed, web):
        assert [row for row in rows if not re.search(row, screen)] == []
    assert page(stage, "open", where=agent.name).count("◌ open") == 1

    async def tour(person: Person) -> None:
        await person.press("a")
        shown = await person.sees("3 open rollouts", *names)
        assert [row for row in rows if not re.search(row, shown)] == []

    browse(stage.buffer, tour, size=(120, 40))
    for shown in (printed, web, json.dumps(records)):
        assert TEXT not in shown
        assert agent.opened["api_key"].rpartition(".")[2] not in shown


def test_an_open_rollout_is_shown_by_its_calls_as_they_come(
    stage: Stage, agent: Agent, call: Call, tokenizer_folder: Path
) -> None:
    group_id = agent.name.rpartition("/")[0]
    code, printed, _ = call("inspect", f"{agent.name}.0", "--tokenizer", str(tokenizer_folder))
    assert code == 0
    for words in ("3 calls so far", "look_up", "a plant", TEXT, "counts as abandoned in"):
        assert words in printed
    assert f"assistant {TEXT}" in " ".join(call("inspect", f"{agent.name}.0")[1].split()), "no tokenizer is here"
    web = page(stage, "rollout", tokenizer_folder, id=group_id, rollout=f"{agent.name}.0")
    assert re.search(r"call 1 · assistant.*call 2 · assistant", web)
    assert TEXT in web
    record = json.loads(call("inspect", agent.name, "--json")[1])
    assert [[call["number"] for call in one["calls"]] for one in record["sequences"]] == [[1, 2], [3]]
    assert (record["open"]["state"], record["open"]["calls"]) == ("open", 3)

    async def tour(person: Person) -> None:
        await person.press("a")
        await person.sees("1 open rollout", agent.name)
        await person.press("enter")
        await person.sees("◌ open", "3 calls", "call 1 · assistant")
        await person.press("l")
        await asyncio.to_thread(agent.ask, "say three", tools=TOOLS)
        await person.sees("4 calls", "call 4 · assistant")
        await person.press("G")
        await asyncio.to_thread(agent.ask, "say four", tools=TOOLS)
        await person.sees("5 calls", "[live] rollout")

        def is_at_the_end(shown: str) -> bool:
            at, count = re.findall(r"TOKEN +([\d,]+) of ([\d,]+)", shown)[0]
            return int(at.replace(",", "")) == int(count.replace(",", "")) - 1

        await person.until(is_at_the_end, "the last token under the cursor")
        await asyncio.to_thread(agent.end, reward=0.25)
        await person.sees("reward 0.250", "pushed ")

    with rlbuffer.connect(stage.server, run=stage.run, config={"model": {"path": str(tokenizer_folder)}}) as buffer:
        browse(buffer, tour, size=(140, 60))


def test_a_pushed_rollout_says_which_call_made_what_of_it(
    stage: Stage, agent: Agent, call: Call, tokenizer_folder: Path
) -> None:
    agent.end(reward=0.5)
    (rollout,) = stage.rollouts()
    assert [[call.number for call in calls_in(one)] for one in rollout.sequences] == [[1, 2], [3]]
    sampled = [one.tokens[call.start : call.end].tolist() for one in rollout.sequences for call in calls_in(one)]
    assert sampled == [sample.tokens for sample in stage.engine.samples]
    printed = " ".join(call("inspect", agent.name)[1].split())
    assert re.search(r"reward 0.500 · .*3 calls.*├─ 0.0 .*calls 1 → 2 .*└─ 0.1 .*call 3", printed)
    group_id = agent.name.rpartition("/")[0]
    assert "call 2 · assistant" in page(stage, "rollout", tokenizer_folder, id=group_id, rollout=agent.name)


def test_an_open_group_is_found_by_its_id_also_where_another_begins_so(stage: Stage, call: Call) -> None:
    stage.begin()
    stage.begin()
    stage.buffer.writer("w").push(make_group(env="agents", seed=10, rewards=[1.0]))
    code, printed, _ = call("inspect", "agents.1")
    assert (code, "group agents.1 " in printed, "open" in printed) == (0, True, True)
    assert "agents.10" not in printed
    assert "reward 1.000" in call("inspect", "agents.10")[1]
    assert "group agents.1 " in call("inspect", "agents.1/0")[1]


def test_calls_that_cannot_be_read_take_no_screen_away(stage: Stage, agent: Agent, call: Call) -> None:
    store = stage.buffer.store
    store.connection.client.hset(store.keys.open_rollout(agent.name), "c:2", b"\xc1")
    code, printed, _ = call("inspect", agent.name)
    assert (code, "its calls cannot be shown" in printed) == (0, True)
    assert re.search(rf"{agent.name} +◌ open +3 ", call("inspect", "open")[1])
