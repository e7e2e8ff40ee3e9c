"""NeMo Gym: the token entries that its model server records, and finished rollouts whose output has the ids.

Facts: NVIDIA-NeMo/Gym @07d6b0d07 `nemo_gym/token_id_capture/records.py` (`TokenEntry` v1), `builder.py` (a call goes on
from the longest beginning; where two end in the same tokens it and what follows are set aside; of siblings with one
prompt those that nothing follows were retries; a retry of the last call is unresolved; calls without generation are no
calls; the chain whose root was recorded first is the main one), `consumer.py` (unresolved retries are masked; so are
several chains, which its one response cannot hold and a rollout here can), `rollout_correlation.py` (ids
``task-rollout[-aN]``, N above 0 for a retry).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial

from rlbuffer.records.failure import Failure
from rlbuffer.traces.attempt import Stretch, TraceAttempt, as_far_as_read
from rlbuffer.traces.calls import Call, call_of, line, parents_of, paths_of, sequences_of
from rlbuffer.traces.values import Value

VERSION = 1
"""Of the record that is read."""


def entries(records: Sequence[Value]) -> Iterator[TraceAttempt]:
    """An attempt, of one rollout id; entries have no reward."""
    found: dict[str, Value] = {}
    for record in records:
        if record.get("schema_version").value is not None and record["schema_version"].integer() > VERSION:
            raise record["schema_version"].wrong(f"version {VERSION} is the newest that is known")
        call_id = record["model_call_id"].text()
        if call_id in found and found[call_id].value != record.value:
            raise record["model_call_id"].wrong(f"{call_id} has another record in rollout {rollout_of(record)}")
        found[call_id] = record
    sampled = [entry for entry in found.values() if len(entry["generation_token_ids"].ids())]
    chains, unresolved = _chains(sampled)
    failure = None
    if unresolved:
        failure = Failure("unresolved_retry", f"calls {', '.join(unresolved)}: which of them was used is unknown")
    elif not chains:
        failure = Failure("empty", "no call sampled anything that is trained")
    rollout = rollout_of(records[0])
    task = _task(rollout)
    yield TraceAttempt(
        at=records[0],
        group=task,
        prompt=task,
        sequences=() if failure else sequences_of(chains),
        failure=failure,
        metadata={"rollout": rollout},
    )


def rollout_of(record: Value) -> str:
    """The rollout that an entry belongs to."""
    return record["rollout_id"].text()


def _task(rollout: str) -> str:
    """The task of a rollout id: what is before its own number and that of its retry."""
    match = re.fullmatch(r"(.+)-\d+(?:-a\d+)?", rollout)
    return match.group(1) if match else rollout


def _chains(records: Sequence[Value]) -> tuple[list[list[Call]], list[str]]:
    """Paths without what was set aside, the main one first, and the ids of retries that nothing resolves."""
    made = {record["model_call_id"].text(): record for record in records}
    calls = [
        call_of(record["prompt_token_ids"], record["generation_token_ids"], record["generation_log_probs"], key=key)
        for key, record in sorted(made.items(), key=lambda item: (len(item[1]["prompt_token_ids"].ids()), item[0]))
    ]
    found = parents_of(calls)
    aside = {number for number, above in enumerate(found) if len(above) > 1}
    parents = [above[0] if above else None for above in found]
    siblings: dict[tuple[int | None, bytes], list[int]] = {}
    for number, call in enumerate(calls):
        siblings.setdefault((parents[number], call.prompt.tobytes()), []).append(number)
    unresolved = list[str]()
    for group in siblings.values():
        followed = {n for n in group if any(p == n and child not in aside for child, p in enumerate(parents))}
        if len(group) > 1 and not followed:
            followed = {min(group)}
            unresolved += [calls[n].key for n in group]
        if len(group) > 1:
            aside |= set(group) - followed
    paths = [path for path in paths_of(parents) if not aside.intersection(path)]
    created = {key: record.get("created_at").number_or(0.0) for key, record in made.items()}
    paths.sort(key=lambda path: (created[calls[path[0]].key], calls[path[0]].key))
    return [[calls[n] for n in path] for path in paths], unresolved


def _of_output(items: Sequence[Value]) -> Sequence[Stretch]:
    names = "prompt_token_ids", "generation_token_ids", "generation_log_probs"
    return sequences_of(line([call_of(*(item[name] for name in names)) for item in items]))


def rollouts(records: Sequence[Value]) -> Iterator[TraceAttempt]:
    """An attempt per finished rollout, whose response has the ids on what was generated."""
    for record in records:
        items = [item for item in record["response"]["output"] if item.get("generation_token_ids").value is not None]
        task = record.get("_ng_task_index").text()
        failure = Failure("masked", "mask_sample") if record.get("mask_sample").flag() else None
        if not failure and not items:
            raise record["response"]["output"].wrong("no item has generation_token_ids")
        yield TraceAttempt(
            at=record,
            group=task,
            prompt=task,
            sequences=as_far_as_read(failure, partial(_of_output, items)),
            reward=record["reward"].number(),
            failure=failure,
            metadata={"rollout": record.first("_ng_rollout_id", "_ng_rollout_index").text()},
        )
