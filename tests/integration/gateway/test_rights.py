"""Who may ask a gateway what, and what a request may be: rights, forms and limits."""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections import Counter
from typing import Any

import httpx
import pytest
from gateway_stage import Stage, engine_samples, trained_samples

from rlbuffer.errors import ConfigError
from rlbuffer.gateway import answering, run_server, service
from rlbuffer.process import web_servers


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
