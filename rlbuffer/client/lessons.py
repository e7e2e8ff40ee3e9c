"""Whether the newest steps teach anything: the one place that says so of a run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from rlbuffer.config.batcher import compares
from rlbuffer.records.step_header import StepHeader
from rlbuffer.records.waiting import Problem, Trouble
from rlbuffer.state.step_record import StepRecord
from rlbuffer.state.text import plural
from rlbuffer.state.verdicts import JUDGED_STEPS, OF_LEARNING, newest_steps, verdicts
from rlbuffer.store.history import Committed

LAST_STEPS, LEAST_STEPS = JUDGED_STEPS, 10
"""Steps that are looked at, and from how many on something is said."""
MOST_FLAT = 0.9
"""Share of flat groups from which a run learns nothing."""
STILL_GRADIENT, STILL_ENTROPY = 1e-6, 0.01
"""The largest norm, and the mean entropy in nats, up to which a policy stands still."""


def last_steps(newest_first: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The newest steps among records of the history."""
    return list(islice((r for r in newest_first if r.get("event") == Committed.event), LAST_STEPS))


def mean_reward(steps: Iterable[Mapping[str, Any]]) -> float | None:
    """Mean over the rollouts of these steps; None where none is scored."""
    scored = [(r["reward"], r["rollouts"]) for r in steps if r["reward"] is not None]
    return sum(reward * rollouts for reward, rollouts in scored) / sum(n for _, n in scored) if scored else None


def nothing_to_learn(steps: Iterable[Mapping[str, Any]], trained: Sequence[Mapping[str, Any]]) -> Problem | None:
    """The problem of a run in whose newest steps nearly all groups are flat, or whose policy stands still; None of
    another one, and where it is not known.

    Args:
        steps: :func:`last_steps`.
        trained: what the trainer measured in its last steps; a trainer of one's own may measure nothing.
    """
    steps = [r for r in steps if isinstance(r.get("flat"), int)]
    flat, groups = sum(r["flat"] for r in steps), sum(r["groups"] for r in steps)
    is_flat = len(steps) >= LEAST_STEPS and flat >= MOST_FLAT * groups
    records = [StepRecord.read(record) for record in islice(trained, LAST_STEPS)]
    gradients, entropies = _finite(r.grad_norm for r in records), _finite(r.entropy for r in records)
    gradient = max(gradients) if len(gradients) >= LEAST_STEPS else None
    entropy = sum(entropies) / len(entropies) if len(entropies) >= LEAST_STEPS else None
    stands = (gradient is not None and gradient <= STILL_GRADIENT) or (entropy is not None and entropy <= STILL_ENTROPY)
    if not (is_flat or stands):
        return None
    facts = []
    if groups:
        facts.append(f"{flat / groups:.0%} of the groups of the last {plural(len(steps), 'step')} are flat")
    if gradient is not None:
        facts.append(f"the largest norm of a gradient is {gradient:.2f}")
    masked = [record.masked_by for record in records if record.masked_fraction == 1.0]
    if masked:
        by = max(masked[0], key=lambda stage: masked[0][stage])
        facts.append(f"{plural(len(masked), 'step')} trained nothing, the newest because of {by}")
    if entropy is not None:
        facts.append(f"the entropy is {entropy:.3f} nats")
    reward = mean_reward(steps)
    mean = "" if reward is None else f", and the mean reward is {reward:.3f}"
    return Problem(kind=Trouble.NO_LESSON, detail=f"{', '.join(facts)}{mean}")


def lessons(steps: Iterable[Mapping[str, Any]], trained: Sequence[Mapping[str, Any]]) -> tuple[Problem, ...]:
    """What must be cured for the run to learn, by its newest steps: causes by name, else that it learns nothing.

    Args:
        steps, trained: as of :func:`nothing_to_learn`.
    """
    named = verdicts(newest_steps(trained))
    nothing = None if any(problem.kind in OF_LEARNING for problem in named) else nothing_to_learn(steps, trained)
    return named if nothing is None else (*named, nothing)


def alone(header: StepHeader, config: Mapping[str, Any]) -> dict[str, str]:
    """Envs of a step of which each group is one rollout, while their estimator compares those of a group: env -> a
    sentence. Not where rollouts bring a column of advantages.

    Args:
        config: the batcher's, as the run has it.
    """
    messages = {}
    for env, amounts in header.envs.items():
        override = config.get("envs", {}).get(env, {}).get("advantage")
        estimator = override or config.get("advantage", "")
        if amounts["groups"] == amounts["rollouts"] and compares(estimator) and "advantages" not in header.columns:
            setting = f"batcher.envs.{env}.advantage" if override else "batcher.advantage"
            messages[env] = (
                f"step {header.step}: each group of env {env} is one rollout, and {setting} = {estimator!r} compares "
                "the rollouts of a group: their advantages are 0, and they train nothing. Push groups of several "
                'rollouts, or set it to "reinforce", or push a column advantages'
            )
    return messages


def _finite(values: Iterable[float | None]) -> list[float]:
    """Those that were measured: a norm of an update that was left out is none."""
    return [value for value in values if value is not None and math.isfinite(value)]
