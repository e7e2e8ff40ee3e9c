"""What a stream's trainer was given and has not trained, as REPORT and RECOVER are told of it.

line of a script -> ``{run}:unused`` (until the step retires), and a record of a drop in the history
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import fmean

from rlbuffer.errors import PayloadError
from rlbuffer.records.states import Reason
from rlbuffer.store.history import Dropped
from rlbuffer.store.records import MAX_TRAINER_BYTES, TrainedStep, Unused
from rlbuffer.wire import payload


def unused_lines(steps: Iterable[TrainedStep]) -> str:
    """A line for each step of which something was not trained: number, env, rollouts, tokens, their ids, and the
    record of their drop; the last two in msgpack as hex."""
    return "".join(_line(step) for step in steps if step.unused)


def _line(step: TrainedStep) -> str:
    (env,), (group_id,), left = step.envs, step.group_ids, step.unused.values()
    scored = [rollout.reward for rollout in left if rollout.reward is not None]
    record = Dropped(
        group_id=group_id,
        env=env,
        reason=Reason.UNUSED,
        rollouts=len(left),
        tokens=sum(rollout.tokens for rollout in left),
        detail=f"the trainer was given it in step {step.step}, and has not trained it",
        min_version=min(rollout.min_version for rollout in left),
        reward=fmean(scored) if scored else None,
        step=step.step,
        digest=step.digest,
        rollout_ids=list(step.unused),
    )
    parts = (payload.dumps(list(step.unused)).hex(), payload.dumps(record.as_object()).hex())
    return f"{step.step} {env} {record.rollouts} {record.tokens} {' '.join(parts)}\n"


def unused_of(fields: Mapping[bytes, bytes]) -> dict[int, Unused]:
    """Step -> what was not trained of it. What is no such record is left out: anybody may have written it."""
    found: dict[int, Unused] = {}
    for name, value in fields.items():
        try:
            env, rollouts, tokens, ids = value.decode().split(" ")
            step, named = int(name), payload.loads(bytes.fromhex(ids), limit=MAX_TRAINER_BYTES)
            found[step] = Unused(
                step=step,
                env=env,
                rollouts=int(rollouts),
                tokens=int(tokens),
                rollout_ids=tuple(str(rollout_id) for rollout_id in named),
            )
        except (PayloadError, ValueError, TypeError):
            continue
    return found
