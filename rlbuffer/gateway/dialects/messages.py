"""Anthropic's Messages."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

from rlbuffer.gateway.dialects.base import (
    Body,
    Dialect,
    Told,
    chat_messages_checked,
    free_choice,
    function_tools,
    refuse_forced,
    refused_fields,
    tool_call,
)
from rlbuffer.gateway.request import (
    AgentRequest,
    Message,
    Refused,
    count,
    flag,
    joined_text,
    listed,
    mapping,
    parsed_arguments,
    renderable,
    required,
    stops,
    text,
)

BILLING = re.compile(r"x-anthropic-billing-header:[^\n]*\n?")
"""First line of Claude Code's system prompt, another one in each request; Anthropic's own servers take it away, too."""
THOUGHTS = ("thinking", "redacted_thinking")
"""Blocks of an answer that a later request brings back, and that decide nothing: the tokens are on the server."""
ERROR_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
}


def parse(body: Body, is_free: bool = False) -> AgentRequest:
    """Reads a request. Raises Refused."""
    refused_fields(body, ("mcp_servers", "container"))
    for name, form in (
        ("output_format", body.get("output_format")),
        ("output_config.format", mapping(body.get("output_config") or {}, "output_config").get("format")),
    ):
        if form:
            refuse_forced(name, is_free)
    choice = mapping(body.get("tool_choice") or {"type": "auto"}, "tool_choice")
    may_call = free_choice(choice.get("type"), is_free)
    messages: list[Message] = []
    system = joined_text(body.get("system"), "system", ("text",))
    if system := system[found.end() :] if (found := BILLING.match(system)) else system:
        messages.append({"role": "system", "content": system})
    for i, message in enumerate(listed(body.get("messages"), "messages")):
        messages += _messages(mapping(message, f"messages[{i}]"), f"messages[{i}]")
    tools = function_tools(body.get("tools"), "tools", _function)
    return AgentRequest(
        messages=chat_messages_checked(messages),
        tools=tools if may_call else (),
        max_tokens=count(body.get("max_tokens"), "max_tokens"),
        stop=stops(body.get("stop_sequences"), "stop_sequences"),
        model=text(body.get("model"), "model"),
        is_streamed=flag(body.get("stream"), "stream"),
        takes_one_call=flag(choice.get("disable_parallel_tool_use"), "tool_choice.disable_parallel_tool_use"),
    )


def _function(tool: Body) -> Body | None:
    if tool.get("type") not in (None, "custom"):
        return None
    return {**{n: tool.get(n) for n in ("name", "description")}, "parameters": tool.get("input_schema")}


def _messages(message: Body, where: str) -> list[Message]:
    """One message of theirs: results of tools are messages of their own, in the order of the blocks."""
    role, content = message.get("role"), message.get("content")
    required(role in ("user", "assistant", "system"), f"{where}.role must be user or assistant")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else listed(content, f"{where}.content")
    found, texts, calls = list[Message](), list[str](), list[Message]()

    def flush() -> None:
        if texts:
            found.append({"role": role, "content": "\n".join(texts)})
            texts.clear()

    for block in blocks:
        kind = mapping(block, where).get("type")
        if kind == "text":
            texts.append(text(block.get("text"), where))
        elif kind == "tool_result" and role == "user":
            flush()
            result = joined_text(block.get("content"), where, ("text",))
            found.append({"role": "tool", "tool_call_id": text(block.get("tool_use_id"), where), "content": result})
        elif kind == "tool_use" and role == "assistant":
            calls.append(tool_call(block.get("id"), block.get("name"), block.get("input"), where))
        elif kind not in THOUGHTS or role != "assistant":
            joined_text([block], where, ())  # refuses it
    if role != "assistant":
        flush()
        return found
    return [{"role": "assistant", "content": "".join(texts), **({"tool_calls": calls} if calls else {})}]


def answer(told: Told) -> dict[str, Any]:
    """A message."""
    usage = {"input_tokens": told.prompt_tokens, "output_tokens": told.answer_tokens}
    return {
        "id": f"msg_{told.id}",
        "type": "message",
        "role": "assistant",
        "model": told.model,
        "content": _blocks(told),
        "stop_reason": _reason(told),
        "stop_sequence": told.stopped_by or None,
        "usage": usage,
    }


def events(told: Told, request: AgentRequest) -> Iterator[tuple[str, Any]]:
    """Its events: each block begins, is said at once, and ends."""
    whole = answer(told)
    begun = {**whole, "content": [], "stop_reason": None, "stop_sequence": None}
    yield _event("message_start", message={**begun, "usage": {**whole["usage"], "output_tokens": 0}})
    for i, block in enumerate(whole["content"]):
        bare, deltas = _parts(block)
        yield _event("content_block_start", index=i, content_block=bare)
        for delta in deltas:
            yield _event("content_block_delta", index=i, delta=delta)
        yield _event("content_block_stop", index=i)
    delta = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
    yield _event("message_delta", delta=delta, usage=whole["usage"])
    yield _event("message_stop")


def _event(name: str, **data: Any) -> tuple[str, Any]:
    return name, {"type": name, **data}


def _blocks(told: Told) -> list[dict[str, Any]]:
    blocks = list[dict[str, Any]]()
    if thought := told.message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": thought, "signature": told.id})
    if content := told.message["content"]:
        blocks.append({"type": "text", "text": content})
    for call in told.message.get("tool_calls") or ():
        name, arguments = call["function"]["name"], parsed_arguments(call)
        blocks.append({"type": "tool_use", "id": call["id"], "name": name, "input": arguments})
    return blocks


def _parts(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A block as it begins, and what is added to it."""
    if block["type"] == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    if block["type"] == "tool_use":
        return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]
    return {**block, "thinking": "", "signature": ""}, [
        {"type": "thinking_delta", "thinking": block["thinking"]},
        {"type": "signature_delta", "signature": block["signature"]},
    ]


def _reason(told: Told) -> str:
    if told.finish_reason == "length":
        return "max_tokens"
    if told.stopped_by:
        return "stop_sequence"
    return "tool_use" if told.message.get("tool_calls") else "end_turn"


def error(refused: Refused) -> dict[str, Any]:
    """Anthropic's form of an error."""
    is_ours = refused.status >= HTTPStatus.INTERNAL_SERVER_ERROR
    kind = ERROR_TYPES.get(HTTPStatus(refused.status), "api_error" if is_ours else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": refused.message}}


MESSAGES = Dialect(
    name="Messages",
    parse=parse,
    answer=answer,
    events=events,
    error=error,
    error_event="error",
    ping=b'event: ping\ndata: {"type": "ping"}\n\n',
    returned=renderable,
)
