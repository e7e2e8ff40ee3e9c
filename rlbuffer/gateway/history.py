"""Which earlier answer a request goes on from, known by digests of its messages.

Every beginning of a conversation has a digest, which includes the one before it. An answer is recorded under the digest
of the conversation that ends in it, and a request looks its own beginnings up, the longest first. What harnesses change
from turn to turn does not count: an assistant's message is its text and its calls, whatever ids, blanks, reasoning or
order of fields it has; tool ids count nowhere. No match begins a new sequence and is no error.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

from rlbuffer.gateway.request import AgentRequest, Message, loaded


def digest(*parts: Any) -> str:
    """Digest of JSON values, 32 hexadecimal digits; the order of an object's fields does not count."""
    data = json.dumps(parts, sort_keys=True, separators=(",", ":")).encode("utf-8", "surrogatepass")
    return hashlib.sha256(data).hexdigest()[:32]


def counted(message: Message) -> Any:
    """The part of a message that counts."""
    if message["role"] != "assistant":
        return [message["role"], message.get("content") or "", message.get("name") or ""]
    calls = [_call(call) for call in message.get("tool_calls") or ()]
    return ["assistant", (message.get("content") or "").strip(), calls]


def beginnings(request: AgentRequest) -> list[str]:
    """Digests of the conversation's beginnings: number j has the first j messages. [messages + 1]."""
    found = [digest([dict(tool) for tool in request.tools], dict(request.template))]
    for message in request.messages:
        found.append(following(found[-1], message))
    return found


def following(beginning: str, message: Message) -> str:
    """Digest of a beginning and one message more."""
    return digest(beginning, counted(message))


def answers_in(messages: Iterable[Message]) -> list[int]:
    """How many messages there are up to each of the assistant's, the last one first: where a request may go on."""
    return [j for j, message in enumerate(messages, 1) if message["role"] == "assistant"][::-1]


def request_digest(request: AgentRequest, beginning: str) -> str:
    """Digest by which a repeated request is known; `beginning` is that of its whole conversation.

    Whether it wants events does not count: its answer is the same.
    """
    return digest(beginning, request.max_tokens, list(request.stop), request.takes_one_call)


def _call(call: Message) -> Any:
    function = call.get("function") or {}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = loaded(arguments or "{}")
        except ValueError:  # the model wrote what is no JSON: it counts as the text that it is
            arguments = arguments.strip()
    return [function.get("name"), arguments]
