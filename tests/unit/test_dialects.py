"""What agents' requests become, what is refused of them, and answers in each dialect as the next request has them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rlbuffer.gateway.dialects.base import Dialect, Told
from rlbuffer.gateway.dialects.chat import CHAT
from rlbuffer.gateway.dialects.messages import MESSAGES
from rlbuffer.gateway.dialects.responses import RESPONSES
from rlbuffer.gateway.history import beginnings, following
from rlbuffer.gateway.request import AgentRequest, Refused

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION = {"name": "add", "description": "adds", "parameters": SCHEMA}
BODIES: dict[str, dict[str, Any]] = {
    CHAT.name: {
        "model": "m",
        "messages": [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "1 + 2?"}],
        "tools": [{"type": "function", "function": FUNCTION}],
        "max_tokens": 9,
    },
    MESSAGES.name: {
        "model": "m",
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "1 + 2?"}]}],
        "tools": [{"name": "add", "description": "adds", "input_schema": SCHEMA}],
        "max_tokens": 9,
    },
    RESPONSES.name: {
        "model": "m",
        "instructions": "Be brief.",
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "1 + 2?"}]}],
        "tools": [{"type": "function", **FUNCTION}],
        "max_output_tokens": 9,
    },
}
DIALECTS = [CHAT, MESSAGES, RESPONSES]
by_name = pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)


@by_name
def test_the_same_question_is_the_same_request_in_each_dialect(dialect: Dialect) -> None:
    request = dialect.parse(BODIES[dialect.name])
    assert request.messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1 + 2?"},
    )
    assert request.tools == ({"type": "function", "function": FUNCTION},)
    assert (request.max_tokens, request.model) == (9, "m")


@pytest.mark.parametrize("is_list", [True, False])
def test_a_line_of_claude_code_that_is_another_one_in_each_request_begins_no_other_conversation(is_list: bool) -> None:
    def request(line: str) -> AgentRequest:
        texts = [line, "You are Claude Code.", "Be brief."] if line else ["You are Claude Code.", "Be brief."]
        system = [{"type": "text", "text": one} for one in texts] if is_list else "\n".join(texts)
        return MESSAGES.parse({**BODIES[MESSAGES.name], "system": system})

    lines = [f"x-anthropic-billing-header: cc_version=2.1.1; cc_entrypoint=cli; cch={word};" for word in ("3a", "f0")]
    assert request(lines[0]) == request(lines[1]) == request("")
    assert request("Of x-anthropic-billing-header: nothing.") != request("")


def told(arguments: str | None, content: str = "I add.", **more: Any) -> Told:
    message: dict[str, Any] = {"role": "assistant", "content": content, "reasoning_content": "hm"}
    if arguments is not None:
        call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}
        message["tool_calls"] = [call]
    given = {"id": "x", "finish_reason": "stop", "stopped_by": "", "created": 1, "model": "m", **more}
    return Told(message=message, prompt_tokens=5, answer_tokens=3, **given)


def next_body(dialect: Dialect, answer: dict[str, Any]) -> dict[str, Any]:
    """The request that an agent makes of an answer."""
    body = dict(BODIES[dialect.name])
    if dialect is CHAT:
        message = answer["choices"][0]["message"]
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": "3"} for call in message.get("tool_calls") or []
        ]
        body["messages"] = [*body["messages"], message, *(results or [{"role": "user", "content": "3"}])]
    elif dialect is MESSAGES:
        uses = [block for block in answer["content"] if block["type"] == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": use["id"], "content": "3"} for use in uses]
        after = {"role": "user", "content": results or "3"}
        body["messages"] = [*body["messages"], {"role": "assistant", "content": answer["content"]}, after]
    else:
        calls = [item for item in answer["output"] if item["type"] == "function_call"]
        results = [{"type": "function_call_output", "call_id": call["call_id"], "output": "3"} for call in calls]
        after = results or [{"role": "user", "content": "3"}]
        body["input"] = [*body["input"], *answer["output"], *after]
    return body


@by_name
@pytest.mark.parametrize("arguments", [None, '{"a": 1}', "{}", "", "no JSON", "[1]"])
@pytest.mark.parametrize("content", ["I add.", ""])
def test_a_request_that_brings_an_answer_back_goes_on_from_it(
    dialect: Dialect, arguments: str | None, content: str
) -> None:
    answer = told(arguments, content)
    first = dialect.parse(BODIES[dialect.name])
    recorded = following(beginnings(first)[-1], dialect.returned(answer.message))
    body = json.loads(json.dumps(next_body(dialect, dialect.answer(answer))))
    chain = beginnings(dialect.parse(body))
    assert chain[3] == recorded
    assert dialect.parse(body).messages[-1]["content"] == "3"


@by_name
@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"tool_choice": {"type": "tool", "name": "add"}}, "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "no function"),
        ({"tools": "all"}, "tools must be a list"),
        ({"stream": "yes"}, "stream must be true or false"),
    ],
)
def test_what_is_not_served_is_refused_by_its_name(dialect: Dialect, more: dict[str, Any], words: str) -> None:
    with pytest.raises(Refused, match=words):
        dialect.parse({**BODIES[dialect.name], **more})


@pytest.mark.parametrize(
    ("dialect", "more"),
    [
        (CHAT, {"n": 2}),
        (CHAT, {"logprobs": True}),
        (CHAT, {"response_format": {"type": "json_object"}}),
        (CHAT, {"logit_bias": {"5": 3}}),
        (CHAT, {"tool_choice": "required"}),
        (CHAT, {"guided_json": {}, "structured_outputs": {"json": {}}}),
        (CHAT, {"max_tokens": 0}),
        (CHAT, {"max_completion_tokens": -3}),
        (CHAT, {"messages": []}),
        (CHAT, {"messages": None}),
        (CHAT, {"messages": ["hello"]}),
        (CHAT, {"messages": [{"role": "assistant", "content": "I"}]}),
        (CHAT, {"messages": [{"role": "robot", "content": "I"}]}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]}),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}),
        (MESSAGES, {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "{"}]}),
        (MESSAGES, {"tool_choice": {"type": "any"}}),
        (MESSAGES, {"output_format": {"type": "json_schema"}}),
        (RESPONSES, {"previous_response_id": "resp_1"}),
        (RESPONSES, {"text": {"format": {"type": "json_schema"}}}),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]}),
        (RESPONSES, {"background": True}),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_with_one_sentence(dialect: Dialect, more: dict[str, Any]) -> None:
    with pytest.raises(Refused) as caught:
        dialect.parse({**BODIES[dialect.name], **more})
    assert caught.value.status == 400
    assert caught.value.message
    assert "\n" not in caught.value.message
    assert caught.value.message in json.dumps(dialect.error(caught.value), ensure_ascii=False).replace('\\"', '"')


FORCED: list[tuple[Dialect, dict[str, Any]]] = [
    (CHAT, {"tool_choice": "required"}),
    (CHAT, {"tool_choice": {"type": "function", "function": {"name": "add"}}}),
    (CHAT, {"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}),
    (CHAT, {"response_format": {"type": "json_object"}}),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}),
    (MESSAGES, {"tool_choice": {"type": "any"}}),
    (MESSAGES, {"tool_choice": {"type": "tool", "name": "add"}}),
    (MESSAGES, {"output_format": {"type": "json_schema", "schema": SCHEMA}}),
    (MESSAGES, {"output_config": {"effort": "high", "format": {"type": "json_schema", "schema": SCHEMA}}}),
    (RESPONSES, {"tool_choice": "required"}),
    (RESPONSES, {"tool_choice": {"type": "function", "name": "add"}}),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}, "verbosity": "low"}}),
]


@pytest.mark.parametrize(("dialect", "more"), FORCED)
def test_what_an_agent_forces_is_refused_or_left_to_the_model(dialect: Dialect, more: dict[str, Any]) -> None:
    plain = BODIES[dialect.name]
    with pytest.raises(Refused, match="forced_choices"):
        dialect.parse({**plain, **more})
    assert dialect.parse({**plain, **more}, True) == dialect.parse(plain)


@by_name
@pytest.mark.parametrize("is_free", [True, False])
def test_what_forces_nothing_is_taken(dialect: Dialect, is_free: bool) -> None:
    plain = BODIES[dialect.name]
    for more in (
        {"output_config": {"effort": "high"}},
        {"response_format": {"type": "text"}} if dialect is CHAT else {},
        {"text": {"format": {"type": "text"}, "verbosity": "low"}},
        {"tool_choice": {"type": "auto"} if dialect is MESSAGES else "auto"},
    ):
        assert dialect.parse({**plain, **more}, is_free) == dialect.parse(plain)
    none = {"type": "none"} if dialect is MESSAGES else "none"
    assert dialect.parse({**plain, "tool_choice": none}, is_free).tools == ()


@by_name
def test_fields_that_nobody_knows_and_those_that_draw_otherwise_reach_no_engine(dialect: Dialect) -> None:
    odd = {"temperature": 0, "top_p": 0.1, "top_k": 1, "seed": 3, "min_tokens": 99, "frequency_penalty": 2, "secret": 1}
    plain, strange = (dialect.parse({**BODIES[dialect.name], **more}) for more in ({}, odd))
    assert plain == strange
    assert not set(odd) & set(strange.body())


def test_an_agent_may_say_how_a_template_thinks_and_nothing_else_of_it() -> None:
    options = {"enable_thinking": False, "add_generation_prompt": False, "chat_template": "x", "tools": []}
    request = CHAT.parse({**BODIES[CHAT.name], "chat_template_kwargs": options, "reasoning_effort": "low"})
    assert request.template == {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low"}


@by_name
def test_why_an_answer_ended_is_said_in_the_words_of_its_dialect(dialect: Dialect) -> None:
    def reason(answer: Told) -> Any:
        body = dialect.answer(answer)
        if dialect is CHAT:
            return body["choices"][0]["finish_reason"]
        return body["stop_reason"] if dialect is MESSAGES else body["status"]

    expected = {
        CHAT.name: ["stop", "tool_calls", "length", "stop"],
        MESSAGES.name: ["end_turn", "tool_use", "max_tokens", "stop_sequence"],
        RESPONSES.name: ["completed", "completed", "incomplete", "completed"],
    }
    answers = [told(None), told("{}"), told(None, finish_reason="length"), told(None, stopped_by="END")]
    assert [reason(answer) for answer in answers] == expected[dialect.name]
