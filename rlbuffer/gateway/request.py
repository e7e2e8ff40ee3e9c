"""What an agent asks, in one form whatever its dialect is: that of chat completions, without what decides nothing.

Only what stands in an :class:`AgentRequest` reaches an engine. How tokens are drawn is the run's: an agent's own
temperature would be another policy than the one that trains.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from rlbuffer.state.text import did_you_mean, printable

MOST_LEVELS = 128
"""Levels of a value of JSON."""
_TOO_DEEP = f"it has more than {MOST_LEVELS} levels"
_HALF = re.compile(r"\\u[dD][89a-fA-F]")
"""The escape of a surrogate."""
MOST_SHOWN = 64
"""Characters of a field's name that a refusal quotes."""
Message = Mapping[str, Any]
"""``role`` and ``content``; of an assistant also ``tool_calls``, of a tool ``tool_call_id``."""


class Refused(Exception):
    """A request is not answered. The message is one sentence, which quotes nothing that an agent wrote but a field.

    `status` is HTTP's, `code` what clients know a reason by, `retry_seconds` when the same request may pass (0: it will
    not).
    """

    def __init__(
        self, message: str, *, status: int = HTTPStatus.BAD_REQUEST, code: str = "", retry_seconds: float = 0.0
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.code, self.retry_seconds = message, int(status), code, retry_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRequest:
    """One request for one answer."""

    messages: tuple[Message, ...]
    """The conversation, system messages included; the last one is not the assistant's."""
    tools: tuple[Message, ...] = ()
    """Functions that the model may call, as chat completions name them."""
    max_tokens: int | None = None
    """Longest answer in tokens; None: the agent does not say."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer, and are no part of it."""
    template: Mapping[str, Any] = field(default_factory=dict)
    """What changes the rendering alone: ``chat_template_kwargs``, ``reasoning_effort``."""
    model: str = ""
    """The model that the agent names."""
    is_streamed: bool = False
    """It wants events."""
    wants_usage: bool = False
    """Of a stream of chat completions: the last event counts tokens."""
    takes_one_call: bool = False
    """An answer may have one tool call at most."""

    def body(self) -> dict[str, Any]:
        """The body of a request that renders it."""
        return {
            "messages": [renderable(message) for message in self.messages],
            **({"tools": [dict(tool) for tool in self.tools]} if self.tools else {}),
            **self.template,
        }


def whole_text(given: str) -> str:
    """The text as UTF-8 can hold it: half of a surrogate pair, which only an escape of JSON brings, is replaced."""
    try:
        given.encode()
    except UnicodeEncodeError:
        return given.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return given


def loaded(given: str) -> Any:
    """The value of a text of JSON, which can be sent on: its texts are whole, its numbers finite, its levels few.

    Raises:
        ValueError: it is none. The message quotes nothing of it.
    """
    try:
        found = json.loads(given, parse_constant=_no_number, parse_float=_finite)
        if _HALF.search(given):
            found = json.loads(whole_text(json.dumps(found, ensure_ascii=False)))
    except json.JSONDecodeError as error:
        raise ValueError(f"it is no JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    level, levels = [found], 0
    while level := [part for part in level if isinstance(part, dict | list)]:
        levels += 1
        if levels > MOST_LEVELS:
            raise ValueError(_TOO_DEEP)
        level = [part for whole in level for part in (whole.values() if isinstance(whole, dict) else whole)]
    return found


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def _finite(digits: str) -> float:
    if not math.isfinite(number := float(digits)):
        raise ValueError("a number is larger than any double")
    return number


def parsed_arguments(call: Message) -> dict[str, Any]:
    """The arguments of a call as an object; what the model wrote is under ``raw`` where it is none."""
    written = call["function"]["arguments"]
    try:
        found = loaded(written or "{}")
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"raw": written}


def renderable(message: Message) -> dict[str, Any]:
    """The message whose calls all have an object for arguments, as templates and some dialects want it."""
    if not message.get("tool_calls"):
        return dict(message)
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(parsed_arguments(call), ensure_ascii=False)}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def required(condition: object, message: str) -> None:
    """Raises Refused unless the condition holds."""
    if not condition:
        raise Refused(message, code="invalid_value")


def mapping(value: object, name: str) -> Mapping[str, Any]:
    """`value`, which is an object. Raises Refused."""
    if not isinstance(value, Mapping):
        raise Refused(f"{name} must be an object", code="invalid_type")
    return value


def fields_of(value: object, name: str, fields: Sequence[str]) -> Mapping[str, Any]:
    """`value`, which is an object of the gateway's own: it has no other fields than these. Raises Refused.

    Clients of OpenAI and Anthropic send more than is read here, so what they send is not held to this. Whoever writes a
    harness mistypes a name, and would hear of it nowhere else.
    """
    found = mapping(value, name)
    other = next((field for field in found if field not in fields), None)
    if other is not None:
        shown = printable(other[:MOST_SHOWN])
        listing = f" Its fields are {', '.join(fields)}." if fields else " It has no fields."
        raise Refused(f"{shown} is no field of {name}.{did_you_mean(shown, fields)}{listing}", code="unknown_parameter")
    return found


def listed(value: object, name: str) -> list[Any]:
    """`value`, which is a list. Raises Refused."""
    if not isinstance(value, list):
        raise Refused(f"{name} must be a list", code="invalid_type")
    return value


def text(value: object, name: str) -> str:
    """`value`, which is a string; "" for none. Raises Refused."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise Refused(f"{name} must be a string", code="invalid_type")
    return value


def flag(value: object, name: str) -> bool:
    """`value`, which is true or false; False for none. Raises Refused."""
    if value is not None and not isinstance(value, bool):
        raise Refused(f"{name} must be true or false", code="invalid_type")
    return bool(value)


def count(value: object, name: str) -> int | None:
    """`value`, which is a whole number from 1 on; None for none. Raises Refused."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise Refused(f"{name} must be a whole number from 1 on", code="invalid_value")
    return value


def stops(value: object, name: str) -> tuple[str, ...]:
    """Texts that end an answer: one, a list, or none. Raises Refused."""
    given = [value] if isinstance(value, str) else [] if value is None else listed(value, name)
    return tuple(found for one in given if (found := text(one, name)))


def joined_text(content: object, name: str, texts: tuple[str, ...], joint: str = "\n") -> str:
    """The text of a message's content: a string, or parts of the types `texts`.

    Raises:
        Refused: a part is something else, as an image.
    """
    if content is None or isinstance(content, str):
        return content or ""
    found = []
    for part in listed(content, name):
        if isinstance(part, str):
            found.append(part)
            continue
        if mapping(part, name).get("type") not in texts:
            raise Refused(
                f"{name} has a part that is no text: the gateway takes no images, audio or files yet",
                code="unsupported_content",
            )
        found.append(text(part.get("text"), name))
    return joint.join(found)
