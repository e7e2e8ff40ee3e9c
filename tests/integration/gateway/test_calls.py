"""Agents before a gateway on a real server: each answer that one hears is trained once, with what the engine saw."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from chat_templates import Family, decoded
from fake_engine import EXPERTS, QWEN3, SGLANG, FakeEngine, experts_of
from gateway_stage import TOOLS, Stage, engine_samples, trained_samples
from own_server import OwnServer

from rlbuffer.errors import ConfigError, ServerUnreachable
from rlbuffer.gateway import answering, run_server, service, sweeping
from rlbuffer.gateway.opening import Opening
from rlbuffer.process import web_servers
from rlbuffer.records.group import Ticket
from rlbuffer.records.spans import VersionSpan
from rlbuffer.store.gateway import GatewayStore
from rlbuffer.store.open_rollouts import End, OpenCall, open_rollouts


@pytest.fixture
def stage(redis_url: str, run_name: str) -> Iterator[Stage]:
    made = Stage(redis_url, run_name)
    yield made
    made.close()


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


# -- the same request again ------------------------------------------------------------------------------------------
def test_an_agent_that_hangs_up_is_answered_with_what_was_sampled_for_it(stage: Stage) -> None:
    agent = stage.agent()
    stage.engine.holds = True
    with pytest.raises(httpx.ReadTimeout):
        agent.post("say hello", timeout=0.5)
    stage.wait_for(lambda: stage.first.gateway.answering.open_calls)
    stage.engine.holds = False
    first = agent.post("say hello", retry=1).json()
    assert len(stage.engine.samples) == 1
    assert agent.post("say hello", retry=2).json() == first
    agent.end()
    (rollout,) = stage.rollouts()
    assert trained_samples(rollout) == engine_samples(stage.engine)


def test_what_was_recorded_and_never_heard_is_told_by_another_gateway(stage: Stage) -> None:
    agent = stage.agent()
    stage.engine.holds = True
    with pytest.raises(httpx.ReadTimeout):
        agent.post("say hello", timeout=0.5)
    stage.engine.holds = False
    stage.wait_for(lambda: stage.engine.samples and not stage.first.gateway.answering.open_calls)
    other = stage.serve()
    stage.drop(stage.first, kills=True)
    stage.first = other
    answer = agent.at(other).post("say hello", retry=None).json()
    assert answer["choices"][0]["message"]["content"] == "hello"
    assert len(stage.engine.samples) == 1


def test_a_gateway_that_is_killed_loses_no_answer_that_was_heard(stage: Stage) -> None:
    agent = stage.agent()
    agent.ask("say one")
    stage.engine.holds = True
    with pytest.raises(httpx.ReadTimeout):
        agent.post("say two", timeout=0.5)
    other = stage.serve()
    stage.drop(stage.first, kills=True)
    stage.first = other
    stage.engine.holds = False
    agent = agent.at(other)
    agent.ask("say two", retry=1)
    agent.end()
    (rollout,) = stage.rollouts()
    assert len(rollout.sequences) == 1
    assert set(trained_samples(rollout)) <= set(engine_samples(stage.engine))
    assert len(trained_samples(rollout)) == 2


def test_a_retry_waits_for_the_first_one_and_is_not_sampled_twice(stage: Stage) -> None:
    agent = stage.agent()
    stage.engine.holds = True
    answers: list[Any] = []
    threads = [
        threading.Thread(target=lambda retry=retry: answers.append(agent.post("say hello", retry=retry).json()))
        for retry in (0, 1, 2)
    ]
    threads[0].start()
    stage.wait_for(lambda: stage.first.gateway.answering.open_calls)
    for thread in threads[1:]:
        thread.start()
    time.sleep(0.3)
    stage.engine.holds = False
    for thread in threads:
        thread.join()
    assert len({answer["id"] for answer in answers}) == 1
    assert len(stage.engine.samples) == 1


@pytest.mark.parametrize("before", ["nothing", "an answer that was heard", "an answer that nobody heard", "refusals"])
@pytest.mark.parametrize("is_other_gateway", [False, True])
def test_retries_of_several_agents_that_ask_the_same_are_calls_of_their_own(
    stage: Stage, before: str, is_other_gateway: bool
) -> None:
    agent, count = stage.agent(), 6
    known = set[str]()

    def ask(retry: int) -> list[Any]:
        found: list[Any] = []
        asked = agent.at(stage.first)
        threads = [
            threading.Thread(target=lambda: found.append(asked.post("tell me", retry=retry))) for _ in range(count)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    if before == "an answer that was heard":
        known.add(agent.post("tell me").json()["id"])
    elif before == "an answer that nobody heard":
        stage.engine.holds = True
        with pytest.raises(httpx.ReadTimeout):
            agent.post("tell me", timeout=0.5)
        stage.engine.holds = False
        stage.wait_for(lambda: stage.engine.samples and not stage.first.gateway.answering.open_calls)
    elif before == "refusals":
        store = stage.first.buffer.store.role(GatewayStore)
        store.client.config_set("maxmemory", "1")
        store.client.config_set("maxmemory-policy", "noeviction")
    if is_other_gateway:
        other = stage.serve()
        stage.drop(stage.first, kills=True)
        stage.first = other
    if before == "refusals":
        refused = ask(0)
        stage.first.buffer.store.role(GatewayStore).client.config_set("maxmemory", "0")
        assert {one.status_code for one in refused} == {503}
        time.sleep(1.5)
    answers = ask(1)
    assert [one.status_code for one in answers] == [200] * count
    assert len({one.json()["id"] for one in answers}) == count
    agent.at(stage.first).end()
    (rollout,) = stage.rollouts()
    assert Counter(trained_samples(rollout)) == Counter(engine_samples(stage.engine))


def test_a_retry_of_a_large_request_that_was_refused_unread_joins_no_call_of_another_agent(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, answering, answers = stage.agent(), stage.first.gateway.answering, list[Any]()
    store = stage.first.buffer.store.role(GatewayStore)
    monkeypatch.setattr(service, "READ_OF_ANYBODY", 0)

    def away(*args: Any, **more: Any) -> Any:
        raise ServerUnreachable("the server is away")

    with monkeypatch.context() as patched:
        patched.setattr(store, "look_up", away)
        refused = agent.post("tell me")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_away")
    stage.engine.holds = True

    def ask(retry: int) -> threading.Thread:
        thread = threading.Thread(target=lambda: answers.append(agent.post("tell me", retry=retry)))
        thread.start()
        return thread

    other = ask(0)  # of another agent, which asks the same
    stage.wait_for(lambda: answering.open_calls == 1)
    again = ask(1)
    stage.wait_for(lambda: answering.open_calls == 2)
    stage.engine.holds = False
    for thread in (other, again):
        thread.join()
    assert [answer.status_code for answer in answers] == [200, 200], answers[0].text[:300]
    assert len({answer.json()["id"] for answer in answers}) == 2


def test_who_asks_the_same_while_a_call_is_recorded_has_a_call_of_its_own(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has the call, and its gateway has not heard so yet."""
    store = stage.first.buffer.store.role(GatewayStore)
    agent, real, is_there, goes_on = stage.agent(), store.record, threading.Event(), threading.Event()

    def held(*args: Any, **more: Any) -> Any:
        monkeypatch.undo()
        recorded = real(*args, **more)
        is_there.set()
        goes_on.wait(60)
        return recorded

    monkeypatch.setattr(store, "record", held)
    answers: list[Any] = []
    first = threading.Thread(target=lambda: answers.append(agent.post("tell me")))
    first.start()
    assert is_there.wait(60)
    answers.append(agent.post("tell me"))
    goes_on.set()
    first.join()
    assert len({answer.json()["id"] for answer in answers}) == len(stage.engine.samples) == 2


def test_a_retry_is_not_told_what_was_heard_long_ago(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = stage.agent()
    first = agent.post("tell me").json()["id"]
    assert agent.post("tell me", retry=1).json()["id"] == first
    monkeypatch.setattr(answering, "RETOLD_SECONDS", 0.0)
    assert agent.post("tell me", retry=2).json()["id"] != first


@pytest.mark.parametrize("gateways", [1, 2])
def test_two_agents_that_ask_the_same_at_once_are_two_calls(stage: Stage, gateways: int) -> None:
    agent = stage.agent()
    others = [agent] + [agent.at(stage.serve()) for _ in range(gateways - 1)]
    stage.engine.holds = True
    answers: list[Any] = []
    threads = [
        threading.Thread(target=lambda one=one: answers.append(one.post("tell me").json()))
        for one in (others[0], others[-1])
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    stage.engine.holds = False
    for thread in threads:
        thread.join()
    assert len({answer["id"] for answer in answers}) == 2
    # Another gateway learns that they were heard from the server, a moment after the agent has its answer.
    stage.wait_for(lambda: agent.post("tell me").json()["id"] not in {answer["id"] for answer in answers})
    agent.end()
    (rollout,) = stage.rollouts()
    assert Counter(trained_samples(rollout)) == Counter(engine_samples(stage.engine))


def test_a_sample_whose_reply_is_lost_while_another_agent_asks_the_same_is_trained_once(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_server, "RETRY_SECONDS", 0.5)
    store, agent = stage.first.buffer.store.role(GatewayStore), stage.agent()
    first, record = list[str](), store.record

    def lossy(capability: str, call: Any, **more: Any) -> Any:
        recorded = record(capability, call, **more)
        first.append(call.id)
        if len(first) == 1:
            raise ServerUnreachable("the reply is lost")
        return recorded

    monkeypatch.setattr(store, "record", lossy)
    stage.engine.holds = True
    threads = [threading.Thread(target=agent.post, args=("tell me",)) for _ in range(2)]
    for thread in threads:
        thread.start()
    stage.wait_for(lambda: stage.first.gateway.answering.open_calls == 2)
    stage.engine.holds = False
    for thread in threads:
        thread.join()
    agent.end()
    (rollout,) = stage.rollouts()
    assert Counter(trained_samples(rollout)) == Counter(engine_samples(stage.engine))


@pytest.mark.parametrize("number_is_given_again", [False, True])
@pytest.mark.parametrize("moment", ["look_up", "read_calls", "record", "heard"])
def test_a_server_that_loses_the_last_call_in_the_middle_of_the_next_costs_context_alone(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, moment: str, number_is_given_again: bool
) -> None:
    store, agent = stage.first.buffer.store.role(GatewayStore), stage.agent()
    helper = type(agent)(stage, agent.opened)
    key, move, losses = store.keys.open_rollout(agent.name), getattr(store, moment), []
    before = store.client.hgetall(key)

    def lose() -> None:
        store.client.delete(key)
        store.client.hset(key, mapping=before)
        if number_is_given_again:
            helper.ask("say something else")

    def lossy(*args: Any, **more: Any) -> Any:
        is_first = not losses
        losses.append(moment)
        if is_first and moment != "look_up":
            lose()
        found = move(*args, **more)
        if is_first and moment == "look_up":
            lose()
        return found

    agent.ask("say one")
    monkeypatch.setattr(store, moment, lossy)
    agent.ask("say two")
    agent.ask("say three")
    prompts = [decoded(sample.prompt) for sample in stage.engine.samples]  # the helper may be at work still
    assert "something else" not in [prompt for prompt in prompts if "say three" in prompt][-1]  # the helper's words
    assert agent.end().status_code == 200
    (rollout,) = stage.rollouts()
    assert rollout.failure is None
    found = Counter(trained_samples(rollout))
    assert max(found.values()) == 1
    assert set(found) <= set(engine_samples(stage.engine))


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


# -- ends ------------------------------------------------------------------------------------------------------------
def test_an_end_may_be_repeated_and_another_one_is_refused(stage: Stage) -> None:
    agent = stage.agent()
    agent.ask("say one")
    assert agent.end(reward=1.0).json()["is_first"]
    assert not agent.end(reward=1.0).json()["is_first"]
    other = agent.end(reward=0.0)
    assert (other.status_code, other.json()["error"]["code"]) == (409, "other_end")
    late = agent.post("say two")
    assert (late.status_code, late.json()["error"]["code"]) == (409, "rollout_ended")
    assert late.headers["x-should-retry"] == "false"


def test_a_group_is_pushed_once_all_its_rollouts_have_ended_with_what_was_said_of_it(stage: Stage) -> None:
    from gateway_stage import Agent

    begun = stage.begin(size=3, prompt_id="tree", answer="plant", metadata={"level": 2})
    agents = [Agent(stage, opened) for opened in begun["open_rollouts"]]
    agents[0].ask("say one")
    agents[0].end(rewards={"exact": 0.5, "style": 1.0}, reward=0.75)
    agents[1].ask("say two")
    agents[1].end(failure={"kind": "timeout", "message": "too slow"})
    assert stage._pushed() == []
    agents[2].end(reward=1.0)
    first, second, third = stage.rollouts(3)
    assert (first.reward, dict(first.rewards), first.failure) == (0.75, {"exact": 0.5, "style": 1.0}, None)
    assert (second.reward, second.failure) == (None, ("timeout", "too slow"))
    assert third.failure is not None
    assert third.failure.kind == "empty"
    (view,) = stage.buffer.groups("env:agents")
    assert (view.prompt_id, view.planned_size) == ("tree", 3)
    (entry,) = stage.buffer.store.read_pool()
    assert entry.info is not None
    assert entry.info.seconds is not None  # since its ticket
    assert stage.buffer.verify().ok


def sampled(tokens: int) -> OpenCall:
    """A conversation of one call."""
    return OpenCall(
        prompt=np.array([1, 2], np.int32),
        tokens=np.full(tokens, 7, np.int32),
        logprobs=np.full(tokens, -0.5, np.float32),
        version_spans=(VersionSpan(0, 0, tokens),),
        details={"message": {"role": "assistant", "content": ""}},
    )


@pytest.mark.parametrize(
    ("sizes", "lost"),
    [
        # Conversations of each rollout, and tokens of each of them; those that the group is too large for.
        ([(3, 5), (256, 2), (256, 2), (250, 2), (256, 2), (200, 2), (40, 2)], {1}),
        ([(1, 2000), (2, 5), (1, 5000), (1, 90)], {2}),
        ([(1, 5000), (1, 5), (1, 6000)], {0, 2}),
    ],
)
def test_a_group_that_is_too_large_is_pushed_without_its_largest_rollouts_alone(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, sizes: list[tuple[int, int]], lost: set[int]
) -> None:
    monkeypatch.setattr("rlbuffer.wire.encoding.MAX_PAYLOAD_BYTES", 30_000)
    store = stage.first.buffer.store.role(GatewayStore)
    opened = stage.begin(len(sizes))["open_rollouts"]
    for one, (conversations, tokens) in zip(opened, sizes, strict=True):
        line = store.look_up(one["api_key"]).line
        for number in range(conversations):
            names = {"request": f"r{number}", "history": f"h{number}", "seen": 0, "line": line}
            store.record(one["api_key"], sampled(tokens), **names)
        httpx.post(one["end_url"], json={"reward": 1.0}, timeout=60)
    found = stage.rollouts(len(sizes))
    assert {i for i, rollout in enumerate(found) if rollout.failure is not None} == lost
    assert {found[i].failure.kind for i in lost} == {"too_large"}
    assert [(len(r.sequences), r.loss_tokens) for i, r in enumerate(found) if i not in lost] == [
        (conversations, conversations * tokens) for i, (conversations, tokens) in enumerate(sizes) if i not in lost
    ]
    assert stage.buffer.verify().ok


@pytest.mark.parametrize("field", ["answer", "metadata"])
def test_what_no_push_can_take_along_is_refused_at_the_opening_and_holds_up_no_push(stage: Stage, field: str) -> None:
    large = "x" * (5 * 2**20)
    about = {field: {"text": large}}
    refused = httpx.post(f"{stage.first.url}/v1/open_rollouts", json={"env": "agents", **about}, timeout=60)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_value")
    assert "x" * 100 not in refused.text
    store = stage.first.buffer.store.role(GatewayStore)  # an opening of another program
    (number,) = stage.wait_for(lambda: store.take_tickets("agents", 1, ttl_seconds=60))
    ticket = Ticket(env="agents", number=number, group_id=f"agents.{number}")
    begun = store.begin("key", ticket, size=1, about={"prompt_id": "tree", **about})
    store.record(
        begun.capabilities[0],
        sampled(3),
        request="r",
        seen=0,
        history="h",
        line=store.look_up(begun.capabilities[0]).line,
    )
    store.end(begun.capabilities[0], End(reward=0.5))
    (rollout,) = stage.rollouts()
    assert (rollout.failure, rollout.reward, rollout.loss_tokens) == (None, 0.5, 3)


def test_a_conversation_more_than_a_rollout_may_have_is_refused_before_it_is_sampled(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("rlbuffer.gateway.answering", "rlbuffer.store.gateway"):
        monkeypatch.setattr(f"{module}.MAX_SEQUENCES", 2)
    agent = stage.agent()
    agent.ask("say one")
    helper = type(agent)(stage, agent.opened)
    helper.ask("say two")
    refused = agent.post(messages=[{"role": "user", "content": "say three"}])
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "rollout_full")
    assert len(stage.engine.samples) == 2
    agent.ask("say four")  # what goes on is no further conversation
    agent.end()
    (rollout,) = stage.rollouts()
    assert rollout.failure is None
    assert Counter(trained_samples(rollout)) == Counter(engine_samples(stage.engine))


@pytest.mark.parametrize(
    "end",
    [
        {},
        {"reward": "much"},
        {"reward": True},
        {"reward": float("nan")},
        {"reward": 1e300},
        {"rewards": {"a": 1.0, "b": 2.0}, "reward": [1]},
        {"rewards": {"a": None}},
        {"rewards": [1.0]},
        {"failure": {"kind": "no kind at all"}},
        {"failure": {"message": "m"}},
        {"failure": 3},
    ],
)
def test_an_end_that_is_none_is_refused_and_the_rollout_stays_open(stage: Stage, end: dict[str, Any]) -> None:
    agent = stage.agent()
    body = json.dumps(end)
    refused = httpx.post(agent.opened["end_url"], content=body, timeout=60)
    assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")
    assert agent.post("say one").status_code == 200


def test_a_rollout_of_which_nothing_is_heard_fails_as_abandoned(redis_url: str, run_name: str) -> None:
    stage = Stage(redis_url, run_name, idle_seconds=2.0)
    try:
        agent = stage.agent()
        agent.ask("say one")
        (rollout,) = stage.rollouts()
        assert rollout.failure is not None
        assert rollout.failure.kind == "abandoned"
        assert rollout.reward is None
    finally:
        stage.close()


@pytest.mark.server
@pytest.mark.parametrize("trouble", ["down", "hangs", "gateways"])
def test_deadlines_that_pass_while_nobody_can_be_heard_end_nothing(tmp_path: Path, trouble: str) -> None:
    with OwnServer(tmp_path / "own") as server:
        stage = Stage(server.url, "r", idle_seconds=6.0)
        try:
            agent = stage.agent()
            agent.ask("say one")
            if trouble == "down":
                server.kill()
            elif trouble == "hangs":
                os.kill(server.pid, signal.SIGSTOP)
            else:
                stage.drop(stage.first, kills=True)
            time.sleep(7.0)
            if trouble == "down":
                server.start()
            elif trouble == "hangs":
                os.kill(server.pid, signal.SIGCONT)
            else:
                stage.first = stage.serve()
                agent = agent.at(stage.first)
            time.sleep(4.0)  # its client waits before it asks again
            assert agent.post("say two", retry=1).status_code == 200
            assert agent.end().status_code == 200
            (rollout,) = stage.rollouts()
            assert rollout.failure is None
        finally:
            stage.close()


@pytest.mark.parametrize("thinks", [0.0, 2.5])
def test_a_call_that_an_engine_works_at_for_long_is_not_abandoned(redis_url: str, run_name: str, thinks: float) -> None:
    stage = Stage(redis_url, run_name, idle_seconds=3.0)
    try:
        agent = stage.agent()
        agent.ask("say one")
        time.sleep(thinks)
        stage.engine.delay = 5.0
        agent.ask("say two")
        assert agent.end().status_code == 200
        (rollout,) = stage.rollouts()
        assert rollout.failure is None
    finally:
        stage.close()


def test_a_rollout_that_has_become_too_old_fails_while_it_runs(stage: Stage) -> None:
    agent = stage.agent()
    agent.ask("say one")
    for version in (1, 2, 3):
        stage.buffer.policy.announce(version, location="", size=0, checksum="")
    stage.wait_for(lambda: agent.post("say two").status_code == 409)
    (rollout,) = stage.rollouts()
    assert rollout.failure is not None
    assert rollout.failure.kind == "stale"


def test_another_gateway_pushes_what_one_has_left(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = stage.agent()
    agent.ask("say one")
    other = stage.serve()
    monkeypatch.setattr(stage.first.gateway.sweeper, "ended", lambda group_id: None)
    agent.end()
    stage.drop(stage.first, kills=True)
    stage.first = other
    (rollout,) = stage.rollouts()
    assert rollout.reward == 1.0


# -- openings --------------------------------------------------------------------------------------------------------
def test_the_same_key_gives_the_same_rollouts_also_from_another_gateway(stage: Stage) -> None:
    other = stage.serve()
    first, again = stage.begin(2, key="k"), stage.begin(2, key="k", at=other)
    assert first["group_id"] == again["group_id"]
    assert [one["api_key"] for one in first["open_rollouts"]] == [one["api_key"] for one in again["open_rollouts"]]
    assert stage.begin(2)["group_id"] != first["group_id"]


def test_without_a_ticket_an_opener_is_told_to_come_again(stage: Stage) -> None:
    for _ in range(1000):
        response = httpx.post(f"{stage.first.url}/v1/open_rollouts", json={"env": "agents", "size": 1}, timeout=60)
        if response.status_code != 200:
            break
    assert (response.status_code, response.json()["error"]["code"]) == (503, "no_ticket")
    assert (response.headers["x-should-retry"], int(response.headers["Retry-After"]) > 0) == ("true", True)


def hold(monkeypatch: pytest.MonkeyPatch, store: GatewayStore, move: str) -> tuple[threading.Event, threading.Event]:
    """The next such move waits. -> set once it does; to be set for it to go on."""
    is_there, goes_on, real = threading.Event(), threading.Event(), getattr(store, move)

    def held(*args: Any, **more: Any) -> Any:
        monkeypatch.undo()
        is_there.set()
        goes_on.wait(60)
        return real(*args, **more)

    monkeypatch.setattr(store, move, held)
    return is_there, goes_on


@pytest.mark.parametrize("key", ["", "k"])
@pytest.mark.parametrize("moment", ["take_tickets", "begin", "_begun"])
def test_who_hangs_up_while_a_group_is_begun_leaves_none_that_nobody_has_heard_of(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, moment: str, key: str
) -> None:
    store = stage.first.buffer.store.role(GatewayStore)
    begun = stage.begin(key="another")  # tickets are out
    httpx.post(begun["open_rollouts"][0]["end_url"], json={"reward": 1.0}, timeout=60).raise_for_status()
    is_noticed, leave = threading.Event(), Opening.leave

    def noted(opening: Opening) -> None:
        leave(opening)
        is_noticed.set()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Opening, "leave", noted)
        is_there, goes_on = hold(monkeypatch, store, moment)
        body = {"env": "agents", "size": 2, "wait": 30, **({"key": key} if key else {})}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{stage.first.url}/v1/open_rollouts", json=body, timeout=1.0)
        assert is_there.wait(60)
        assert is_noticed.wait(60)
    goes_on.set()
    if key and moment != "take_tickets":  # its caller finds it again
        stage.wait_for(lambda: store.begun(key))
        assert stage.begin(2, key=key)["open_rollouts"][0]["name"] in {one.name for one in open_rollouts(store)}
        return
    # One that was given back stands at 0, to be given again.
    stage.wait_for(lambda: not store.client.zcount(store.keys.tickets("agents"), 1, "inf") and not open_rollouts(store))
    if moment == "_begun":
        assert {rollout.failure.kind for rollout in stage.rollouts(3) if rollout.failure} == {"abandoned", "empty"}
    assert stage.buffer.verify().ok


def test_a_key_whose_group_is_lost_takes_no_tickets(stage: Stage) -> None:
    store = stage.first.buffer.store.role(GatewayStore)
    begun = stage.begin(key="k")
    store.client.delete(store.keys.open_group(begun["group_id"]))

    def out() -> int:
        return int(store.client.zcount(store.keys.tickets("agents"), 1000 * store.now(), "+inf"))

    before = out()
    for _ in range(3):
        body = {"env": "agents", "size": 1, "wait": 30, "key": "k"}
        refused = httpx.post(f"{stage.first.url}/v1/open_rollouts", json=body, timeout=60)
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "key_used")
    assert out() == before


@pytest.mark.parametrize(
    "body",
    [
        [],
        {"size": 1},
        {"env": "a b"},
        {"env": "agents", "size": 0},
        {"env": "agents", "size": 1_000_000},
        {"env": "agents", "size": True},
        {"env": "agents", "key": "k" * 600},
        {"env": "agents", "wait": -1},
        {"env": "agents", "metadata": [1]},
        {"env": "agents", "metadata": {"n": 2**70}},
        {"env": "agents", "prompt_id": "x" * 1000},
        {"env": "agents", "answer": 2**70},
        {"env": "agents", "tickets": "all"},
    ],
)
def test_an_odd_opening_is_refused_and_hinders_nobody(stage: Stage, body: Any) -> None:
    refused = httpx.post(f"{stage.first.url}/v1/open_rollouts", json=body, timeout=60)
    assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error"), refused.text
    agent = stage.agent()
    agent.ask("say one")
    agent.end()
    assert len(stage.rollouts()) == 1


def test_one_damaged_record_is_a_failed_rollout_and_the_others_are_pushed(stage: Stage) -> None:
    store = stage.first.buffer.store.role(GatewayStore)
    wounded, sound = stage.agent(), stage.agent()
    wounded.ask("say one")
    sound.ask("say two")
    store.client.hset(store.keys.open_rollout(wounded.name), "c:1", b"no call")
    wounded.end()
    sound.end()
    found = {rollout.rollout_id: rollout for rollout in stage.rollouts(2)}
    assert found[sound.name].failure is None
    failure = found[wounded.name].failure
    assert failure is not None
    assert failure.kind == "damaged"


@pytest.mark.parametrize("damaged", [True, False])
def test_a_history_that_is_damaged_is_rendered_whole(stage: Stage, damaged: bool) -> None:
    store = stage.first.buffer.store.role(GatewayStore)
    agent = stage.agent()
    agent.ask("say one")
    key = store.keys.open_rollout(agent.name)
    store.client.hset(key, "c:1", b"no call") if damaged else store.client.hdel(key, "c:1")
    assert agent.post("say two").status_code == 200


# -- rights and limits -----------------------------------------------------------------------------------------------
def test_who_has_no_capability_is_answered_nothing(stage: Stage) -> None:
    agent = stage.agent()
    key = agent.opened["api_key"]
    wrong = key[:-4] + ("AAAA" if not key.endswith("AAAA") else "BBBB")
    body = {"model": "m", "messages": [{"role": "user", "content": "say x"}]}
    url = f"{stage.first.url}/v1/chat/completions"
    for headers, status in (
        ({}, 401),
        ({"Authorization": f"Bearer {wrong}"}, 404),
        ({"Authorization": "Bearer nothing"}, 404),
        ({"Authorization": f"Bearer {key}"}, 200),
        ({"Authorization": f"bearer {key}"}, 200),
        ({"x-api-key": key}, 200),
    ):
        response = httpx.post(url, json=body, headers=headers, timeout=60)
        assert response.status_code == status
        assert key not in response.text
        assert wrong not in response.text


@pytest.mark.parametrize("token", ["", "secret"])
def test_an_agent_cannot_end_itself_with_what_it_has(redis_url: str, run_name: str, token: str) -> None:
    stage = Stage(redis_url, run_name, token=token)
    try:
        right = {"Authorization": f"Bearer {token}"} if token else {}
        agent = stage.agent(headers=right)
        agent.ask("say one")
        key, url = agent.opened["api_key"], stage.first.url
        for path, headers in (
            (f"/r/{key}/end", right),
            (f"/r/{key}/end", {"Authorization": f"Bearer {key}"}),
            ("/end", {"x-api-key": key, **right}),
            ("/end", {"Authorization": f"Bearer {key}"}),
        ):
            refused = httpx.post(f"{url}{path}", json={"reward": 1.0}, headers=headers, timeout=60)
            assert refused.status_code in (401, 403), path
            assert key not in refused.text
        agent.ask("say two")
        assert agent.end(reward=0.25, headers=right).json()["is_first"]
        (rollout,) = stage.rollouts()
        assert rollout.reward == 0.25
    finally:
        stage.close()


@pytest.mark.parametrize("sent", ["text/plain", "application/x-www-form-urlencoded", "text/json", None])
def test_what_a_page_of_the_web_may_send_unasked_is_refused(stage: Stage, sent: str | None) -> None:
    agent = stage.agent()
    bodies = {
        f"{stage.first.url}/v1/open_rollouts": b'{"env": "agents"}',
        agent.opened["end_url"]: b'{"reward": 1}',
        **{
            f"{agent.opened['base_url']}/{path}": b'{"messages": [{"role": "user", "content": "say x"}], "input": "x"}'
            for path in ("chat/completions", "messages", "responses", "messages/count_tokens")
        },
    }
    for url, body in bodies.items():
        refused = httpx.post(url, content=body, headers={"Content-Type": sent} if sent else {}, timeout=60)
        assert refused.status_code == 400, url
        assert "application/json" in refused.json()["error"]["message"]
    sent_well = {"Content-Type": "application/json; charset=utf-8"}
    assert httpx.post(agent.opened["end_url"], content=b'{"reward": 1}', headers=sent_well).status_code == 200


def test_beginning_and_ending_need_the_token_where_there_is_one(redis_url: str, run_name: str) -> None:
    stage = Stage(redis_url, run_name, token="secret")
    try:
        refused = httpx.post(f"{stage.first.url}/v1/open_rollouts", json={"env": "agents"}, timeout=60)
        assert refused.status_code == 401
        assert "secret" not in refused.text
        right = {"Authorization": "Bearer secret"}
        agent = stage.agent(headers=right)
        assert agent.post("say one").status_code == 200
        assert agent.end().status_code == 401
        assert agent.end(headers={"Authorization": "bearer secret"}).status_code == 200
    finally:
        stage.close()


def test_an_address_that_others_reach_needs_a_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    from rlbuffer.gateway.tokens import token_for

    monkeypatch.delenv("RLBUFFER_GATEWAY_TOKEN", raising=False)
    assert token_for("127.0.0.1:8400") == token_for("[::1]:8400") == ""
    for listen in ("0.0.0.0:8400", ":8400", "gateway:8400"):
        with pytest.raises(ConfigError, match="RLBUFFER_GATEWAY_TOKEN"):
            token_for(listen)
    (tmp_path / "token").write_text("secret\n")
    monkeypatch.setenv("RLBUFFER_GATEWAY_TOKEN_FILE", str(tmp_path / "token"))
    assert token_for("0.0.0.0:8400") == "secret"
    monkeypatch.setenv("RLBUFFER_GATEWAY_TOKEN", "other")
    assert token_for("0.0.0.0:8400") == "other"


def test_nothing_of_an_agent_reaches_a_log(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    marks = ["mark-of-text", "mark-of-key"]
    with caplog.at_level(logging.DEBUG):
        agent = stage.agent(key="mark-of-key")
        key = agent.opened["api_key"]
        agent.post("mark-of-text")
        agent.post("mark-of-text", tools=[{"type": "mark-of-text"}])
        stage.engine.spoil = lambda answer: {"choices": "mark-of-text"}
        agent.post("mark-of-text 2")
        stage.engine.spoil = lambda answer: [][1]
        agent.post("mark-of-text 3", timeout=60)
        agent.end(failure="mark-of-text")
        stage.rollouts()
    logged = [record.getMessage() for record in caplog.records if record.name.startswith("rlbuffer")]
    assert not [line for line in logged for mark in (*marks, key, key[-43:]) if mark in line]


@pytest.mark.parametrize("path", ["chat/completions", "messages", "responses"])
def test_bodies_that_are_no_requests_are_refused_in_the_form_of_their_dialect(stage: Stage, path: str) -> None:
    url = f"{stage.agent().opened['base_url']}/{path}"
    bodies = [(content, {}) for content in (b"", b"{", b"[]", b"\xff", b'"text"', b"[" * 100_000)]
    for content, headers in [*bodies, (b"{}", {"Content-Encoding": "gzip"})]:
        headers = {"Content-Type": "application/json", **headers}
        refused = httpx.post(url, content=content, headers=headers, timeout=60)
        assert refused.status_code == 400
        assert refused.json()["error"]["message"]
        assert ("type" in refused.json()) == (path == "messages")


@pytest.mark.parametrize("path", ["chat/completions", "v1/v1/messages", "v1/completions"])
def test_a_base_url_that_is_not_its_clients_is_said(stage: Stage, path: str) -> None:
    refused = httpx.post(f"{stage.agent().opened['anthropic_base_url']}/{path}", json={}, timeout=60)
    assert refused.status_code == 404
    assert "base URL" in refused.json()["error"]["message"]


def test_a_body_that_does_not_arrive_is_waited_for_no_longer(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_servers, "REQUEST_SECONDS", 0.1)
    host, port = stage.first.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as asker:
        asker.sendall(f"POST /v1/messages HTTP/1.1\r\nHost: {host}\r\nContent-Length: 9\r\n\r\n{{".encode())
        assert asker.recv(12) == b"HTTP/1.1 408"


HALF = "caf\udce9"
"""Half of a surrogate pair: what JavaScript and Python write of a file that is no UTF-8."""
DEEP = "[" * 3_000


def called(arguments: str) -> list[dict[str, Any]]:
    """A conversation in which a model has called a tool with this."""
    call = {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": arguments}}
    return [
        {"role": "user", "content": "say it"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "a plant"},
        {"role": "user", "content": "say more"},
    ]


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": f"say {HALF}"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": HALF}]}]},
        {"messages": [*called("{}")[:2], {"role": "tool", "tool_call_id": HALF, "content": HALF}]},
        {"messages": [{"role": "system", "content": HALF}, {"role": "user", "content": "x"}]},
        {"messages": [{"role": "user", "content": "x", "name": HALF}]},
        {"messages": called("{}"), "model": HALF},
        {"messages": called("{}"), "stop": [HALF]},
        {"messages": called("{}"), "reasoning_effort": HALF},
        {
            "messages": called("{}"),
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {HALF: {"const": HALF}}}}],
        },
        *({"messages": called(text)} for text in (DEEP, '{"a": NaN}', "NaN", "1e999", f'{{"a": {DEEP}', "9" * 5000)),
        {"messages": called(json.dumps({"a": HALF}))},
        {"messages": called('{"a": "' + HALF + '"}')},
        {"messages": called("{" * 500 + "}" * 500)},
        {"messages": called('{"a":' * 500 + "1" + "}" * 500)},
    ],
    ids=lambda body: str(body)[-60:],
)
def test_whatever_a_text_holds_the_call_and_the_next_one_are_answered(stage: Stage, body: dict[str, Any]) -> None:
    agent = stage.agent()
    sent_well = {"Content-Type": "application/json"}
    url, messages = f"{agent.opened['base_url']}/chat/completions", list(body["messages"])
    for _ in range(2):
        data = json.dumps({"model": "m", **body, "messages": messages}).encode()
        response = httpx.post(url, content=data, headers=sent_well, timeout=60)
        assert response.status_code == 200, response.text
        messages += [response.json()["choices"][0]["message"], {"role": "user", "content": "say more"}]
    agent.end()
    (rollout,) = stage.rollouts()
    assert rollout.failure is None
    assert Counter(trained_samples(rollout)) == Counter(engine_samples(stage.engine))


def test_what_json_does_not_have_is_refused_wherever_it_stands(stage: Stage) -> None:
    base = stage.agent().opened["base_url"]
    for number in ("NaN", "Infinity", "-Infinity", "1e999", "9" * 5000, DEEP + "]" * 3_000, "[" * 300 + "]" * 300):
        schema = f'"type": "function", "name": "f", "function": {{"name": "f", "parameters": {{"a": {number}}}}}'
        body = '{"messages": [{"role": "user", "content": "x"}], "input": "x", "tools": [{' + schema + "}]}"
        for path in ("chat/completions", "messages", "responses", "messages/count_tokens"):
            sent_well = {"Content-Type": "application/json"}
            refused = httpx.post(f"{base}/{path}", content=body, headers=sent_well, timeout=60)
            assert refused.status_code == 400, (number[:9], path)
            assert refused.json()["error"]["message"].startswith("the body cannot be read")


def test_a_request_that_is_too_large_is_refused_in_the_form_of_its_dialect(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MOST_BODY", 2**20)
    other = stage.serve()
    agent = stage.agent()
    url = f"{other.url}/r/{agent.opened['api_key']}/v1/messages"
    refused = httpx.post(url, json={"messages": [{"role": "user", "content": "a" * 2**21}]}, timeout=60)
    assert (refused.status_code, refused.json()["error"]["type"]) == (413, "request_too_large")


@pytest.mark.parametrize(
    "length",
    ["Content-Length: 20000000", "Transfer-Encoding: chunked", "Content-Length: 20000\r\nContent-Encoding: gzip"],
)
@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("v1/chat/completions", 404),
        ("v1/messages", 404),
        ("v1/messages/count_tokens", 404),
        ("v1/responses", 404),
        ("end", 401),
        ("begin", 401),
    ],
)
def test_a_large_body_is_read_of_nobody_who_has_no_right(stage: Stage, path: str, status: int, length: str) -> None:
    key = stage.agent().opened["api_key"]
    served = stage.serve(token="secret")
    path = "/v1/open_rollouts" if path == "begin" else f"/r/{key[:-4]}AAAA/{path}"
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as asker:
        head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n{length}\r\n\r\n"
        asker.sendall(head.encode())  # and nothing of the body
        assert asker.recv(12).decode() == f"HTTP/1.1 {status}"


def test_a_large_body_is_read_of_an_agent(stage: Stage) -> None:
    refused = stage.agent().post("a" * 2**21)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_a_rollout_may_have_so_many_calls_and_no_more(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_server, "MOST_CALLS", 2)
    agent = stage.agent()
    agent.ask("say one")
    agent.ask("say two")
    refused = agent.post("say three")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "rollout_full")
    agent.end()
    (rollout,) = stage.rollouts()
    assert len(trained_samples(rollout)) == 2


def test_no_agent_takes_the_process_from_others(stage: Stage) -> None:
    greedy, other = stage.agent(), stage.agent()
    stage.engine.holds = True
    answers: list[httpx.Response] = []
    texts = [f"say {n}" for n in range(answering.MOST_ROLLOUT_CALLS + 6)]
    threads = [
        threading.Thread(target=lambda text=text: answers.append(greedy.post(text, timeout=120))) for text in texts
    ]
    for thread in threads:
        thread.start()
    stage.wait_for(lambda: len(answers) == 6)
    assert {(one.status_code, one.headers["x-should-retry"]) for one in answers} == {(429, "true")}
    assert int(answers[0].headers["Retry-After"]) > 0
    stage.wait_for(lambda: stage.first.gateway.answering.open_calls == answering.MOST_ROLLOUT_CALLS)
    waiting = threading.Thread(target=lambda: answers.append(other.post("say it")))
    waiting.start()
    stage.wait_for(lambda: stage.first.gateway.answering.open_calls == answering.MOST_ROLLOUT_CALLS + 1)
    stage.engine.holds = False
    for thread in (*threads, waiting):
        thread.join()
    assert Counter(one.status_code for one in answers) == {429: 6, 200: answering.MOST_ROLLOUT_CALLS + 1}


@pytest.mark.parametrize("path", ["chat/completions", "messages", "messages/count_tokens", "responses"])
def test_who_has_no_right_costs_no_engine_and_no_place(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(answering, "MOST_OPEN_CALLS", 0)
    agent = stage.agent()
    key = agent.opened["api_key"]
    ended = stage.agent()
    ended.end()
    asked = len(stage.engine.asked)
    body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "say x"}], "input": "say x"}
    body = {
        name: body[name]
        for name in (["model", "input"] if path == "responses" else ["model", "max_tokens", "messages"])
    }
    for capability, status in ((key[:-4] + "AAAA", 404), ("nothing", 404), (ended.opened["api_key"], 409)):
        url = f"{stage.first.url}/r/{capability}/v1/{path}"
        assert httpx.post(url, json=body, timeout=60).status_code == status
    assert len(stage.engine.asked) == asked


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
