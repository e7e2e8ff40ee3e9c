"""Agent Lightning 1.0: events, and triplets as 0.3 and 1.0 make them; what both versions have in common.

Facts: microsoft/agent-lightning @c632d8dd (1.0.0) `schemas.py`, `server/routes/events.py` (of requests with one prompt
the last counts), `verl/agl_rollout_manager.py` (failed requests and empty answers are left out; the last reward is the
rollout's), `verl/rollout_adapter.py` (a call goes on from the one before it, else a new sequence begins).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rlbuffer.records.failure import Failure
from rlbuffer.traces.attempt import TraceAttempt
from rlbuffer.traces.calls import Call, call_of, line, sequences_of
from rlbuffer.traces.values import Value

Told = tuple[list[Call], dict[str, float], float | None]
"""Calls in order, named rewards, and the reward."""


def events(records: Sequence[Value]) -> Iterator[TraceAttempt]:
    """An attempt per attempt id of a rollout; one that was retried has several, of which the last counts."""
    yield from attempts(records, _of_events)


def triplets(records: Sequence[Value]) -> Iterator[TraceAttempt]:
    """An attempt per completed rollout."""
    for record in records:
        calls = [_of_triplet(one) for one in record["triplets"] if one["response"].get("token_ids").listed()]
        final = record.get("final_reward")
        told = (calls, dict[str, float](), None if final.value is None else final.number())
        yield _attempt(record, record["rollout_id"].text(), told, record.get("data_id").text())


def _of_triplet(one: Value) -> Call:
    prompt, response = one["prompt"], one["response"]
    logprobs = response.first("log_probs", "logprobs")
    return call_of(prompt["token_ids"], response["token_ids"], logprobs_of(logprobs))


def attempts(records: Sequence[Value], told: Callable[[Sequence[Value]], Told]) -> Iterator[TraceAttempt]:
    """The attempts at one rollout."""
    tries: dict[str, list[Value]] = {}
    for record in records:
        tries.setdefault(record["attempt_id"].text(), []).append(record)
    rollout = rollout_of(records[0])
    *earlier, last = tries.items()
    for name, found in earlier:
        failed = Failure("retried", f"attempt {name} was made again")
        yield TraceAttempt(at=found[0], group=rollout, prompt=rollout, failure=failed)
    yield _attempt(last[1][0], rollout, told(last[1]), "")


def rollout_of(record: Value) -> str:
    """The rollout that a span or an event belongs to."""
    return record["rollout_id"].text()


def _attempt(at: Value, rollout: str, told: Told, data_id: str) -> TraceAttempt:
    calls, rewards, reward = told
    return TraceAttempt(
        at=at,
        group=data_id,
        prompt=data_id,
        sequences=sequences_of(line(calls)),
        reward=reward,
        rewards=rewards,
        failure=None if calls else Failure("empty", "no call has token ids"),
        metadata={"rollout": rollout},
    )


def _of_events(found: Sequence[Value]) -> Told:
    requests: dict[bytes, Call | None] = {}
    reward: float | None = None
    for event in found:
        kind, data = event["event_type"].text(), event["data"]
        if kind == "reward" and data.get("value").value is not None:
            reward = data["value"].number()
        if kind != "model_request":
            continue
        if _has_failed(data):
            continue
        prompt, call = _request(data)
        requests.pop(prompt, None)
        requests[prompt] = call
    return [call for call in requests.values() if call is not None], {}, reward


def _has_failed(data: Value) -> bool:
    status = data.get("http_status").value
    return data.get("status").value == "error" or (isinstance(status, int) and status >= 400)


def _request(data: Value) -> tuple[bytes, Call | None]:
    """Prompt and call of a request that was answered; None: with nothing, which counts as the last answer, too."""
    response, version = data.get("response"), data.get("server").get("version")
    version = data.get("model_version") if version.value is None else version
    number = version.integer() if version.value is not None else None
    if response.value is None:  # already trimmed to a triplet
        prompt, answer, logprobs = (
            data.get(name) for name in ("prompt_token_ids", "response_token_ids", "response_log_probs")
        )
    else:
        choice = next(iter(response.get("choices").listed()), Value(None))
        prompt = response.get("prompt_token_ids")
        prompt = choice.get("prompt_token_ids") if prompt.value is None else prompt
        answer, logprobs = choice.get("token_ids"), choice.get("logprobs")
    if not answer.listed():
        return b"" if prompt.value is None else prompt.ids().tobytes(), None
    call = call_of(prompt, answer, logprobs_of(logprobs), version=number)
    return call.prompt.tobytes(), call


def logprobs_of(value: Value) -> Value:
    """A list of numbers, from OpenAI's shape of logprobs or as it is."""
    if value.value is None:
        raise value.wrong("no logprobs: the proxy must ask its server for them")
    if isinstance(value.value, dict):
        value = value.first("content", "token_logprobs")
    numbers: list[Any] = [item["logprob"].value if isinstance(item.value, dict) else item.value for item in value]
    return Value(numbers, value.place, value.path)
