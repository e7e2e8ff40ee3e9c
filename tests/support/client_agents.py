"""Turns of agents as people write them, with the clients of OpenAI and Anthropic.

A test module that imports this is skipped where they are not installed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

if os.environ.get("RLBUFFER_VLLM") != "1":  # the environment of real vLLM must have both
    pytest.importorskip("anthropic")
    pytest.importorskip("openai")
import anthropic
import openai

TOOL = {
    "name": "look_up",
    "description": "looks up",
    "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
}
CHAT_TOOLS: list[Any] = [{"type": "function", "function": TOOL}]
ANTHROPIC_TOOLS: list[Any] = [
    {"name": TOOL["name"], "description": TOOL["description"], "input_schema": TOOL["parameters"]}
]
RESPONSES_TOOLS: list[Any] = [{"type": "function", **TOOL}]


def openai_of(opened: Mapping[str, Any], **more: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=opened["base_url"], api_key="none", **{"max_retries": 0, "timeout": 60, **more})


def anthropic_of(opened: Mapping[str, Any], **more: Any) -> anthropic.Anthropic:
    base = opened["anthropic_base_url"]
    return anthropic.Anthropic(base_url=base, api_key="none", **{"max_retries": 0, "timeout": 60, **more})


def a_plant() -> str:
    return "a plant"


@dataclass
class Heard:
    """One answer as its agent has it."""

    id: str
    """The gateway's id of the call, without what the dialect puts before it."""
    text: str
    calls: list[dict[str, Any]] = field(default_factory=list)
    """Arguments of each tool call."""


def chat_turn(
    client: openai.OpenAI, messages: list[Any], *, streams: bool, result: Callable[[], str] = a_plant, **more: Any
) -> Heard:
    """One answer, and the results of its calls, behind the messages."""
    asked: dict[str, Any] = {"model": "gpt", "messages": messages, "tools": CHAT_TOOLS, **more}
    if streams:
        with client.chat.completions.stream(**asked) as stream:
            completion = stream.get_final_completion()
    else:
        completion = client.chat.completions.create(**asked)
    message = completion.choices[0].message
    messages.append(message)
    calls = message.tool_calls or []
    messages += [{"role": "tool", "tool_call_id": call.id, "content": result()} for call in calls]
    arguments = [json.loads(call.function.arguments) for call in calls]
    return Heard(completion.id.removeprefix("chatcmpl-"), message.content or "", arguments)


def anthropic_turn(
    client: anthropic.Anthropic, messages: list[Any], *, streams: bool, result: Callable[[], str] = a_plant, **more: Any
) -> Heard:
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
        **more,
    }
    if streams:
        with client.messages.stream(**asked) as stream:
            message = stream.get_final_message()
    else:
        message = client.messages.create(**asked)
    messages.append({"role": "assistant", "content": message.content})
    uses = [block for block in message.content if block.type == "tool_use"]
    if uses:
        results = [{"type": "tool_result", "tool_use_id": use.id, "content": result()} for use in uses]
        messages.append({"role": "user", "content": results})
        assert message.stop_reason == "tool_use"
    text = "".join(block.text for block in message.content if block.type == "text")
    return Heard(message.id.removeprefix("msg_"), text, [dict(use.input) for use in uses])


def responses_turn(
    client: openai.OpenAI, items: list[Any], *, streams: bool, result: Callable[[], str] = a_plant, **more: Any
) -> Heard:
    asked: dict[str, Any] = {
        "model": "gpt",
        "input": items,
        "tools": RESPONSES_TOOLS,
        "instructions": "Solve it.",
        **more,
    }
    if streams:
        with client.responses.stream(**asked) as stream:
            response = stream.get_final_response()
    else:
        response = client.responses.create(**asked)
    items += [item.model_dump(exclude_none=True) for item in response.output]
    calls = [item for item in response.output if item.type == "function_call"]
    items += [{"type": "function_call_output", "call_id": call.call_id, "output": result()} for call in calls]
    arguments = [json.loads(call.arguments) for call in calls]
    return Heard(response.id.removeprefix("resp_"), response.output_text, arguments)


KINDS: dict[str, Any] = {
    "chat": (openai_of, chat_turn),
    "messages": (anthropic_of, anthropic_turn),
    "responses": (openai_of, responses_turn),
}
"""Dialect -> how its client is made, and how it takes a turn."""
