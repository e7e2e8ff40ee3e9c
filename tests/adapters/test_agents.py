"""Agents as people have them, with the clients of OpenAI and Anthropic, before a gateway on a real server."""

from __future__ import annotations

import json
import os
import threading
import uuid
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

if os.environ.get("RLBUFFER_ADAPTERS") != "1":
    pytest.importorskip("openai")
    pytest.importorskip("anthropic")
import anthropic
import openai
from gateway_stage import Agent, Stage, engine_samples, trained_samples
from own_server import OwnServer

from rlbuffer.gateway import service
from rlbuffer.store.gateway import GatewayStore

TOOL = {"name": "look_up", "description": "looks up", "parameters": {"type": "object", "properties": {}}}
CHAT_TOOLS: list[Any] = [{"type": "function", "function": TOOL}]
ANTHROPIC_TOOLS: list[Any] = [{"name": "look_up", "description": "looks up", "input_schema": TOOL["parameters"]}]
RESPONSES_TOOLS: list[Any] = [{"type": "function", **TOOL}]
CALL = 'call look_up {"word": "tree"}'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnServer]:
    with OwnServer(tmp_path_factory.mktemp("server")) as made:
        yield made


@pytest.fixture
def stage(server: OwnServer) -> Iterator[Stage]:
    made = Stage(server.url, f"t-{uuid.uuid4().hex[:12]}")
    yield made
    made.close()


def opened_by(stage: Stage) -> dict[str, Any]:
    found: dict[str, Any] = stage.begin()["open_rollouts"][0]
    return found


def openai_of(opened: dict[str, Any], **more: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=opened["base_url"], api_key="none", **{"max_retries": 0, "timeout": 60, **more})


def anthropic_of(opened: dict[str, Any], **more: Any) -> anthropic.Anthropic:
    base = opened["anthropic_base_url"]
    return anthropic.Anthropic(base_url=base, api_key="none", **{"max_retries": 0, "timeout": 60, **more})


def chat_turn(client: openai.OpenAI, messages: list[Any], *, streams: bool) -> str:
    """One answer and the results of its calls. -> what it says."""
    if streams:
        with client.chat.completions.stream(model="gpt", messages=messages, tools=CHAT_TOOLS) as stream:
            message = stream.get_final_completion().choices[0].message
    else:
        completion = client.chat.completions.create(model="gpt", messages=messages, tools=CHAT_TOOLS)
        message = completion.choices[0].message
    messages.append(message)
    for call in message.tool_calls or []:
        assert json.loads(call.function.arguments) == {"word": "tree"}
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "a plant"})
    return message.content or ""


def anthropic_turn(client: anthropic.Anthropic, messages: list[Any], *, streams: bool) -> str:
    for message in messages:  # a mark that moves from turn to turn
        for block in message["content"] if isinstance(message["content"], list) else ():
            if isinstance(block, dict):
                block.pop("cache_control", None)
    if isinstance(messages[-1]["content"], list):
        messages[-1]["content"][-1]["cache_control"] = {"type": "ephemeral"}
    asked: dict[str, Any] = {
        "model": "claude",
        "max_tokens": 400,
        "messages": messages,
        "tools": ANTHROPIC_TOOLS,
        "system": [{"type": "text", "text": "Solve it.", "cache_control": {"type": "ephemeral"}}],
    }
    if streams:
        with client.messages.stream(**asked) as stream:
            message = stream.get_final_message()
    else:
        message = client.messages.create(**asked)
    messages.append({"role": "assistant", "content": message.content})
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "a plant"}
        for block in message.content
        if block.type == "tool_use"
    ]
    if results:
        assert message.stop_reason == "tool_use"
        messages.append({"role": "user", "content": results})
    return "".join(block.text for block in message.content if block.type == "text")


def responses_turn(client: openai.OpenAI, items: list[Any], *, streams: bool) -> str:
    asked: dict[str, Any] = {"model": "gpt", "input": items, "tools": RESPONSES_TOOLS, "instructions": "Solve it."}
    if streams:
        with client.responses.stream(**asked) as stream:
            response = stream.get_final_response()
    else:
        response = client.responses.create(**asked)
    items += [item.model_dump(exclude_none=True) for item in response.output]
    items += [
        {"type": "function_call_output", "call_id": item.call_id, "output": "a plant"}
        for item in response.output
        if item.type == "function_call"
    ]
    return response.output_text


KINDS: dict[str, Any] = {
    "chat": (openai_of, chat_turn),
    "messages": (anthropic_of, anthropic_turn),
    "responses": (openai_of, responses_turn),
}


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streaming"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_agent_with_tools_is_one_sequence_of_what_the_engine_sampled(stage: Stage, kind: str, streams: bool) -> None:
    make, turn = KINDS[kind]
    opened = opened_by(stage)
    client, messages = make(opened), list[Any]()
    messages.append({"role": "user", "content": CALL})
    assert turn(client, messages, streams=streams) == ""
    said = turn(client, messages, streams=streams)
    messages.append({"role": "user", "content": "say a tree"})
    assert turn(client, messages, streams=streams) == "a tree" != said
    client.close()
    assert Agent(stage, opened).end(reward=1.0).status_code == 200
    (rollout,) = stage.rollouts()
    assert len(rollout.sequences) == 1
    assert trained_samples(rollout) == engine_samples(stage.engine)


def test_agents_of_all_kinds_at_once_hear_what_is_trained(stage: Stage) -> None:
    group = stage.begin(size=6)["open_rollouts"]
    heard = Counter[str]()

    def play(opened: dict[str, Any], kind: str, streams: bool) -> None:
        make, turn = KINDS[kind]
        client, messages = make(opened, max_retries=4), list[Any]([{"role": "user", "content": CALL}])
        for number in range(4):
            turn(client, messages, streams=streams)
            heard[opened["name"]] += 1
            if number:
                messages.append({"role": "user", "content": f"say {number}"})
        client.close()
        assert Agent(stage, opened).end(reward=float(streams)).status_code == 200

    threads = [
        threading.Thread(target=play, args=(opened, kind, streams))
        for opened, (kind, streams) in zip(group, [(k, s) for k in KINDS for s in (False, True)], strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rollouts = {rollout.rollout_id: rollout for rollout in stage.rollouts(6)}
    assert {name: len(trained_samples(rollout)) for name, rollout in rollouts.items()} == dict(heard)
    assert Counter(s for r in rollouts.values() for s in trained_samples(r)) == Counter(engine_samples(stage.engine))
    assert stage.buffer.verify().ok


@pytest.mark.parametrize(
    ("openai_error", "anthropic_error", "spoil"),
    [
        (openai.BadRequestError, anthropic.BadRequestError, "image"),
        (openai.ConflictError, anthropic.ConflictError, "ended"),
        (openai.NotFoundError, anthropic.NotFoundError, "unknown"),
        (openai.APIStatusError, anthropic.APIStatusError, "large"),
        (openai.InternalServerError, anthropic.InternalServerError, "full"),
    ],
)
def test_a_refusal_is_the_clients_own_error(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, openai_error: Any, anthropic_error: Any, spoil: str
) -> None:
    opened = opened_by(stage)
    content: Any = "say x"
    if spoil == "image":
        content = [{"type": "image", "source": {"type": "url", "url": "http://x/"}}]
    elif spoil == "ended":
        Agent(stage, opened).end()
    elif spoil == "unknown":
        change = {name: value.replace(opened["api_key"][-6:], "AAAAAA") for name, value in opened.items()}
        opened = {**opened, **change}
    elif spoil == "large":
        content = "a" * (service.MOST_BODY + 1)
    else:
        monkeypatch.setattr(stage.first.buffer.store.role(GatewayStore), "may_sample", lambda: False)
    client, other = openai_of(opened), anthropic_of(opened)
    with pytest.raises(openai_error) as caught:
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": content}])
    assert caught.value.body["message"]
    with pytest.raises(anthropic_error) as also:
        other.messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": content}])
    assert also.value.body["error"]["message"]
    client.close()
    other.close()


def test_a_client_that_times_out_and_retries_hears_the_one_sample(stage: Stage) -> None:
    opened = opened_by(stage)
    client = openai_of(opened, timeout=1.0, max_retries=8)
    stage.engine.delay = 3.0
    completion = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "say x"}])
    assert completion.choices[0].message.content == "x"
    assert len(stage.engine.samples) == 1
    client.close()
    Agent(stage, opened).end()
    (rollout,) = stage.rollouts()
    assert trained_samples(rollout) == engine_samples(stage.engine)


def test_tokens_of_a_conversation_are_counted(stage: Stage) -> None:
    client = anthropic_of(opened_by(stage))
    counted = client.messages.count_tokens(model="m", messages=[{"role": "user", "content": "say x"}])
    assert counted.input_tokens > 3
    client.close()
