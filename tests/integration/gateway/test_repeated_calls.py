"""The same request again, of one agent or of several, before one gateway or two: sampled once for each that asks."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any

import httpx
import pytest
from chat_templates import decoded
from gateway_stage import Stage, engine_samples, trained_samples

from rlbuffer.errors import ServerUnreachable
from rlbuffer.gateway import answering, run_server, service
from rlbuffer.store.gateway import GatewayStore


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
