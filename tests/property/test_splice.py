"""Drawn conversations over the templates of five families: what an engine is asked next begins with exactly what it saw
and sampled before, and reads as the whole conversation; or a new sequence begins."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from chat_templates import FAMILIES, Family, decoded, encoded
from hypothesis import given, settings
from hypothesis import strategies as st

from rlbuffer.gateway.history import answers_in, beginnings, following
from rlbuffer.gateway.request import AgentRequest
from rlbuffer.gateway.splice import check_template, spliced

TOOLS = [
    {"type": "function", "function": {"name": "look_up", "description": "", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}},
]
TEXTS = st.text(st.sampled_from("aeir tn.,\n{}\"'<>|éß0 "), min_size=1, max_size=30) | st.sampled_from(
    ["the answer is a tree", "\n\n", "<|im_end|>", "user", "a<|user|>b", "</think>"]
)
ANSWERS = st.text(st.sampled_from("aeir tn.,éß0"), max_size=20)


@st.composite
def calls(draw: st.DrawFn, most: int) -> list[dict[str, Any]]:
    made = []
    for number in range(draw(st.integers(0, most))):
        arguments = json.dumps(draw(st.dictionaries(st.sampled_from(["word", "x"]), ANSWERS, max_size=2)))
        name = draw(st.sampled_from(["look_up", "add"]))
        made.append({"id": f"call{number}", "type": "function", "function": {"name": name, "arguments": arguments}})
    return made


@st.composite
def conversations(draw: st.DrawFn, family: Family) -> tuple[list[dict[str, Any]], list[tuple[dict[str, Any], Any]]]:
    """How it begins, and each answer with what follows."""
    start = [{"role": "system", "content": draw(TEXTS)}] if draw(st.booleans()) else []
    start.append({"role": "user", "content": draw(TEXTS)})
    turns = []
    for _ in range(draw(st.integers(1, 4))):
        made = draw(calls(family.calls_at_once))
        content = draw(ANSWERS) if not made else draw(st.sampled_from(["", "I look"]))
        answer: dict[str, Any] = {"role": "assistant", "content": content}
        new: list[dict[str, Any]] = []
        if made:
            answer["tool_calls"] = made
            new += [{"role": "tool", "tool_call_id": call["id"], "content": draw(TEXTS)} for call in made]
        if not made or draw(st.booleans()):
            new.append({"role": "user", "content": draw(TEXTS)})
        turns.append((answer, new))
    return start, turns


def bare(text: str) -> str:
    """Without thoughts, which some templates show in the last turns alone."""
    return re.sub(r"<think>.*?</think>(\n\n)?", "", text, flags=re.S)


def played(
    family: Family, start: list[dict[str, Any]], turns: list[Any], tools: list[Any], thought: str
) -> list[tuple[bool, str, str]]:
    """Whether each later prompt goes on from the one before; its text; the whole conversation's."""

    async def render(request: AgentRequest, opens: bool) -> np.ndarray:
        return encoded(family.text(request.messages, request.tools, opens))

    async def play() -> list[tuple[bool, str, str]]:
        messages, known, seen = list(start), dict[str, tuple[np.ndarray, int]](), []
        prompt = await render(AgentRequest(messages=tuple(messages), tools=tuple(tools)), True)
        for answer, new in turns:
            end = encoded(family.end(answer))
            sampled = np.concatenate([encoded(family.written(answer, thought), dropout=0.3), end])
            before = beginnings(AgentRequest(messages=tuple(messages), tools=tuple(tools)))[-1]
            known[following(before, answer)] = np.concatenate([prompt, sampled]), int(end[0])
            # The agent sends the answer back with other ids, blanks and order of arguments.
            back = dict(answer, content=f" {answer['content']}\n", reasoning_content="")
            messages += [_changed(back), *new]
            request = AgentRequest(messages=tuple(messages), tools=tuple(tools))
            chain = beginnings(request)
            at = next(j for j in answers_in(messages) if chain[j] in known)
            kept, last = known[chain[at]]
            found = await spliced(render, request, at, last)
            whole = await render(request, True)
            prompt = whole if found is None else np.concatenate([kept, found])
            shown = [_as_given(message) for message in messages]
            seen.append((found is not None, decoded(prompt), family.text(shown, tools, True)))
        return seen

    return asyncio.run(play())


def _changed(message: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(message)
    if "tool_calls" in out:
        out["tool_calls"] = [
            {"id": f"other{i}", "type": "function", "function": dict(reversed(list(call["function"].items())))}
            for i, call in enumerate(out["tool_calls"])
        ]
    return out


def _as_given(message: Mapping[str, Any]) -> dict[str, Any]:
    return dict(message, content=message["content"][1:-1]) if message["role"] == "assistant" else dict(message)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_prompt_that_goes_on_reads_as_the_whole_conversation(family: Family, data: st.DataObject) -> None:
    start, turns = data.draw(conversations(family))
    tools = TOOLS if any("tool_calls" in answer for answer, _ in turns) or data.draw(st.booleans()) else []
    thought = data.draw(st.sampled_from(["", "a tree is a plant"]))
    has_begun_anew = False
    for (goes_on, text, whole), (answer, _) in zip(played(family, start, turns, tools, thought), turns, strict=True):
        assert goes_on == family.splices(answer)
        has_begun_anew |= not goes_on
        if not family.keeps_thoughts:
            text, whole = bare(text), bare(whole)
        if has_begun_anew:  # what was rendered whole has the blanks of the answers as the agent sent them
            text, whole = "".join(text.split()), "".join(whole.split())
        assert text == whole


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_the_check_at_start_tells_whether_a_family_can_be_gone_on_from(family: Family) -> None:
    async def render(request: AgentRequest, opens: bool) -> np.ndarray:
        return encoded(family.text(request.messages, request.tools, opens))

    found = asyncio.run(check_template(render))
    # <|return|> of gpt-oss is shown as <|end|> once it is not the last: turns after a final answer are rendered whole.
    assert found.is_append_only


def shown_by_mistral(messages: Any, tools: Any, opens: bool) -> str:
    """Tools stand before the last question, so each question moves them."""
    asked = max(i for i, message in enumerate(messages) if message["role"] == "user")
    out = []
    for i, message in enumerate(messages):
        if i == asked and tools:
            out.append(json.dumps(tools))
        end = "<|end|>" if message["role"] == "assistant" else ""
        out.append(f"<|start|>{message['role']}<|message|>{message.get('content') or ''}{end}")
    return "".join(out)


def shown_in_reverse(messages: Any, tools: Any, opens: bool) -> str:
    return "".join(f"<|start|>{message['content']}<|end|>" for message in reversed(messages))


def shown_with_a_count(messages: Any, tools: Any, opens: bool) -> str:
    return "".join(f"<|start|>{i} {message.get('content')}<|end|>" for i, message in enumerate(messages))


@pytest.mark.parametrize("shown", [shown_by_mistral, shown_in_reverse, shown_with_a_count])
def test_the_check_at_start_finds_templates_that_show_earlier_messages_otherwise(shown: Any) -> None:
    async def render(request: AgentRequest, opens: bool) -> np.ndarray:
        return encoded(shown(request.messages, request.tools, opens))

    found = asyncio.run(check_template(render))
    assert not found.is_append_only
    assert found.why


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("last", ["<|endoftext|>", "<|constrain|>", "a"])
def test_an_answer_that_ended_in_no_way_of_its_template_is_not_gone_on_from(family: Family, last: str) -> None:
    async def render(request: AgentRequest, opens: bool) -> np.ndarray:
        return encoded(family.text(request.messages, request.tools, opens))

    messages = (
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "the tree is."},
        {"role": "user", "content": "a"},
    )
    assert asyncio.run(spliced(render, AgentRequest(messages=messages), 2, int(encoded(last)[0]))) is None


def test_a_role_that_the_answers_stop_token_does_not_open_begins_a_new_sequence() -> None:
    (family,) = (family for family in FAMILIES if family.name == "glm")

    async def render(request: AgentRequest, opens: bool) -> np.ndarray:
        return encoded(family.text(request.messages, request.tools, opens))

    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    messages = (
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "1"},
    )
    asked = AgentRequest(messages=messages)
    assert asyncio.run(spliced(render, asked, 2, int(encoded("<|user|>")[0]))) is None
    assert asyncio.run(spliced(render, asked, 2, int(encoded("<|observation|>")[0]))) is not None
