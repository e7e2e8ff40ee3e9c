"""The parts of a dialect, and what several dialects have in common."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Protocol

from rlbuffer.gateway.request import AgentRequest, Message, Refused, flag, listed, mapping, required, text

Body = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """An answer as it is recorded, to be told to an agent in its dialect."""

    id: str
    """The gateway's own."""
    message: Message
    """``content``, ``tool_calls``, ``reasoning_content``."""
    finish_reason: str
    """``stop`` or ``length``."""
    stopped_by: str
    """The stop text that ended it."""
    prompt_tokens: int
    answer_tokens: int
    created: int
    """Unix seconds."""
    model: str
    """The model that the agent had named."""


class Parse(Protocol):
    """Reads a request."""

    def __call__(self, body: Body, is_free: bool = False) -> AgentRequest:
        """Raises Refused.

        Args:
            body: a JSON object.
            is_free: what the agent forces is left to the model, and not refused.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One API that agents speak."""

    name: str
    parse: Parse
    answer: Callable[[Told], dict[str, Any]]
    """The body of an answer."""
    events: Callable[[Told, AgentRequest], Iterator[tuple[str, Any]]]
    """The answer as events: their names ("" for none), and data that becomes JSON, or is text already."""
    error: Callable[[Refused], dict[str, Any]]
    """The body of a refusal."""
    error_event: str
    """Name of the event of a refusal in a stream that has begun."""
    ping: bytes
    """What is sent while an answer is awaited."""
    returned: Callable[[Message], Message] = lambda message: message
    """The message of an answer as the agent's next request has it."""


def refused_fields(body: Body, names: Sequence[str]) -> None:
    """Raises Refused for a field that would have tokens drawn from another distribution than the trainer's."""
    for name in names:
        if body.get(name):
            raise Refused(
                f"{name} is not taken: it would have tokens drawn from another distribution than the one that trains",
                code="unsupported_parameter",
            )


def chat_messages_checked(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages of a conversation that an answer follows. Raises Refused."""
    required(messages, "messages is empty: there is nothing to answer")
    required(
        messages[-1]["role"] != "assistant",
        "the last message is the assistant's: the gateway continues no answer that was begun elsewhere",
    )
    return tuple(messages)


def function_tools(tools: object, name: str, described: Callable[[Body], Body | None]) -> tuple[Message, ...]:
    """Tools as chat completions have them. `described` takes a tool's function out of it; None: it is no function.

    Raises:
        Refused: one is no function, or has no name.
    """
    found = []
    for i, tool in enumerate(listed(tools or [], name)):
        function = described(mapping(tool, name))
        if function is None:
            raise Refused(f"{name}[{i}] is no function: the gateway runs no tools", code="unsupported_parameter")
        required(text(function.get("name"), f"{name}.name"), f"{name} has a function without a name")
        kept: dict[str, Any] = {"name": function["name"]}
        if description := text(function.get("description"), f"{name}.description"):
            kept["description"] = description
        parameters = function.get("parameters")
        kept["parameters"] = dict(mapping(parameters, f"{name}.parameters")) if parameters else {"type": "object"}
        found.append({"type": "function", "function": kept})
    return tuple(found)


def free_choice(choice: object, is_free: bool) -> bool:
    """Whether tools may be called at all; the model decides whether it does.

    Args:
        choice: the agent's.
        is_free: one that forces a call counts as auto.

    Raises:
        Refused: the agent wants a call, or a certain one, which only constrained sampling gives.
    """
    if choice == "none":
        return False
    if choice is not None and choice != "auto":
        refuse_forced("tool_choice", is_free)
    return True


def refuse_forced(name: str, is_free: bool) -> None:
    """Raises Refused for a field that only constrained sampling can serve, unless it is left to the model."""
    if not is_free:
        raise Refused(
            f"{name} forces what the model writes: it would have tokens drawn from another distribution than the one "
            'that trains. gateway.forced_choices = "auto" leaves it to the model',
            code="unsupported_parameter",
        )


def tool_call(call_id: object, name: object, arguments: object, where: str) -> Message:
    """A call of an assistant's message. Raises Refused."""
    if not isinstance(arguments, str):
        arguments = json.dumps({} if arguments is None else arguments, ensure_ascii=False)
    required(text(name, f"{where}.name"), f"{where} has a call without a name")
    function = {"name": name, "arguments": arguments}
    return {"id": text(call_id, f"{where}.id"), "type": "function", "function": function}


def openai_error(refused: Refused) -> dict[str, Any]:
    """OpenAI's form of an error."""
    kind = "invalid_request_error" if refused.status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
    return {"error": {"message": refused.message, "type": kind, "param": None, "code": refused.code or None}}


def one_answer(body: Body) -> None:
    """Raises Refused where several answers, or their logprobs, are asked for."""
    required(body.get("n") in (None, 1), "n must be 1: ask as many times as you want answers")
    if flag(body.get("logprobs"), "logprobs") or body.get("top_logprobs"):
        raise Refused("logprobs is not taken: the gateway keeps them for training", code="unsupported_parameter")
