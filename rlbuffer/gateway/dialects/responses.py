"""OpenAI's Responses, without what a server would have to keep for it: the whole input comes with each request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rlbuffer.gateway.dialects.base import (
    Body,
    Dialect,
    Told,
    chat_messages_checked,
    free_choice,
    function_tools,
    openai_error,
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
    required,
    text,
)

TEXTS = ("input_text", "output_text", "text", "refusal")


def parse(body: Body, is_free: bool = False) -> AgentRequest:
    """Reads a request. Raises Refused."""
    if body.get("previous_response_id") or body.get("conversation"):
        raise Refused(
            "previous_response_id is not taken: send the whole input with each request", code="unsupported_parameter"
        )
    if flag(body.get("background"), "background"):
        raise Refused("background is not taken: wait for the answer", code="unsupported_parameter")
    refused_fields(body, ("top_logprobs", "prompt"))
    form = mapping(mapping(body.get("text") or {}, "text").get("format") or {}, "text.format")
    if form.get("type") not in (None, "text"):
        refuse_forced("text.format", is_free)
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else listed(given, "input")
    messages: list[Message] = []
    if instructions := text(body.get("instructions"), "instructions"):
        messages.append({"role": "system", "content": instructions})
    for i, item in enumerate(items):
        _add(messages, mapping(item, f"input[{i}]"), f"input[{i}]")
    tools = function_tools(body.get("tools"), "tools", _function)
    may_call = free_choice(body.get("tool_choice"), is_free)
    effort = text(mapping(body.get("reasoning") or {}, "reasoning").get("effort"), "reasoning.effort")
    return AgentRequest(
        messages=chat_messages_checked(messages),
        tools=tools if may_call else (),
        max_tokens=count(body.get("max_output_tokens"), "max_output_tokens"),
        template={"reasoning_effort": effort} if effort else {},
        model=text(body.get("model"), "model"),
        is_streamed=flag(body.get("stream"), "stream"),
        takes_one_call=body.get("parallel_tool_calls") is False,
    )


def _function(tool: Body) -> Body | None:
    return tool if tool.get("type") == "function" else None


def _add(messages: list[Message], item: Body, where: str) -> None:
    """One item of the input; those of one answer are one message."""
    kind = item.get("type") or "message"
    if kind == "reasoning":
        return
    if kind == "function_call_output":
        output = joined_text(item.get("output"), where, TEXTS)
        messages.append({"role": "tool", "tool_call_id": text(item.get("call_id"), where), "content": output})
        return
    if kind == "function_call":
        call = tool_call(item.get("call_id"), item.get("name"), item.get("arguments"), where)
        before = _answer_before(messages)
        messages.append({**before, "tool_calls": [*before.get("tool_calls", ()), call]})
        return
    required(kind == "message", f"{where}.type must be message, function_call, function_call_output or reasoning")
    role, content = item.get("role"), joined_text(item.get("content"), where, TEXTS)
    if role == "assistant":
        before = _answer_before(messages)
        messages.append({**before, "content": before["content"] + content})
        return
    required(role in ("user", "system", "developer"), f"{where}.role must be user, system, developer or assistant")
    messages.append({"role": "user" if role == "user" else "system", "content": content})


def _answer_before(messages: list[Message]) -> Message:
    """The assistant's message that an item belongs to, taken off the end; an empty one where none is there."""
    if messages and messages[-1]["role"] == "assistant":
        return messages.pop()
    return {"role": "assistant", "content": ""}


def answer(told: Told) -> dict[str, Any]:
    """A response."""
    is_cut = told.finish_reason == "length"
    return {
        **_head(told),
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": _items(told),
        "usage": {
            "input_tokens": told.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": told.answer_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": told.prompt_tokens + told.answer_tokens,
        },
    }


def _head(told: Told) -> dict[str, Any]:
    return {
        "id": f"resp_{told.id}",
        "object": "response",
        "created_at": told.created,
        "model": told.model,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "output": [],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "temperature": None,
        "top_p": None,
        "usage": None,
    }


def _items(told: Told) -> list[dict[str, Any]]:
    items = list[dict[str, Any]]()
    if thought := told.message.get("reasoning_content"):
        content = [{"type": "reasoning_text", "text": thought}]
        items.append({"type": "reasoning", "id": f"rs_{told.id}", "summary": [], "content": content})
    calls = told.message.get("tool_calls") or ()
    if told.message["content"] or not calls:
        part = {"type": "output_text", "text": told.message["content"], "annotations": []}
        done = {"role": "assistant", "status": "completed", "content": [part]}
        items.append({"type": "message", "id": f"msg_{told.id}", **done})
    for i, call in enumerate(calls):
        function = {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
        fields = {"id": f"fc_{told.id}_{i}", "call_id": call["id"], "status": "completed"}
        items.append({"type": "function_call", **fields, **function})
    return items


def events(told: Told, request: AgentRequest) -> Iterator[tuple[str, Any]]:
    """Its events, numbered: each item begins, is said at once, and ends."""
    for number, (name, data) in enumerate(_events(told)):
        yield name, {"type": name, "sequence_number": number, **data}


def _events(told: Told) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "response.created", {"response": _head(told)}
    yield "response.in_progress", {"response": _head(told)}
    for i, item in enumerate(_items(told)):
        at = {"output_index": i, "item_id": item["id"]}
        empty: dict[str, Any] = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        bare = {**item, **empty}
        yield "response.output_item.added", {"output_index": i, "item": {**bare, "status": "in_progress"}}
        if item["type"] == "function_call":
            yield "response.function_call_arguments.delta", {**at, "delta": item["arguments"]}
            done = {"arguments": item["arguments"], "name": item["name"]}
            yield "response.function_call_arguments.done", {**at, **done}
        elif item["type"] == "message":
            (part,) = item["content"]
            at |= {"content_index": 0}
            yield "response.content_part.added", {**at, "part": {**part, "text": ""}}
            yield "response.output_text.delta", {**at, "delta": part["text"], "logprobs": []}
            yield "response.output_text.done", {**at, "text": part["text"], "logprobs": []}
            yield "response.content_part.done", {**at, "part": part}
        else:
            (part,) = item["content"]
            at |= {"content_index": 0}
            yield "response.reasoning_text.delta", {**at, "delta": part["text"]}
            yield "response.reasoning_text.done", {**at, "text": part["text"]}
        yield "response.output_item.done", {"output_index": i, "item": item}
    whole = answer(told)
    yield f"response.{whole['status']}", {"response": whole}


RESPONSES = Dialect(
    name="Responses",
    parse=parse,
    answer=answer,
    events=events,
    error=openai_error,
    error_event="error",
    ping=b": waiting\n\n",
)
