"""Which requests count as going on from an answer, and which as the same one again."""

from __future__ import annotations

from typing import Any

import pytest

from rlbuffer.gateway.history import answers_in, beginnings, following, request_digest
from rlbuffer.gateway.request import AgentRequest

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
QUESTION = {"role": "user", "content": "1 + 2?"}
ANSWER: dict[str, Any] = {"role": "assistant", "content": "I add.", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "3"}


def last(*messages: dict[str, Any], **more: Any) -> str:
    return beginnings(AgentRequest(messages=messages, **more))[-1]


def test_each_beginning_has_the_digest_of_a_conversation_that_ends_there() -> None:
    whole = beginnings(AgentRequest(messages=(QUESTION, ANSWER, RESULT)))
    assert whole[1] == last(QUESTION)
    assert whole[2] == following(last(QUESTION), ANSWER)
    assert answers_in((QUESTION, ANSWER, RESULT, ANSWER, QUESTION)) == [4, 2]


@pytest.mark.parametrize(
    "again",
    [
        {**ANSWER, "content": "\n I add.  "},
        {**ANSWER, "reasoning_content": "hm"},
        {**ANSWER, "refusal": None, "annotations": []},
        {**ANSWER, "tool_calls": [{**CALL, "id": "other"}]},
        {**ANSWER, "tool_calls": [{**CALL, "function": {"name": "add", "arguments": '{"b":2,"a":1}'}}]},
    ],
)
def test_an_answer_that_comes_back_in_another_form_is_the_same_answer(again: dict[str, Any]) -> None:
    assert last(QUESTION, again, RESULT) == last(QUESTION, ANSWER, RESULT)
    assert last(QUESTION, ANSWER, {**RESULT, "tool_call_id": "x"}) == last(QUESTION, ANSWER, RESULT)


@pytest.mark.parametrize(
    "other",
    [
        {**ANSWER, "content": "I add!"},
        {**ANSWER, "tool_calls": []},
        {**ANSWER, "tool_calls": [CALL, CALL]},
        {**ANSWER, "tool_calls": [{**CALL, "function": {"name": "add", "arguments": '{"a": 1, "b": 3}'}}]},
        {**ANSWER, "tool_calls": [{**CALL, "function": {"name": "add", "arguments": "no JSON"}}]},
    ],
)
def test_an_answer_that_says_something_else_is_another_one(other: dict[str, Any]) -> None:
    assert last(QUESTION, other) != last(QUESTION, ANSWER)


def test_what_is_before_the_first_message_counts() -> None:
    tool = {"type": "function", "function": {"name": "add"}}
    seen = {
        last(QUESTION),
        last({"role": "system", "content": ""}, QUESTION),
        last(QUESTION, tools=(tool,)),
        last(QUESTION, template={"reasoning_effort": "low"}),
        last({**QUESTION, "content": "1 + 2? "}),
    }
    assert len(seen) == 5


def test_a_request_is_known_again_unless_what_it_asks_for_changes() -> None:
    def known(**more: Any) -> str:
        request = AgentRequest(messages=(QUESTION,), **more)
        return request_digest(request, beginnings(request)[-1])

    assert known(is_streamed=True, wants_usage=True, model="gpt-5") == known()
    assert len({known(), known(max_tokens=7), known(stop=("a",)), known(takes_one_call=True)}) == 4
