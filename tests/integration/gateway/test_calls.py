"""Agents before a gateway on a real server: each answer that one hears is trained once, with what the engine saw."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from chat_templates import Family
from fake_engine import EXPERTS, QWEN3, SGLANG, FakeEngine, experts_of
from gateway_stage import TOOLS, Stage, engine_samples, sampled, trained_samples
from own_server import OwnServer

from rlbuffer.errors import ConfigError
from rlbuffer.gateway import service, sweeping
from rlbuffer.store.gateway import GatewayStore


def events(text: str) -> list[Any]:
    """The data of a stream's events."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def test_a_conversation_with_tools_is_one_sequence_of_what_the_engine_saw_and_sampled(stage: Stage) -> None:
    agent = stage.agent()
    agent.messages.append({"role": "system", "content": "Solve it."})
    agent.ask('call look_up {"word": "tree"}', tools=TOOLS)
    agent.result("a plant")
    agent.ask("say a tree is a plant", tools=TOOLS)
    agent.ask("say so it is", tools=TOOLS)
    assert agent.end(reward=0.5).json() == {"state": "ended", "is_first": True}
    (rollout,) = stage.rollouts()
    assert (rollout.rollout_id, rollout.reward, len(rollout.sequences)) == (agent.name, 0.5, 1)
    assert trained_samples(rollout) == engine_samples(stage.engine)
    assert [turn.role for turn in rollout.turns] == ["user", "assistant", "user", "assistant", "user", "assistant"]
    assert stage.buffer.verify().ok


def test_helpers_and_branches_are_sequences_and_what_they_share_is_trained_once(stage: Stage) -> None:
    agent = stage.agent()
    agent.ask("say one")
    helper = type(agent)(stage, agent.opened)
    helper.messages.append({"role": "system", "content": "You are a helper"})
    helper.ask("say two")
    branch = type(agent)(stage, agent.opened)
    branch.messages = list(agent.messages)
    branch.ask("say three")
    agent.ask("say four")
    agent.end()
    (rollout,) = stage.rollouts()
    assert len(rollout.sequences) == 3
    assert Counter(trained_samples(rollout)) == Counter(engine_samples(stage.engine))


def test_versions_are_those_of_each_token(stage: Stage) -> None:
    agent = stage.agent()
    stage.buffer.policy.announce(1, location="", size=0, checksum="")
    stage.engine.delay = 0.3
    threading.Timer(0.1, setattr, (stage.engine, "version", "1")).start()
    agent.ask("say hello")
    agent.end()
    (rollout,) = stage.rollouts()
    (sample,) = stage.engine.samples
    start = len(sample.prompt)
    assert [tuple(span) for span in rollout.version_spans] == [(v, start + a, start + b) for v, a, b in sample.spans]


def test_a_stream_says_what_the_answer_says_and_pings_while_it_waits(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "PING_SECONDS", 0.1)
    agent = stage.agent()
    stage.engine.delay = 0.5
    response = agent.post(
        'call look_up {"word": "a"}', stream=True, tools=TOOLS, stream_options={"include_usage": True}
    )
    assert ": waiting" in response.text
    first, last, usage = events(response.text)
    (call,) = first["choices"][0]["delta"]["tool_calls"]
    assert (call["index"], call["function"]) == (0, {"name": "look_up", "arguments": '{"word": "a"}'})
    assert last["choices"][0]["finish_reason"] == "tool_calls"
    assert usage["usage"]["completion_tokens"] == len(stage.engine.samples[0].tokens)


@pytest.mark.parametrize("path", ["chat/completions", "messages", "responses"])
def test_an_event_is_one_line_however_a_client_splits_them(stage: Stage, path: str) -> None:
    said = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\x1dh\x1ei é \U0001f333"
    url = f"{stage.agent().opened['base_url']}/{path}"
    for asked in (f"say {said}", f"call look_up {json.dumps({'word': said})}"):
        body = {"messages": [{"role": "user", "content": asked}], "input": asked, "stream": True}
        with httpx.stream("POST", url, json=body, timeout=60) as response:
            lines = list(response.iter_lines())
        found = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        assert all(not line or line.startswith(("data: ", "event: ")) for line in lines)
        assert asked[:4] == "call" or json.dumps(said)[1:-1] in json.dumps(found)


def test_a_refusal_behind_pings_is_an_event(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "PING_SECONDS", 0.1)
    agent = stage.agent()
    stage.engine.delay = 0.5
    stage.engine.spoil = lambda answer: {"choices": []}
    (event,) = events(agent.post("say x", stream=True).text)
    assert event["error"]["code"] == "engine_refused"


@pytest.mark.parametrize("speaks", ["0.32.0", SGLANG])
def test_an_engine_of_another_kind_gives_the_same_rollouts(redis_url: str, run_name: str, speaks: str) -> None:
    stage = Stage(redis_url, run_name, engine=FakeEngine(speaks=speaks))
    try:
        agent = stage.agent()
        agent.ask('call look_up {"word": "tree"}', tools=TOOLS)
        agent.result("a plant")
        agent.ask("say a tree is a plant", tools=TOOLS)
        agent.end()
        (rollout,) = stage.rollouts()
        assert len(rollout.sequences) == 1
        assert trained_samples(rollout) == engine_samples(stage.engine)
    finally:
        stage.close()


@pytest.mark.parametrize("speaks", ["0.32.0", "0.33.0", SGLANG])
def test_a_rollout_has_the_experts_of_every_token_that_an_engine_took_in(
    redis_url: str, run_name: str, speaks: str
) -> None:
    """By answers that are made up, in the form in which these engines write them."""
    engine = FakeEngine(speaks=speaks, records_experts=True)
    stage = Stage(redis_url, run_name, engine=engine, model=EXPERTS, record_experts=True)
    try:
        agent = stage.agent()
        agent.ask('call look_up {"word": "tree"}', tools=TOOLS)
        agent.result("a plant")
        agent.ask("say a tree is a plant", tools=TOOLS)
        branch = type(agent)(stage, agent.opened)
        branch.messages = list(agent.messages[:3])
        branch.ask("say so it is", tools=TOOLS)
        agent.end()
        (rollout,) = stage.rollouts()
        assert len(rollout.sequences) == 2
        for sequence in rollout.sequences:
            rows = sequence.columns["routed_experts"]
            assert rows.dtype == np.uint8
            assert np.array_equal(rows[:-1], experts_of(sequence.tokens)[:-1])
            assert not rows[-1].any()
    finally:
        stage.close()


@pytest.mark.parametrize("speaks", ["0.33.0", SGLANG])
def test_engines_that_say_no_experts_are_told_how_they_start(redis_url: str, run_name: str, speaks: str) -> None:
    with pytest.raises(ConfigError, match="--enable-return-routed-experts"):
        Stage(redis_url, run_name, engine=FakeEngine(speaks=speaks), model=EXPERTS, record_experts=True)


def test_experts_of_a_model_that_has_none_are_not_recorded(redis_url: str, run_name: str) -> None:
    with pytest.raises(ConfigError, match="of a model of kind qwen3") as refused:
        Stage(redis_url, run_name, model={"model_type": "qwen3", "num_hidden_layers": 2}, record_experts=True)
    assert refused.value.setting == "gateway.record_experts"


@pytest.mark.parametrize("speaks", ["0.33.0", SGLANG])
def test_the_tokens_that_sampling_left_are_in_the_rollout_and_one_of_too_many_is_not_trained(
    redis_url: str, run_name: str, speaks: str
) -> None:
    engine = FakeEngine(speaks=speaks, tells=True, heeds=("temperature", "top_k"))
    stage = Stage(redis_url, run_name, engine=engine, top_k=3, top_p=0.9)
    try:
        agent = stage.agent()
        agent.ask("say a tree is a plant", tools=TOOLS)
        agent.ask("say no more", tools=TOOLS)
        agent.end()
        (rollout,) = stage.rollouts()
    finally:
        stage.close()
    support, place = rollout.columns["support"], 0
    assert len(engine.samples) == 2
    for sample in engine.samples:
        start = len(sample.prompt)
        for i, row in enumerate(FakeEngine.left(sample.tokens, 3), start):
            is_kept = len(row) == 3
            assert support[i].tolist() == (row if is_kept else [-2, -1, -1])
            assert rollout.loss_mask[i] == is_kept
        assert (support[place:start] == -1).all()
        place = start + len(sample.tokens)
    assert (support[:, 0] == -2).any()


# -- edges -----------------------------------------------------------------------------------------------------------
def test_an_answer_that_a_limit_cut_begins_a_new_sequence(stage: Stage) -> None:
    agent = stage.agent()
    assert agent.ask("say the answer is a tree", max_tokens=6)
    agent.ask("say go on")
    agent.end()
    (rollout,) = stage.rollouts()
    assert len(rollout.sequences) == 2
    assert Counter(trained_samples(rollout)) == Counter(engine_samples(stage.engine))


def test_an_answer_that_a_stop_text_ended_begins_a_new_sequence_and_is_cut(stage: Stage) -> None:
    agent = stage.agent()
    assert agent.ask("say the answer is a tree", stop=["is a"])["content"] == "the answer "
    agent.ask("say go on")
    agent.end()
    (rollout,) = stage.rollouts()
    assert len(rollout.sequences) == 2


def test_an_empty_answer_is_an_answer(stage: Stage) -> None:
    agent = stage.agent()
    assert agent.ask("empty")["content"] == ""
    agent.ask("say go on")
    agent.end()
    (rollout,) = stage.rollouts()
    assert len(rollout.sequences) == 1


def test_a_conversation_that_fills_the_context_is_refused_in_words_that_agents_know(stage: Stage) -> None:
    agent = stage.agent()
    stage.engine.context = 200
    other = agent.at(stage.serve())
    refused = other.post("a tree " * 300)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert refused.headers["x-should-retry"] == "false"
    answer = other.post("say " + "answer " * 500, max_tokens=100_000, tools=[])
    assert answer.status_code in (200, 400)
    short = other.post("say " + "a tree is " * 30).json()
    assert short["usage"]["total_tokens"] <= 200


def test_the_run_decides_how_tokens_are_drawn(redis_url: str, run_name: str) -> None:
    stage = Stage(redis_url, run_name, temperature=0.5, max_new_tokens=40)
    try:
        agent = stage.agent()
        agent.ask("say hello", temperature=0.0, top_p=0.1, seed=4, max_tokens=5000)
        (sample,) = stage.engine.samples
        assert (sample.parameters["temperature"], sample.parameters["top_p"]) == (0.5, 1.0)
        assert sample.parameters["max_tokens"] == 40
        assert "seed" not in sample.parameters
        agent.end()
        (rollout,) = stage.rollouts()
        assert rollout.columns["temperatures"][rollout.loss_mask].tolist() == [0.5] * rollout.loss_tokens
    finally:
        stage.close()


@pytest.mark.parametrize(("other_models", "status"), [("serve", 200), ("refuse", 404)])
def test_a_model_that_nobody_serves(redis_url: str, run_name: str, other_models: str, status: int) -> None:
    stage = Stage(redis_url, run_name, other_models=other_models)
    try:
        agent = stage.agent()
        assert agent.post("say hello", model="gpt-5").status_code == status
        assert agent.post("say hello", model="tiny").status_code == 200
        base = agent.opened["base_url"]
        assert httpx.get(f"{base}/models").json()["data"][0]["id"] == "tiny"
        for model, expected in (("tiny", 200), ("policy", 200), ("gpt-5", status), ("owner/gpt-5", status)):
            response = httpx.get(f"{base}/models/{model}")
            assert response.status_code == expected
            assert expected != 200 or response.json()["id"] == model
    finally:
        stage.close()


@pytest.mark.parametrize(("forced_choices", "status"), [("auto", 200), ("refuse", 400)])
def test_what_an_agent_forces_is_drawn_as_everything_else_or_refused(
    redis_url: str, run_name: str, forced_choices: str, status: int
) -> None:
    stage = Stage(redis_url, run_name, forced_choices=forced_choices)
    try:
        agent = stage.agent()
        assert agent.post("say hello", tools=TOOLS, tool_choice="required").status_code == status
        assert agent.post("say hi", response_format={"type": "json_object"}).status_code == status
        assert all("tool_choice" not in body and "response_format" not in body for body in stage.engine.asked)
    finally:
        stage.close()


def test_base_urls_have_the_address_by_which_the_gateway_was_reached(redis_url: str, run_name: str) -> None:
    stage = Stage(redis_url, run_name, listen="0.0.0.0:0", token="secret")
    try:
        right = {"Authorization": "Bearer secret"}
        names = ("base_url", "anthropic_base_url", "touch_url", "end_url")
        for host, expected in (
            ("gateway.example:9000", "http://gateway.example:9000"),
            ("gateway", "http://gateway"),
            ("[fd00::1]:8400", "http://[fd00::1]:8400"),
            ("a/b", stage.first.url),
            ("x@y:1", stage.first.url),
        ):
            (opened,) = stage.begin(headers={**right, "Host": host})["open_rollouts"]
            assert {opened[name].partition("/r/")[0] for name in names} == {expected}
    finally:
        stage.close()


def test_a_template_that_cannot_be_gone_on_from_is_said_and_each_turn_is_a_sequence(
    redis_url: str, run_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    def moved(messages: Any, tools: Any, opens: bool) -> str:
        whole = QWEN3.text(messages, tools, opens)
        return f"{sum(message['role'] == 'user' for message in messages)} questions\n{whole}"

    family = Family("moved", moved, QWEN3.written, QWEN3.end)
    with caplog.at_level(logging.WARNING):
        stage = Stage(redis_url, run_name, engine=FakeEngine(family=family))
    try:
        assert "cannot be continued" in caplog.text
        agent = stage.agent()
        agent.ask("say one")
        agent.ask("say two")
        agent.end()
        (rollout,) = stage.rollouts()
        assert len(rollout.sequences) == 2
        assert Counter(trained_samples(rollout)) == Counter(engine_samples(stage.engine))
    finally:
        stage.close()


# -- trouble ---------------------------------------------------------------------------------------------------------
def test_a_full_server_refuses_sampling_and_keeps_what_was_sampled(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = stage.first.buffer.store.role(GatewayStore)
    agent = stage.agent()
    agent.ask("say one")
    monkeypatch.setattr(store, "may_sample", lambda: False)
    refused = agent.post("say two")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_full")
    assert int(refused.headers["Retry-After"]) > 0
    monkeypatch.undo()
    agent.ask("say two")
    agent.end()
    (rollout,) = stage.rollouts()
    assert trained_samples(rollout) == engine_samples(stage.engine)


@pytest.mark.server
def test_a_server_that_groups_have_filled_gets_room_from_the_largest_one_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeping, "FULL_SECONDS", 1.0)
    with OwnServer(tmp_path / "own") as server:
        stage = Stage(server.url, "r")
        try:
            store = stage.first.buffer.store.role(GatewayStore)
            large, small = stage.agent(), stage.agent()
            limit = store.server()["used_memory"] + 4_000_000
            for agent, size in ((large, 6_000_000), (small, 2_000_000)):
                key = agent.opened["api_key"]
                one = replace(sampled(5), details={"text": "x" * size})
                store.record(key, one, request="r", seen=0, history="h", line=store.look_up(key).line)
            server.ask("CONFIG", "SET", "maxmemory", limit)
            assert large.end().status_code == small.end().status_code == 200
            found = {rollout.rollout_id: rollout for rollout in stage.rollouts(2)}
            assert found[large.name].failure.kind == "server_full"
            assert (found[small.name].failure, found[small.name].loss_tokens) == (None, 5)
            server.ask("CONFIG", "SET", "maxmemory", 0)
            assert stage.buffer.verify().ok
        finally:
            server.ask("CONFIG", "SET", "maxmemory", 0)
            stage.close()


def test_many_calls_at_once_wait_for_no_other_and_hold_up_no_heartbeat(stage: Stage) -> None:
    agents = [stage.agent() for _ in range(3)]
    stage.engine.holds = True
    threads = [
        threading.Thread(target=agents[n % 3].post, args=(f"say {n}",), kwargs={"timeout": 120}) for n in range(60)
    ]
    for thread in threads:
        thread.start()
    stage.wait_for(lambda: stage.first.gateway.answering.open_calls == 60)
    stage.engine.holds = False
    quick = stage.agent()
    begun = time.monotonic()
    quick.ask("say quick")
    assert time.monotonic() - begun < 30
    for thread in threads:
        thread.join()
    for agent in [*agents, quick]:
        agent.end()
    rollouts = stage.rollouts(4)
    assert sum(len(trained_samples(rollout)) for rollout in rollouts) == 61
    assert np.all([rollout.failure is None for rollout in rollouts])
