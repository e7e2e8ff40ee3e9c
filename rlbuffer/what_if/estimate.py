"""An estimate of what a recorded run would have come to under other settings: several seeds, and their spread."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np

from rlbuffer.config.batcher import BatcherConfig
from rlbuffer.errors import ArchiveError
from rlbuffer.records.info import GroupInfo
from rlbuffer.what_if.outcome import Outcome
from rlbuffer.what_if.recorded import Recorded
from rlbuffer.what_if.world import Tasks, World

SEEDS = 5
TURN_SECONDS = 0.02
"""From a push to the leader's decision, about: as often it looks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Several runs of the same settings."""

    changes: Mapping[str, Any]
    outcomes: tuple[Outcome, ...]

    def mean(self, name: str) -> float:
        """A figure's mean over the seeds."""
        return float(np.mean([getattr(outcome, name) for outcome in self.outcomes]))

    def spread(self, name: str) -> tuple[float, float]:
        """Its smallest and largest."""
        values = [float(getattr(outcome, name)) for outcome in self.outcomes]
        return min(values), max(values)

    def as_object(self) -> dict[str, Any]:
        """As JSON may hold it."""
        figures = [part.name for part in fields(Outcome) if part.name != "reasons"]
        reasons: dict[str, list[int]] = {}
        for outcome in self.outcomes:
            for reason in outcome.reasons:
                reasons.setdefault(reason, [])
        for reason, counts in reasons.items():
            counts += [outcome.reasons.get(reason, 0) for outcome in self.outcomes]
        return {
            "changes": dict(self.changes),
            "seeds": len(self.outcomes),
            **{name: {"mean": self.mean(name), "range": [*self.spread(name)]} for name in figures},
            "reasons": reasons,
        }


def estimate(
    recorded: Recorded,
    config: BatcherConfig,
    changes: Mapping[str, Any],
    *,
    seeds: int = SEEDS,
    steps: int | None = None,
    progress: Callable[[int, int, int], None] = lambda seed, steps, groups: None,
) -> Estimate:
    """Runs the recorded supply and demand under `config`, as many steps as recorded.

    `progress` gets the number of the seed, from 0, and of its run the steps that are trained and the groups so far.

    Raises:
        ArchiveError: no group had a ticket, so nobody knows how long one takes.
        ConfigError: a step is never made under `config`.
    """
    tasks, workers = tasks_of(recorded), recorded.workers
    if not workers:
        raise ArchiveError(f"{recorded.archive.folder}: no push came of a ticket, so nobody knows how long one takes")
    groups = {push.info.group_id for push in recorded.pushes}
    step_groups = math.ceil(len(groups) / len(recorded.archive.steps))
    outcomes = tuple(
        World(
            config,
            tasks,
            workers,
            train_seconds=recorded.train_seconds,
            turn_seconds=TURN_SECONDS,
            world_size=recorded.commits[-1].header.world_size,
            steps=steps or len(recorded.archive.steps),
            step_groups=step_groups,
            seed=seed,
            needs_advantage=recorded.needs_advantage,
        ).run(partial(progress, seed))
        for seed in range(seeds)
    )
    return Estimate(changes=changes, outcomes=outcomes)


def tasks_of(recorded: Recorded) -> Tasks:
    """What a ticket of the run becomes: the recorded group of its number, else one of the env's that is drawn. One that
    was out when the record ended has taken at least so long: it is drawn from those that took longer."""
    groups: dict[str, dict[int, tuple[float, GroupInfo]]] = {}
    whole: dict[str, list[GroupInfo]] = {}
    for push in recorded.pushes:
        whole.setdefault(push.info.group_id, []).append(push.info)
    last = {push.info.group_id: push.seconds for push in recorded.pushes if push.seconds is not None}
    for push in recorded.timed:
        env, _, number = push.info.group_id.rpartition(".")
        if env == push.info.env and number.isdigit():
            pushes: Sequence[GroupInfo] = whole[push.info.group_id]
            rollouts = tuple(rollout for info in pushes for rollout in info.rollouts)
            info = replace(push.info, rollouts=rollouts, needs=())
            groups.setdefault(env, {})[int(number)] = last[push.info.group_id] or 0.0, info
    numbers = {env: sorted(by_number) for env, by_number in groups.items()}
    out = {(ticket.env, ticket.number): ticket.seconds for ticket in recorded.archive.tickets_out()}

    def task(env: str, number: int, version: int) -> tuple[float, GroupInfo]:
        like, least = number, 0.0
        if number not in groups[env]:
            least = out.get((env, number), 0.0)
            such = [n for n in numbers[env] if groups[env][n][0] >= least] or numbers[env]
            like = such[int(np.random.default_rng([3, number]).integers(len(such)))]
        seconds, info = groups[env][like]
        rollouts = tuple(
            rollout.changed(min_version=version, max_version=version, rollout_id=f"{env}.{number}/{place}")
            for place, rollout in enumerate(info.rollouts)
        )
        return max(seconds, least), replace(info, group_id=f"{env}.{number}", prompt_id=str(number), rollouts=rollouts)

    return task
