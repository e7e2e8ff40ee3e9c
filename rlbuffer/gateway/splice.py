"""The tokens of new messages behind an answer, without a template of our own.

The engine renders a short conversation twice, at once, whose answer is a stand-in: alone, and with the new messages
behind it. What the second has behind the stand-in's turn is what the whole conversation has behind the real answer. The
prompt is then exactly what the engine saw and sampled before, and those tokens: no text is encoded a second time.

Where the stand-in's turn ends is told by the token that ended the real answer:

- ``<|im_end|>``, ``<|eot_id|>``: it ends turns. The new tokens are those behind as many of them as the stand-in alone
  has. What is before them may differ, since some templates show an answer otherwise once it is not the last.
- ``<|user|>`` (GLM): no token ends a turn; the one that opens the next role stops the answer. The second rendering goes
  on from the first one, and that token is not doubled.

Anything else has no splice, and the conversation is rendered whole, as a new sequence.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlbuffer.errors import RequestFailed
from rlbuffer.gateway.request import AgentRequest, Message

Tokens = NDArray[np.int32]
Render = Callable[[AgentRequest, bool], Awaitable[Tokens]]
"""Renders a request; True: with the beginning of the answer behind it."""

QUESTION: Message = {
    "role": "user",
    "content": "This is a place for what was said before, in somewhat more words than an answer's frame has.",
}
"""Begins the stand-in; longer than FRAME_TOKENS, so that a token which opens it is not found behind the answer."""
FRAME_TOKENS = 8
"""Tokens at the end of a rendering in which the one that ends a turn is looked for."""


def stand_in(message: Message) -> tuple[Message, Message]:
    """A conversation of one answer, without its reasoning, which some templates show in the last turn alone."""
    kept = {name: message[name] for name in ("role", "content", "tool_calls") if message.get(name)}
    return QUESTION, {"content": "", **kept}


def behind(alone: Tokens, both: Tokens, last: int) -> Tokens | None:
    """The tokens of new messages; None: there is no splice.

    Args:
        alone: [A] int32, the stand-in.
        both: [B] int32, the stand-in and the new messages.
        last: the token that ended the real answer.
    """
    if last in alone[-FRAME_TOKENS:]:
        ends = np.flatnonzero(both == last)
        turns = int((alone == last).sum())
        return both[ends[turns - 1] + 1 :] if len(ends) >= turns else None
    opens = len(both) > len(alone) and int(both[len(alone)]) == last
    return both[len(alone) + 1 :] if opens and np.array_equal(both[: len(alone)], alone) else None


async def spliced(render: Render, request: AgentRequest, answers: int, last: int) -> Tokens | None:
    """The tokens behind the first `answers` messages of a request, the last of which ended with the token `last`.

    None: there is no splice, or the template refuses the stand-in.
    """
    start, new = stand_in(request.messages[answers - 1]), request.messages[answers:]
    asked = render(_with(request, start), False), render(_with(request, (*start, *new)), True)
    outcomes = await asyncio.gather(*asked, return_exceptions=True)  # neither is still at work when it is left
    try:
        alone, both = map(_rendered, outcomes)
    except RequestFailed:  # whether it refuses the whole conversation, too, tells its rendering
        return None
    return behind(alone, both, last)


def _rendered(outcome: Tokens | BaseException) -> Tokens:
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


# -- self-check ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Template:
    """What the self-check found."""

    is_append_only: bool
    """Answers can be gone on from."""
    why: str = ""
    """What hinders it, as a clause."""
    takes_tools: bool = True
    """It took a conversation with tools: one with tools can be gone on from, too."""

    def goes_on(self, request: AgentRequest) -> bool:
        """Whether an answer in this conversation can be gone on from."""
        has_tools = bool(request.tools) or any(message.get("tool_calls") for message in request.messages)
        return self.is_append_only and (self.takes_tools or not has_tools)


_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}
_CALL_ID = "call00001"
"""Nine letters and digits: Mistral's templates refuse any other id."""
_CALL = {"id": _CALL_ID, "type": "function", "function": {"name": "look_up", "arguments": '{"word": "tree"}'}}
_TURNS: tuple[tuple[Message, ...], ...] = (
    ({"role": "system", "content": "You answer in one word."}, {"role": "user", "content": "What is a birch?"}),
    (
        {"role": "assistant", "content": "I look it up.", "tool_calls": [_CALL]},
        {"role": "tool", "tool_call_id": _CALL_ID, "content": "a tree with a white bark"},
    ),
    ({"role": "assistant", "content": "A tree."}, {"role": "user", "content": "And what is an oak, then?"}),
)
"""A made conversation: what each turn adds."""


async def shown(render: Render) -> str:
    """Digest of what a template shows of the made conversation, with and without tools, and of what it refuses."""
    found = hashlib.sha256()
    for turns, tools in ((_TURNS, (_TOOL,)), ((_TURNS[0][1:], _TURNS[2]), ())):
        messages = tuple(message for turn in turns for message in turn)
        try:
            found.update((await render(AgentRequest(messages=messages, tools=tools), True)).tobytes())
        except RequestFailed:
            found.update(b"refused")
    return found.hexdigest()


async def check_template(render: Render) -> Template:
    """Compares splices with whole renderings of a made conversation with tools, for an engine's template.

    A template that shows earlier messages otherwise once there are later ones has no splice (tools before the last
    question, as some have them); nor has one whose turns end in no way that is known here. One that refuses tools, or
    system messages, is tried without: agents that send it such are refused by it.
    """
    refusals = dict[bool, str]()
    for has_tools in (True, False):
        why = await _check_kind(render, (_TOOL,) if has_tools else (), refusals)
        if why:
            return Template(False, f"{why} ({'with' if has_tools else 'without'} tools)")
    if False in refusals:
        return Template(False, f"it refuses the conversation that it is tried with ({refusals[False]})")
    return Template(True, takes_tools=True not in refusals)


async def _check_kind(render: Render, tools: tuple[Message, ...], refusals: dict[bool, str]) -> str:
    """What is wrong with going on, with these tools; "" when nothing is. What refuses it is noted in `refusals`."""
    for has_system in (True, False):
        first = _TURNS[0] if has_system else _TURNS[0][1:]
        turns = (first, *_TURNS[1:]) if tools else (first, _TURNS[2])
        try:
            for number in range(1, len(turns)):
                if why := await _check_turn(render, turns[: number + 1], tools):
                    return why
        except RequestFailed as error:
            refusals[bool(tools)] = str(error)
            continue
        refusals.pop(bool(tools), None)
        break
    return ""


async def _check_turn(render: Render, turns: Sequence[tuple[Message, ...]], tools: Sequence[Message]) -> str:
    """What is wrong with going on to the last of these turns; "" when nothing is."""
    *earlier, (answer, *new) = turns
    before = tuple(message for turn in earlier for message in turn)
    asked = AgentRequest(messages=before, tools=tuple(tools))
    head = await render(_with(asked, turns[0]), False)
    ended = await render(_with(asked, (*before, answer)), False)
    whole = await render(_with(asked, (*before, answer, *new)), True)
    if not np.array_equal(whole[: len(head)], head):
        return "it shows the first messages otherwise once there are later ones"
    start = stand_in(answer)
    alone = await render(_with(asked, start), False)
    both = await render(_with(asked, (*start, *new)), True)
    # What may have ended the answer: a token of its frame, or the first one behind it.
    candidates = [*ended[-FRAME_TOKENS:].tolist()[::-1], *whole[len(ended) : len(ended) + 1].tolist()]
    for last in dict.fromkeys(candidates):
        found = behind(alone, both, last)
        if found is not None and len(found) < len(whole) and np.array_equal(whole[-len(found) - 1 :], [last, *found]):
            return ""
    return "what it shows behind an answer depends on what is before it, or nothing that is known here ends an answer"


def _with(request: AgentRequest, messages: tuple[Message, ...]) -> AgentRequest:
    return AgentRequest(messages=messages, tools=request.tools, template=request.template)
