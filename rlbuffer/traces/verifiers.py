"""verifiers' traces and episodes, also as prime-rl writes them (``traces.jsonl``).

Facts: verifiers 0.4.0 `v1/trace.py`, `v1/graph.py`, `v1/episode.py` (a trace is a graph of messages, each with the ids
that it adds; a branch per leaf; a leaf that is a compaction attempt trains only where a later message has it as parent
of type "compaction"; what was sampled before one trains; `to_record` rounds logprobs to 4 decimals).
PrimeIntellect-ai/prime-rl @559b44772 `orchestrator/trajectories.py` (a sampled message that branches share trains in
the first), `orchestrator/algo/base.py` (failed traces and those of agents that are not trainable are left out),
`monitors/file.py` (an episode per line).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rlbuffer.records.failure import Failure
from rlbuffer.traces.attempt import TraceAttempt, as_far_as_read
from rlbuffer.traces.values import Value
from rlbuffer.traces.verifiers_messages import Records, Told, sequences_of

LIMITS = frozenset(("max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens", "compaction_failed"))
"""Conditions that end a trace without its own will."""
ROUNDED = "logprobs are as the file has them; verifiers rounds them to 4 decimals in its records"


def episodes(records: Sequence[Value]) -> Iterator[TraceAttempt]:
    """An attempt per trainable agent of an episode: what one agent did is a rollout."""
    for record in records:
        if record.get("traces").value is None:
            yield attempt(record)
            continue
        work, outer = record.get("run").get("work"), dict[str, Any]()
        outer["group"] = record.get("group").get("id").text()
        outer["env"] = record.get("env").first("name", "id").text()
        policy = work.get("policy")
        if policy.value is not None:
            outer["version"] = policy["start"].integer()
            outer["metadata"] = {"step": work.get("step").value, "policy": [outer["version"], policy["end"].integer()]}
        traces = record["traces"].listed()
        if not traces:
            failure = _failure(record) or Failure("empty", "the episode has no trace")
            yield TraceAttempt(at=record, group=outer["group"], prompt=_task(record), env=outer["env"], failure=failure)
        for trace in traces:
            if trace.get("agent").get("trainable").value is not False:
                yield attempt(trace, **outer)


def attempt(
    trace: Value,
    *,
    group: str = "",
    env: str = "",
    version: int | None = None,
    metadata: dict[str, Any] | None = None,
    told: Told | None = None,
    records: Records | None = None,
) -> TraceAttempt:
    """What one trace is; `told` says which policy version sampled a message, and what its sampling left, where somebody
    knows it exactly, and `records` which experts took it in."""
    if version is None and trace.get("policy_version").value is not None:
        version = trace["policy_version"].integer()
    prompt, failure, rewards, weighted = _task(trace), _failure(trace), dict[str, float](), 0.0
    for name, reward in trace.get("rewards").items():
        if reward.value is None:
            failure = failure or Failure("unscored", f"{name} was not scored")
            continue
        is_plain = isinstance(reward.value, int | float)
        rewards[name] = reward.number() if is_plain else reward["score"].number()
        weighted += rewards[name] * (1.0 if is_plain else reward.get("weight").number_or(1.0))
    sequences = as_far_as_read(failure, lambda: sequences_of(trace, version, told, records))
    if not failure and not sequences:
        failure = Failure("empty", _nothing(trace))
    answered = [call for call in trace.get("calls").listed() if call.get("error").value is None]
    stop = trace.get("stop_condition").text()
    metrics = {name: value.number() for name, value in trace.get("metrics").items() if value.value is not None}
    return TraceAttempt(
        at=trace,
        group=group or trace.get("group_id").text() or prompt,
        prompt=prompt,
        env=env or trace.get("env_name").text(),
        sequences=sequences,
        reward=trace.get("reward").number_or(weighted),
        rewards=rewards,
        finish_reason=answered[-1].get("finish_reason").text() if answered else "",
        is_truncated=stop in LIMITS or trace.get("is_truncated").flag(),
        failure=failure,
        metadata={"trace": trace.get("id").text(), "stop": stop, "metrics": metrics, **(metadata or {})},
    )


def _nothing(trace: Value) -> str:
    """Why nothing of a trace is trained."""
    if any(node["mask"].flags().any() for node in trace["nodes"].listed()):
        return "only a compaction was sampled, which nothing goes on from"
    return "nothing was sampled, or without token ids"


def _task(record: Value) -> str:
    """Key of a task: its own, else the hash of its data, else its number or its prompt."""
    task = record.get("task")
    if task.value is None:
        return record.get("id").text()
    data = task.get("data") if task.get("data").value is not None else task
    found = task.first("key", "hash").text() or data.first("id", "name", "idx").text()
    prompt = data.get("prompt")
    return found or (prompt.text() if isinstance(prompt.value, str) else "")


def _failure(record: Value) -> Failure | None:
    errors = record.get("errors").listed()
    ok = record.get("ok")
    if ok.flag() if ok.value is not None else not errors:
        return None
    if errors:
        return Failure(errors[-1]["type"].text(), errors[-1].get("message").text())
    return Failure(record.get("stop_condition").text() or "failed", "no reason given")
