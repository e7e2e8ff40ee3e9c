"""OpenEnv's training traces: an agent's calls with the engine's own tokens, and which of them are trained.

Facts: openenv 0.10.0 `core/harness/training.py` (`TrainingTrace` v1, no further field allowed; the mask covers prompt
and completion), `core/harness/capture/graph.py` (a call goes on from the call whose prompt and answer are the longest
beginning of its prompt; a path per leaf is one training sequence), `capture/contract.py` (auxiliary calls and retries
are left out already), `harbor/contract.py` (`export_training_contract`: the same calls with reward and task).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rlbuffer.records.failure import Failure
from rlbuffer.traces.attempt import TraceAttempt
from rlbuffer.traces.calls import Call, call_of, sequences_of, tree
from rlbuffer.traces.values import Value

VERSION = 1
"""Of the schema that is read."""


def traces(records: Sequence[Value]) -> Iterator[TraceAttempt]:
    """An attempt per trace. Beside the trace's own fields a record may have what its session's `verify` gave: reward,
    rewards, task_id."""
    for record in records:
        if record.get("schema_version").value not in (None, VERSION):
            raise record["schema_version"].wrong(f"only version {VERSION} is known")
        entries = record.first("trace_entries", "turns")
        calls = [call for call in map(_call, entries.listed()) if len(call.tokens)]
        last = entries.listed()[-1:]
        prompt = record.first("task_id", "task_name").text()
        reward = record.get("reward")
        yield TraceAttempt(
            at=record,
            group=prompt,
            prompt=prompt,
            env=record.get("dataset").text(),
            sequences=sequences_of(tree(calls)),
            reward=None if reward.value is None else reward.number(),
            rewards={name: value.number() for name, value in record.get("rewards").items()},
            finish_reason=_finish(last[0]) if last else "",
            failure=_failure(record, calls),
            metadata={"trial": record.first("trial_name", "session_id").text()},
        )


def _call(turn: Value) -> Call:
    messages = turn.get("request").get("messages").listed()
    return call_of(
        turn["prompt_token_ids"],
        turn["completion_token_ids"],
        turn["per_token_logps"],
        turn["loss_mask"],
        temperature=_temperature(turn),
        role=(messages[-1].get("role").text() if messages else "") or "user",
    )


def _temperature(turn: Value) -> float:
    """What the engine was given; its logprobs are those of the sampled distribution (`processed_logprobs`)."""
    return turn.get("metadata").get("sampling_params").get("temperature").number_or(1.0)


def _finish(turn: Value) -> str:
    choices = turn.get("response").get("choices").listed()
    return choices[0].get("finish_reason").text() if choices else ""


def _failure(record: Value, calls: Sequence[Call]) -> Failure | None:
    if record.get("rollout_type").value == "eval":
        return Failure("eval", "a rollout of an evaluation has no tokens to train")
    return None if any(call.mask.any() for call in calls) else Failure("empty", "no call is trained")
