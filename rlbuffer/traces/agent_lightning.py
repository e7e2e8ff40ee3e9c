"""Agent Lightning: the spans of 0.3, the events of 1.0, and the triplets that both make of them.

Facts: agentlightning 0.3.0 (PyPI) `adapter/triplet.py` (which spans are calls, where their ids are; one response id is
one call; calls inside a reward are not the agent's), `emitter/reward.py` (rewards; the last one is the rollout's),
`instrumentation/agentops.py` (`logprobs.content`), `verl/daemon.py` (a call goes on from the one before it).
microsoft/agent-lightning @c632d8dd `server/routes/events.py` (of requests with one prompt the last counts),
`verl/agl_rollout_manager.py` (failed requests are left out), `verl/rollout_adapter.py` (the same merging).
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from rlbuffer.traces.attempt import Attempt, Failure
from rlbuffer.traces.calls import Call, call_of, line, sequences_of
from rlbuffer.traces.values import Value

CALL_NAME = re.compile(r"openai\.chat\.completion|raw_gen_ai_request|litellm_request")
PROMPTS = ("prompt_token_ids", "agentlightning.operation.output.prompt_token_ids", "llm.hosted_vllm.prompt_token_ids")
ANSWERS = (
    "response_token_ids",
    "agentlightning.operation.output.response_token_ids.0",
    "agentlightning.operation.output.choices.0.token_ids",
    "agentlightning.operation.output.choices.0.provider_specific_fields.token_ids",
    "llm.hosted_vllm.response_token_ids",
)
RESPONSE_IDS = ("gen_ai.response.id", "agentlightning.operation.output.id", "llm.hosted_vllm.id")
REWARD = re.compile(r"agentlightning\.reward\.(\d+)\.(name|value)")
Told = tuple[list[Call], dict[str, float], float | None]
"""Calls in order, named rewards, and the reward."""


def spans(records: Sequence[Value]) -> Iterator[Attempt]:
    """An attempt per attempt id; a retried rollout has several, of which the last counts."""
    yield from _attempts(records, _of_spans)


def events(records: Sequence[Value]) -> Iterator[Attempt]:
    """The same of events."""
    yield from _attempts(records, _of_events)


def triplets(records: Sequence[Value]) -> Iterator[Attempt]:
    """An attempt per completed rollout."""
    for record in records:
        calls = [_of_triplet(one) for one in record["triplets"] if one["response"].get("token_ids").listed()]
        final = record.get("final_reward")
        told = (calls, dict[str, float](), None if final.value is None else final.number())
        yield _attempt(record, record["rollout_id"].text(), told, record.get("data_id").text())


def _of_triplet(one: Value) -> Call:
    prompt, response = one["prompt"], one["response"]
    logprobs = response.first("log_probs", "logprobs")
    return call_of(prompt["token_ids"], response["token_ids"], _logprobs(logprobs))


def _attempts(records: Sequence[Value], told: Callable[[Sequence[Value]], Told]) -> Iterator[Attempt]:
    rollouts: dict[str, dict[str, list[Value]]] = {}
    for record in records:
        tries = rollouts.setdefault(record["rollout_id"].text(), {})
        tries.setdefault(record["attempt_id"].text(), []).append(record)
    for rollout, tries in rollouts.items():
        *earlier, last = tries.items()
        for name, found in earlier:
            failed = Failure("retried", f"attempt {name} was made again")
            yield Attempt(at=found[0], group=rollout, prompt=rollout, failure=failed)
        yield _attempt(last[1][0], rollout, told(last[1]), "")


def _attempt(at: Value, rollout: str, told: Told, data_id: str) -> Attempt:
    calls, rewards, reward = told
    return Attempt(
        at=at,
        group=data_id,
        prompt=data_id,
        sequences=sequences_of(line(calls)),
        reward=reward,
        rewards=rewards,
        failure=None if calls else Failure("empty", "no call has token ids"),
        metadata={"rollout": rollout},
    )


def _of_spans(found: Sequence[Value]) -> Told:
    ordered = sorted(found, key=lambda span: (span.get("sequence_id").value or 0, span.get("start_time").value or 0.0))
    within = _rewarding(found)
    calls, seen, rewards, reward = list[Call](), set[str](), dict[str, float](), None
    for span in ordered:
        told = span["attributes"]
        dimensions = _rewards(told)
        if dimensions:
            rewards, reward = dict(dimensions), dimensions[0][1]
        prompt, answer = _literal(told, PROMPTS), _literal(told, ANSWERS)
        if not CALL_NAME.search(span["name"].text()) or prompt.value is None or answer.value is None:
            continue
        if answer.value and isinstance(answer.value[0], list):
            answer = next(iter(answer))
        response = told.first(*RESPONSE_IDS).text()
        if span["span_id"].text() in within or (response and response in seen) or not answer.listed():
            continue
        seen.add(response)
        content = _literal(told, ("logprobs.content",))
        if content.value is None:
            choices = _literal(told, ("llm.hosted_vllm.choices",)).listed()
            content = choices[0].get("logprobs") if choices else content
        calls.append(call_of(prompt, answer, _logprobs(content)))
    return calls, rewards, reward


def _rewarding(found: Sequence[Value]) -> set[str]:
    """Spans inside of one that gives a reward: a judge's calls are not the policy's."""
    above = {span["span_id"].text(): span.get("parent_id").text() for span in found}
    rewarding = {span["span_id"].text() for span in found if _rewards(span["attributes"])}

    def is_inside(span: str) -> bool:
        seen = set[str]()
        while (span := above.get(span, "")) and span not in seen:
            if span in rewarding:
                return True
            seen.add(span)
        return False

    return {span for span in above if is_inside(span)}


def _rewards(told: Value) -> list[tuple[str, float]]:
    """Names and values of a reward, the primary one first; of 0.2 the only one."""
    parts: dict[int, dict[str, Value]] = {}
    for name in told.mapping:
        match = REWARD.fullmatch(name)
        if match:
            parts.setdefault(int(match.group(1)), {})[match.group(2)] = told[name]
    if not parts:
        old = told.get("reward")
        return [] if old.value is None else [("primary", old.number())]
    return [(part["name"].text(), part["value"].number()) for _, part in sorted(parts.items())]


def _literal(told: Value, names: Iterable[str]) -> Value:
    """The first of these attributes; a list may be there as its own text, of JSON or of Python."""
    found = told.first(*names)
    if not isinstance(found.value, str):
        return found
    for parse in (json.loads, ast.literal_eval):
        try:
            return Value(parse(found.value), found.place, found.path)
        except (ValueError, SyntaxError):
            continue
    raise found.wrong("neither a list nor the text of one")


def _logprobs(value: Value) -> Value:
    """A list of numbers, from OpenAI's shape of logprobs or as it is."""
    if value.value is None:
        raise value.wrong("no logprobs: the proxy must ask its server for them")
    if isinstance(value.value, dict):
        value = value.first("content", "token_logprobs")
    numbers: list[Any] = [item["logprob"].value if isinstance(item.value, dict) else item.value for item in value]
    return Value(numbers, value.place, value.path)


def _of_events(found: Sequence[Value]) -> Told:
    requests: dict[bytes, Call] = {}
    reward: float | None = None
    for event in found:
        kind, data = event["event_type"].text(), event["data"]
        if kind == "reward" and data.get("value").value is not None:
            reward = data["value"].number()
        if kind != "model_request":
            continue
        call = _request(data)
        if call is not None:
            requests.pop(call.prompt.tobytes(), None)
            requests[call.prompt.tobytes()] = call
    return list(requests.values()), {}, reward


def _request(data: Value) -> Call | None:
    """The call of a request that was answered; None: it failed, or sampled nothing."""
    status = data.get("http_status").value
    if data.get("status").value == "error" or (isinstance(status, int) and status >= 400):
        return None
    server, response = data.get("server"), data.get("response")
    version = data.get("model_version") if server.value is None else server.get("version")
    number = version.integer() if version.value is not None else None
    if response.value is None:  # already trimmed to a triplet
        answer = data.get("response_token_ids")
        if not answer.listed():
            return None
        return call_of(data["prompt_token_ids"], answer, _logprobs(data.get("response_log_probs")), version=number)
    choices = response.get("choices").listed()
    if not choices or not choices[0].get("token_ids").listed():
        return None
    choice = choices[0]
    prompt = response if response.get("prompt_token_ids").value is not None else choice
    return call_of(prompt["prompt_token_ids"], choice["token_ids"], _logprobs(choice.get("logprobs")), version=number)
