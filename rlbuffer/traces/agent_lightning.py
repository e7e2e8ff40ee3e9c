"""Agent Lightning 0.3: spans.

Facts: agentlightning 0.3.0 (PyPI) `adapter/triplet.py` (which spans are calls, where their ids are; one response id is
one call; calls inside a reward are not the agent's), `emitter/reward.py` (rewards; the last one is the rollout's),
`instrumentation/agentops.py` (`logprobs.content`), `verl/daemon.py` (a call goes on from the one before it).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence

from rlbuffer.traces.agent_lightning_events import Told, attempts, logprobs_of
from rlbuffer.traces.attempt import TraceAttempt
from rlbuffer.traces.calls import Call, call_of
from rlbuffer.traces.values import Value
from rlbuffer.wire.jsonl import values_of_line

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


def spans(records: Sequence[Value]) -> Iterator[TraceAttempt]:
    """An attempt per attempt id of a rollout; one that was retried has several, of which the last counts."""
    yield from attempts(records, _of_spans)


def _of_spans(found: Sequence[Value]) -> Told:
    ordered = sorted(found, key=lambda span: [span.get(n).number_or(0.0) for n in ("sequence_id", "start_time")])
    within = _rewarding(found)
    calls, seen, rewards = list[Call](), set[str](), dict[str, float]()
    reward: float | None = None
    for span in ordered:
        told = span["attributes"]
        dimensions = _rewards(told)
        if dimensions:
            rewards, reward = dict(dimensions), dimensions[0][1]
        prompt, answer = _literal(told, PROMPTS), _literal(told, ANSWERS)
        if not CALL_NAME.search(span["name"].text()) or prompt.value is None or answer.value is None:
            continue
        if isinstance(answer.value, list) and answer.value and isinstance(answer.value[0], list):
            answer = next(iter(answer))
        response = told.first(*RESPONSE_IDS).text()
        if span["span_id"].text() in within or (response and response in seen) or not answer.listed():
            continue
        seen.add(response)
        content = _literal(told, ("logprobs.content",))
        if content.value is None:
            choices = _literal(told, ("llm.hosted_vllm.choices",)).listed()
            content = choices[0].get("logprobs") if choices else content
        calls.append(call_of(prompt, answer, logprobs_of(content)))
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
    rewards = list[tuple[str, float]]()
    for number, part in sorted(parts.items()):
        value = told[f"agentlightning.reward.{number}.value"].number()
        # A first one without a name is what `emit_reward(1.0)` means, which calls it so itself.
        rewards.append((part["name"].text() if "name" in part else _unnamed(number), value))
    return rewards


def _unnamed(number: int) -> str:
    return "primary" if number == 0 else f"reward_{number}"


def _literal(told: Value, names: Iterable[str]) -> Value:
    """The first of these attributes; a list may be there as its own text, of JSON or of Python."""
    found = told.first(*names)
    if not isinstance(found.value, str):
        return found
    if not found.value.strip():
        return Value(None, found.place, found.path)
    for parse in (values_of_line, ast.literal_eval):
        try:
            return Value(parse(found.value), found.place, found.path)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):  # all of them, of text
            continue
    raise found.wrong("neither a list nor the text of one")
