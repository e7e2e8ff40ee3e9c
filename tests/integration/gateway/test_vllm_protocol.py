"""What the gateway sends to vLLM 0.33, and what it reads of its answers, against the models that vLLM has published.

``vllm_0.33_protocol.json`` has their JSON schemas, with every object closed; ``tests/real_vllm/protocol_schemas.py``
made it once from the wheel of vLLM 0.33.0 on PyPI. The engine here is a fake one; so its answers are held to them, too.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine
from gateway_stage import TOOLS, Agent, Stage
from jsonschema import Draft202012Validator

PROTOCOL = json.loads(Path(__file__).with_name("vllm_0.33_protocol.json").read_text())
RENDER, GENERATE = "/v1/chat/completions/render", "/inference/v1/generate"


def wrong(model: str, value: Any) -> list[str]:
    """What of a value does not fit a model."""
    errors = Draft202012Validator(PROTOCOL[model]).iter_errors(value)
    return [f"{'/'.join(map(str, error.absolute_path))}: {error.message[:200]}" for error in errors]


@pytest.fixture
def exchanges(redis_url: str, run_name: str) -> list[tuple[str, Any, Any]]:
    """All that is said between a gateway and its engine while agents of each dialect hold conversations with tools."""
    engine = FakeEngine(speaks="0.33.0", exchanges=[])
    stage = Stage(redis_url, run_name, engine=engine, top_p=0.9, temperature=0.7)
    engine.heeds = ("temperature",)
    try:
        chat = stage.agent()
        chat.messages.append({"role": "system", "content": "You are short."})
        more = {"tools": TOOLS, "parallel_tool_calls": False, "reasoning_effort": "low", "max_tokens": 500}
        chat.ask('call look_up {"word": "tree"}', **more)
        chat.result("a plant")
        chat.go_on(**more, chat_template_kwargs={"enable_thinking": True})
        chat.ask("say a b c", stop=["b"], **more)
        chat.ask("say the answer is a tree", max_tokens=3)
        speak(stage.agent(), "messages", {"max_tokens": 400, "system": "Be kind.", "messages": [user("a")]})
        speak(stage.agent(), "responses", {"instructions": "Be kind.", "input": "a", "max_output_tokens": 400})
    finally:
        stage.close()
    assert engine.exchanges is not None
    return engine.exchanges


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def speak(agent: Agent, path: str, body: dict[str, Any]) -> None:
    response = httpx.post(f"{agent.opened['base_url']}/{path}", json={"model": "policy", **body}, timeout=60)
    assert response.status_code == 200, response.text


def test_what_is_sent_and_read_fits_the_models_that_vllm_has_published(exchanges: list[tuple[str, Any, Any]]) -> None:
    met = Counter[str]()
    for path, body, answer in exchanges:
        if path == RENDER:
            pairs = {"conversation": body, "generate": answer}
        elif path == GENERATE:
            pairs = {"generate": body, "derendered" if body.get("output_mode") == "derender" else "tokens": answer}
        else:
            continue
        for model, value in pairs.items():
            assert wrong(model, value) == [], (path, model, value)
            met[model] += 1
    assert min(met[model] for model in PROTOCOL if model != "source") > 0
    sent = [body for path, body, _ in exchanges if path == GENERATE]
    assert all(body["parse_context"]["include_reasoning"] for body in sent if "parse_context" in body)
    assert all(body["sampling_params"]["detokenize"] for body in sent if body.get("output_mode") == "derender")
    assert {name for body in sent for name in body} >= {"output_mode", "parse_context", "token_ids", "model", "stream"}


@pytest.mark.parametrize(
    ("model", "value"),
    [
        ("generate", {"token_ids": [1], "sampling_params": {"max_tokens": 1, "top_q": 0.5}}),
        ("generate", {"token_ids": [], "sampling_params": {}}),
        ("generate", {"token_ids": [1], "sampling_params": {}, "parse_context": {"reasons": True}}),
        ("conversation", {"messages": [{"role": "user", "content": "a"}], "adds_generation_prompt": True}),
        ("derendered", {"choices": [{"index": 0, "weight_version": "3", "message": {"role": "assistant"}}]}),
    ],
)
def test_a_field_that_vllm_does_not_know_is_found(model: str, value: Any) -> None:
    assert wrong(model, value)
