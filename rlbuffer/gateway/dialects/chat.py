"""OpenAI's chat completions."""

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
    one_answer,
    openai_error,
    refuse_forced,
    refused_fields,
    tool_call,
)
from rlbuffer.gateway.request import (
    AgentRequest,
    Message,
    count,
    flag,
    joined_text,
    listed,
    mapping,
    required,
    stops,
    text,
)

CONSTRAINING = ("logit_bias", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
"""Fields that change what may be drawn."""
TEMPLATE_OPTIONS = ("enable_thinking", "thinking", "preserve_thinking", "clear_thinking")
"""Options of templates that an agent may set: true or false."""
TEXTS = ("text", "refusal")


def parse(body: Body, is_free: bool = False) -> AgentRequest:
    """Reads a request. Raises Refused."""
    one_answer(body)
    refused_fields(body, (*CONSTRAINING, "functions", "function_call"))
    form = body.get("response_format")
    if form is not None and mapping(form, "response_format").get("type") not in (None, "text"):
        refuse_forced("response_format", is_free)
    given = listed(body.get("messages"), "messages")
    messages = [_message(mapping(m, f"messages[{i}]"), f"messages[{i}]") for i, m in enumerate(given)]
    tools = function_tools(body.get("tools"), "tools", _function)
    may_call = free_choice(body.get("tool_choice"), is_free)
    options = mapping(body.get("chat_template_kwargs") or {}, "chat_template_kwargs")
    template = {name: flag(value, name) for name, value in options.items() if name in TEMPLATE_OPTIONS}
    effort = text(body.get("reasoning_effort"), "reasoning_effort")
    options = mapping(body.get("stream_options") or {}, "stream_options")
    most = body.get("max_completion_tokens")
    return AgentRequest(
        messages=chat_messages_checked(messages),
        tools=tools if may_call else (),
        max_tokens=count(body.get("max_tokens") if most is None else most, "max_tokens"),
        stop=stops(body.get("stop"), "stop"),
        template={
            **({"chat_template_kwargs": template} if template else {}),
            **({"reasoning_effort": effort} if effort else {}),
        },
        model=text(body.get("model"), "model"),
        is_streamed=flag(body.get("stream"), "stream"),
        wants_usage=flag(options.get("include_usage"), "stream_options.include_usage"),
        takes_one_call=body.get("parallel_tool_calls") is False,
    )


def _function(tool: Body) -> Body | None:
    return mapping(tool.get("function"), "tools.function") if tool.get("type") == "function" else None


def _message(message: Body, where: str) -> Message:
    role = message.get("role")
    if role in ("system", "developer"):
        return {"role": "system", "content": joined_text(message.get("content"), where, TEXTS)}
    if role == "user":
        name = text(message.get("name"), f"{where}.name")
        content = joined_text(message.get("content"), where, TEXTS)
        return {"role": "user", "content": content, **({"name": name} if name else {})}
    if role == "tool":
        content = joined_text(message.get("content"), where, TEXTS)
        return {"role": "tool", "tool_call_id": text(message.get("tool_call_id"), where), "content": content}
    required(role == "assistant", f"{where}.role must be system, developer, user, assistant or tool")
    found: dict[str, Any] = {"role": "assistant", "content": joined_text(message.get("content"), where, TEXTS)}
    calls = []
    for call in listed(message.get("tool_calls") or [], f"{where}.tool_calls"):
        function = mapping(mapping(call, where).get("function"), f"{where}.tool_calls")
        calls.append(tool_call(call.get("id"), function.get("name"), function.get("arguments"), where))
    return {**found, **({"tool_calls": calls} if calls else {})}


def answer(told: Told) -> dict[str, Any]:
    """A chat completion."""
    choice = {"index": 0, "message": _shown(told), "finish_reason": _reason(told), "logprobs": None}
    return {**_head(told), "object": "chat.completion", "choices": [choice], "usage": _usage(told)}


def events(told: Told, request: AgentRequest) -> Iterator[tuple[str, Any]]:
    """Its chunks: all that was said, why it ended, and what it cost where the agent asks for it."""
    head = {**_head(told), "object": "chat.completion.chunk"}
    delta = _shown(told)
    if "tool_calls" in delta:
        delta["tool_calls"] = [{**call, "index": i} for i, call in enumerate(delta["tool_calls"])]
    for message, reason in ((delta, None), ({}, _reason(told))):
        yield "", {**head, "choices": [{"index": 0, "delta": message, "finish_reason": reason, "logprobs": None}]}
    if request.wants_usage:
        yield "", {**head, "choices": [], "usage": _usage(told)}
    yield "", "[DONE]"


def _head(told: Told) -> dict[str, Any]:
    return {"id": f"chatcmpl-{told.id}", "created": told.created, "model": told.model}


def _shown(told: Told) -> dict[str, Any]:
    message = dict(told.message)
    if message.get("tool_calls") and not message["content"]:
        message["content"] = None
    return message


def _reason(told: Told) -> str:
    return "tool_calls" if told.message.get("tool_calls") and told.finish_reason == "stop" else told.finish_reason


def _usage(told: Told) -> dict[str, int]:
    both = told.prompt_tokens + told.answer_tokens
    return {"prompt_tokens": told.prompt_tokens, "completion_tokens": told.answer_tokens, "total_tokens": both}


CHAT = Dialect(
    name="chat completions",
    parse=parse,
    answer=answer,
    events=events,
    error=openai_error,
    error_event="",
    ping=b": waiting\n\n",
)
