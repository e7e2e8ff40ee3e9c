"""verifiers' traces and episodes, also as prime-rl writes them (``traces.jsonl``).

Facts: verifiers 0.4.0 `v1/trace.py`, `v1/graph.py`, `v1/episode.py` (a trace is a graph of messages, each with the ids
that it adds; a branch per leaf; a leaf that is a compaction attempt trains only where a later message has it as parent
of type "compaction"; `to_record` rounds logprobs to 4 decimals). PrimeIntellect-ai/prime-rl @559b44772
`orchestrator/trajectories.py` (a sampled message that branches share trains in the first), `orchestrator/algo/base.py`
(failed traces and those of agents that are not trainable are left out), `monitors/file.py` (an episode per line).
"""

from __future__ import annotations

import binascii
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlbuffer.records.spans import Turn, VersionSpan
from rlbuffer.traces.attempt import Attempt, Failure, TokenSequence, spans_of
from rlbuffer.traces.calls import paths_of
from rlbuffer.traces.values import Value

LIMITS = frozenset(("max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens", "compaction_failed"))
"""Conditions that end a trace without its own will."""
ROUNDED = "logprobs are as the file has them; verifiers rounds them to 4 decimals in its records"

Spans = Callable[[int, NDArray[np.int32], NDArray[np.bool_]], Sequence[VersionSpan]]
"""Number, ids and mask of a message -> its version spans, from its own first token."""


def episodes(records: Sequence[Value]) -> Iterator[Attempt]:
    """An attempt per trainable agent of an episode: what one agent did is a rollout."""
    for record in records:
        if record.get("traces").value is None:
            yield attempt(record)
            continue
        group, work = record.get("group"), record.get("run")
        work = work.get("work") if work.value is not None else work
        policy = work.get("policy") if work.value is not None else work
        outer = {
            "group": group.get("id").text() if group.value is not None else "",
            "env": record.get("env").first("name", "id").text() if record.get("env").value is not None else "",
            "version": policy["start"].integer() if policy.value is not None else None,
        }
        if outer["version"] is not None:
            outer["metadata"] = {"step": work.get("step").value, "policy": [outer["version"], policy["end"].integer()]}
        traces = record["traces"].listed()
        if not traces:
            yield Attempt(
                at=record,
                group=outer["group"],
                prompt=_task(record),
                env=outer["env"],
                failure=_failure(record) or Failure("empty", "the episode has no trace"),
            )
        for trace in traces:
            agent = trace.get("agent")
            if agent.value is None or agent.get("trainable").value is not False:
                yield attempt(trace, **outer)


def attempt(
    trace: Value,
    *,
    group: str = "",
    env: str = "",
    version: int | None = None,
    metadata: dict[str, Any] | None = None,
    spans: Spans | None = None,
) -> Attempt:
    """What one trace is; `spans` says which policy version sampled a message where somebody knows it exactly."""
    if version is None and trace.get("policy_version").value is not None:
        version = trace["policy_version"].integer()
    prompt, failure = _task(trace), _failure(trace)
    rewards, weighted = dict[str, float](), 0.0
    for name in trace.get("rewards").mapping if trace.get("rewards").value is not None else ():
        reward = trace["rewards"].get(name)
        if reward.value is None:
            failure = failure or Failure("unscored", f"{name} was not scored")
            continue
        is_plain = isinstance(reward.value, int | float)
        rewards[name] = reward.number() if is_plain else reward["score"].number()
        weight = 1.0 if is_plain or reward.get("weight").value is None else reward["weight"].number()
        weighted += rewards[name] * weight
    sequences = () if failure else _sequences(trace, version, spans)
    if not failure and not sequences:
        failure = Failure("empty", "nothing was sampled, or without token ids")
    last = next((call for call in reversed(trace.get("calls").listed()) if call.get("error").value is None), None)
    finish, stop = last.get("finish_reason").text() if last is not None else "", trace.get("stop_condition").text()
    return Attempt(
        at=trace,
        group=group or trace.get("group_id").text() or prompt,
        prompt=prompt,
        env=env or trace.get("env_name").text(),
        sequences=sequences,
        reward=trace["reward"].number() if trace.get("reward").value is not None else weighted,
        rewards=rewards,
        finish_reason=finish,
        is_truncated=stop in LIMITS or trace.get("is_truncated").flag(),
        failure=failure,
        metadata={"trace": trace.get("id").text(), "stop": stop, **(metadata or {})},
    )


def _task(record: Value) -> str:
    """Key of a task: its own, else the hash of its data, else its number or its prompt."""
    task = record.get("task")
    if task.value is None:
        return record.get("id").text()
    data = task.get("data") if task.get("data").value is not None else task
    found = task.first("key", "hash").text() or data.first("id", "name", "idx").text()
    prompt = data.get("prompt").value
    return found or (prompt if isinstance(prompt, str) else "")


def _failure(record: Value) -> Failure | None:
    errors = record.get("errors").listed()
    ok = record.get("ok")
    if ok.flag() if ok.value is not None else not errors:
        return None
    if errors:
        return Failure(errors[-1]["type"].text(), errors[-1].get("message").text())
    return Failure(record.get("stop_condition").text() or "failed", "no reason given")


def _sequences(trace: Value, version: int | None, spans: Spans | None) -> tuple[TokenSequence, ...]:
    nodes = trace["nodes"].listed()
    parents = [node.get("parent").integer() if node.get("parent").value is not None else None for node in nodes]
    for number, parent in enumerate(parents):
        if parent is not None and parent >= number:
            raise nodes[number]["parent"].wrong(f"{parent} is not a message before this one")
    attempts, resumed = set[int](), set[int]()
    for number, node in enumerate(nodes):
        for link in node.get("semantic_parents").listed():
            if link["type"].text() == "compaction_attempt":
                attempts.add(number)
            elif link["type"].text() == "compaction":
                resumed.add(link["node"].integer())
    parts = [_Part(node) for node in nodes]
    trained, out = set[int](), list[TokenSequence]()
    for path in paths_of(parents):
        if path[-1] in attempts - resumed:
            continue
        masks = [np.zeros_like(parts[n].mask) if n in trained else parts[n].mask for n in path]
        if any(mask.any() for mask in masks):
            out.append(_sequence(path, [parts[n] for n in path], masks, version, spans))
            trained |= {n for n in path if parts[n].mask.any()}
    return tuple(out)


class _Part:
    """What one message adds to the tokens of its path."""

    __slots__ = ("logprobs", "mask", "reference", "role", "routed", "tokens")

    def __init__(self, node: Value) -> None:
        self.tokens, self.mask = node["token_ids"].ids(), node["mask"].flags()
        self.role = node["message"]["role"].text()
        if len(self.mask) != len(self.tokens):
            raise node["mask"].wrong(f"{len(self.mask)} flags for {len(self.tokens)} tokens")
        self.logprobs = self._spread(node["logprobs"])
        reference = node.get("reference_logprobs")
        self.reference = None if reference.value is None else self._spread(reference)
        self.routed = _array(node.get("routed_experts"))

    def _spread(self, values: Value) -> NDArray[np.float32]:
        """One number per sampled token, as one per token."""
        numbers, sampled = values.floats(), int(self.mask.sum())
        if len(numbers) != sampled:
            raise values.wrong(f"{len(numbers)} numbers for {sampled} sampled tokens")
        out = np.zeros(len(self.mask), np.float32)
        out[self.mask] = numbers
        return out


def _sequence(
    path: list[int],
    parts: list[_Part],
    masks: list[NDArray[np.bool_]],
    version: int | None,
    spans: Spans | None,
) -> TokenSequence:
    turns, versions, position = list[Turn](), list[VersionSpan](), 0
    for number, part, mask in zip(path, parts, masks, strict=True):
        end = position + len(part.tokens)
        turns.append(Turn(part.role, position, end))
        if spans is not None and mask.any():
            moved = spans(number, part.tokens, part.mask)
            versions += [VersionSpan(span.policy_version, position + span.start, position + span.end) for span in moved]
        position = end
    mask = np.concatenate(masks)
    columns: dict[str, NDArray[Any]] = {}
    filled = [part for part in parts if len(part.tokens)]
    if any(part.reference is not None for part in parts):
        zeros = [np.zeros(len(part.tokens), np.float32) for part in parts]
        pairs = zip(parts, zeros, strict=True)
        columns["ref_logprobs"] = np.concatenate([zero if p.reference is None else p.reference for p, zero in pairs])
    routed = [part.routed for part in filled if part.routed is not None and len(part.routed) == len(part.tokens)]
    if filled and len(routed) == len(filled):
        columns["routed_experts"] = np.concatenate(routed)
    return TokenSequence(
        tokens=np.concatenate([part.tokens for part in parts]),
        loss_mask=mask,
        logprobs=np.concatenate([part.logprobs for part in parts]),
        version_spans=tuple(versions) or (spans_of(mask, version) if version is not None else ()),
        turns=tuple(turns),
        columns=columns,
    )


def _array(value: Value) -> NDArray[Any] | None:
    """An array as verifiers puts it on its wire: dtype, shape and bytes."""
    if value.value is None or isinstance(value.value, np.ndarray):
        return value.value
    data = value["data"].value
    raw = binascii.a2b_base64(data) if isinstance(data, str) else data
    try:
        return np.frombuffer(raw, np.dtype(value["dtype"].text())).reshape(value["shape"].value)
    except (TypeError, ValueError) as error:
        raise value.wrong(str(error)) from None
