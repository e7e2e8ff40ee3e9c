"""How rollouts of agents begin and end before a gateway, and how their groups are pushed."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_stage import Stage, engine_samples, sampled, trained_samples
from own_server import OwnServer

from rlbuffer.gateway.opening import Opening
from rlbuffer.records.group import Ticket
from rlbuffer.store.gateway import GatewayStore
from rlbuffer.store.open_rollouts import End, open_rollouts


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


@pytest.mark.parametrize(
    ("url", "body", "told"),
    [
        ("begin", {"env": "sums", "sise": 9}, ["sise", "size", "env", "wait", "metadata"]),
        ("end_url", {"reward": 1.0, "rewrads": {"a": 1}}, ["rewrads", "rewards", "failure"]),
        ("end_url", {"failure": {"kind": "timeout", "mesage": "too slow"}}, ["mesage", "message", "kind"]),
        ("touch_url", {"idle_seconds": 9}, ["idle_seconds"]),
    ],
)
def test_a_field_that_the_gateway_does_not_know_is_refused_by_its_name(
    stage: Stage, url: str, body: dict[str, Any], told: list[str]
) -> None:
    agent = stage.agent()
    url = f"{stage.first.url}/v1/open_rollouts" if url == "begin" else agent.opened[url]
    refused = httpx.post(url, json=body, timeout=60)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (400, "unknown_parameter")
    assert all(word in error["message"] for word in told)
    assert agent.end(rewards={"a": 1.0}, reward=1.0).json()["is_first"]


@pytest.mark.parametrize("body", [None, {}])
def test_a_touch_has_no_fields_and_needs_no_body(stage: Stage, body: dict[str, Any] | None) -> None:
    agent = stage.agent()
    assert httpx.post(agent.opened["touch_url"], json=body, timeout=60).json()["state"] == "open"


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
