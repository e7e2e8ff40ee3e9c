"""Harbor: a trial's result with `rollout_details`, and ATIF trajectories with token ids.

Facts: harbor 0.26.0 (on PyPI) `models/agent/rollout_detail.py` (per segment, per turn: full prompt ids, completion
ids, logprobs; the first segment is the main agent), `models/trial/result.py` (task, rewards by name, `exception_info`;
the verifier also runs where a limit ended the agent), `models/trajectories/` (ATIF 1.8: a step's metrics have the ids;
`is_copied_context` steps must not train again; `llm_call_count` above 1 means metrics of several calls; subagents are
embedded). NVIDIA-NeMo/Gym @07d6b0d07 `responses_api_agents/harbor_agent/utils.py` trains the completion ids of every
agent step that has them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from rlbuffer.records.failure import Failure
from rlbuffer.traces.attempt import Stretch, TraceAttempt, as_far_as_read
from rlbuffer.traces.calls import Call, call_of, line, sequences_of
from rlbuffer.traces.values import Value

LIMIT = re.compile(r"Agent(Execution)?Timeout|(Context|Output)Length|Max\w*(Turns|Tokens|Steps|Episodes|Iterations)")
"""Exceptions by which the agent came to a limit; a verifier may have looked at what was done by then."""
ABSENT = Failure("no_tokens", "the agent needs collect_rollout_details = true")


def trials(records: Sequence[Value]) -> Iterator[TraceAttempt]:
    """An attempt per trial."""
    for record in records:
        results = [record, *record.get("step_results").listed()]
        errors = [result["exception_info"] for result in results if result.get("exception_info").value is not None]
        kinds = [error["exception_type"].text() for error in errors]
        rewards = {name: one.number() for name, one in record.get("verifier_result").get("rewards").items()}
        segments = [one for result in results for one in result.get("agent_result").get("rollout_details").listed()]
        failure = None
        if errors:
            failure = Failure(kinds[0], errors[0].get("exception_message").text())
        elif not segments:
            failure = ABSENT
        yield TraceAttempt(
            at=record,
            group=record["task_name"].text(),
            prompt=record["task_name"].text(),
            env=record.get("source").text(),
            sequences=as_far_as_read(failure, partial(_of_segments, segments)),
            rewards=rewards,
            failure=failure,
            at_limit=bool(errors and rewards) and all(LIMIT.match(kind) for kind in kinds),
            metadata={"trial": record.get("trial_name").text()},
        )


def _of_segments(segments: Sequence[Value]) -> Sequence[Stretch]:
    return sequences_of([path for one in segments for path in line(_turns(one))])


def _turns(segment: Value) -> list[Call]:
    prompts, answers, logprobs = (
        segment[name].listed() for name in ("prompt_token_ids", "completion_token_ids", "logprobs")
    )
    if not len(prompts) == len(answers) == len(logprobs):
        counts = f"{len(prompts)} prompts, {len(answers)} completions and {len(logprobs)} lists of logprobs"
        raise segment.wrong(f"{counts}: a turn needs one of each")
    return [call_of(*turn) for turn in zip(prompts, answers, logprobs, strict=True)]


def trajectories(records: Sequence[Value]) -> Iterator[TraceAttempt]:
    """An attempt: documents of one `session_id` belong together, as a trajectory and its continuation."""
    first = records[0]
    run, name = run_of(first) or f"{first.place}#0", first["agent"].get("name").text()
    sequences = tuple(sequence for record in records for sequence in _sequences(record))
    yield TraceAttempt(
        at=first,
        group=run,
        prompt=_task(first),
        env=name,
        sequences=sequences,
        failure=None if sequences else ABSENT,
        metadata={"session": run, "agent": name},
    )


def run_of(record: Value) -> str | None:
    """The run that a trajectory belongs to."""
    return record.get("session_id").text() or None


def _task(document: Value) -> str:
    """The first thing that a user says."""
    for step in document["steps"]:
        if step["source"].text() == "user" and isinstance(step.get("message").value, str):
            return step["message"].text()
    return ""


def _sequences(document: Value) -> list[Stretch]:
    """The trajectory's own sequences, then those of its subagents, each named."""
    calls, role = list[Call](), "user"
    for step in document["steps"]:
        metrics = step.get("metrics")
        if step["source"].text() != "agent":
            role = step["source"].text()
        elif metrics.get("completion_token_ids").value is not None:
            count = step.get("llm_call_count")
            if count.value is not None and count.integer() > 1:
                raise count.wrong(f"{count.value} calls in one step cannot be told apart")
            if not step.get("is_copied_context").flag():
                ids = (metrics[name] for name in ("prompt_token_ids", "completion_token_ids", "logprobs"))
                calls.append(call_of(*ids, role=role))
            role = "user" if step.get("observation").value is None else "tool"
    out = list(sequences_of(line(calls)))
    for child in document.get("subagent_trajectories").listed():
        name = child.get("trajectory_id").text()
        out += [replace(sequence, name=sequence.name or name) for sequence in _sequences(child)]
    return out
