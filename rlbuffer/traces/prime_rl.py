"""prime-rl's Parquet files of 2025: what its inference wrote and its trainer read, a row per completion.

Facts: PrimeIntellect-ai/prime-rl @2cc749a56 `src/zeroband/training/parquet.py` (what a trainer batch needs),
`inference/parquet.py` (more: problem_id, step, seed, proofs), `training/data.py` (all of the output trains, with
`output_logprobs`; `advantages` is one number a row), @982957088 (`output_mask`, where there is one). `step` is the step
that trains; the version that sampled is not there. Today's batches (`rank_N.bin`) have advantages and no rewards.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

from rlbuffer.traces.attempt import TraceAttempt
from rlbuffer.traces.calls import call_of, sequences_of
from rlbuffer.traces.values import Value


def rows(records: Sequence[Value]) -> Iterator[TraceAttempt]:
    """An attempt per row."""
    for row in records:
        mask = row.get("output_mask")
        if mask.value is not None:
            mask = Value([0] * len(row["input_tokens"].ids()) + [one.value for one in mask], mask.place, mask.path)
        ids = row["input_tokens"], row["output_tokens"], row["output_logprobs"]
        call = call_of(*ids, mask, temperature=row.get("temperature").number_or(1.0))
        problem = row.get("problem_id").text()
        digest = hashlib.sha256(call.prompt.tobytes()).hexdigest()[:16]
        rewards = {name: row[name].number() for name in ("task_rewards", "length_penalties") if _has(row, name)}
        yield TraceAttempt(
            at=row,
            group=".".join(filter(None, (row.get("step").text(), problem or digest))),
            prompt=problem or digest,
            env=row.get("task_type").text(),
            sequences=sequences_of([[call]]),
            reward=row["rewards"].number(),
            rewards=rewards,
            metadata={name: row.value[name] for name in ("step", "seed") if _has(row, name)},
        )


def _has(row: Value, name: str) -> bool:
    return row.get(name).value is not None
