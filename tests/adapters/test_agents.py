"""Agents as people have them, with the clients of OpenAI and Anthropic, before a gateway on a real server."""

from __future__ import annotations

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
from client_agents import KINDS, anthropic_of, openai_of
from gateway_stage import Agent, Stage, engine_samples, trained_samples
from own_server import OwnServer

from rlbuffer.gateway import service
from rlbuffer.store.gateway import GatewayStore

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


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streaming"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_agent_with_tools_is_one_sequence_of_what_the_engine_sampled(stage: Stage, kind: str, streams: bool) -> None:
    make, turn = KINDS[kind]
    opened = opened_by(stage)
    client, messages = make(opened), list[Any]()
    messages.append({"role": "user", "content": CALL})
    first = turn(client, messages, streams=streams)
    assert (first.text, first.calls) == ("", [{"word": "tree"}])
    said = turn(client, messages, streams=streams).text
    messages.append({"role": "user", "content": "say a tree"})
    assert turn(client, messages, streams=streams).text == "a tree" != said
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
