"""The reason why a step is not there yet (:class:`rlbuffer.records.waiting.Waiting`)."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rlbuffer.batcher import budget
from rlbuffer.batcher.age import oldest_version
from rlbuffer.batcher.selection import Limits, Trial
from rlbuffer.batcher.situation import Situation
from rlbuffer.records.waiting import Wait, Waiting


def reason(
    known: Situation, step: int, trial: Trial, limits: Limits, fractions: Mapping[str, float], waits_to_learn: int
) -> Waiting:
    """The reason why `step` is not made: the pauses, a version, the env that is short, or the one whose turn it is.

    `waits_to_learn` groups would be a step by now, if any of them taught anything.
    """
    if waits_to_learn:
        return Waiting(kind=Wait.NOTHING_TO_LEARN, step=step, groups=waits_to_learn)
    if known.is_last:
        paused = sorted(env for env in known.paused if not known.is_finished(env))
        return _paused(paused) if paused else Waiting(kind=Wait.LAST_STEP, step=step - 1)
    if not fractions and known.paused:
        return _paused(sorted(known.paused))
    envs = known.known()
    lagging = [e for e in envs if known.env_lags(e, step)]
    blocked = [e for e in trial.short if e in lagging]
    all_lag = len(lagging) == len(envs) if envs else known.env_lags("", step)
    if blocked or (not trial.groups and all_lag):
        return _version(known, step, blocked[0] if blocked else "", lagging)
    if trial.short:
        return _env(Wait.ENV_SHORT, known, trial.short[0], step, trial, limits, fractions)
    # Where nothing is ready at all, `proportional` gives nobody a share: then it is any env that sent something.
    there = [e for e in known.pool.envs if e not in known.absent]
    exhausted = [e for e in trial.exhausted if e not in known.done]
    env = max(exhausted or there, key=lambda e: (trial.deficits.get(e, 0.0), e), default="") if there else ""
    return _env(Wait.FILLING, known, env, step, trial, limits, fractions)


def _paused(envs: list[str]) -> Waiting:
    return Waiting(kind=Wait.PAUSED, env=", ".join(envs))


def _version(known: Situation, step: int, blocked: str, lagging: list[str]) -> Waiting:
    ages = {e: known.config.for_env(e).max_age for e in ([blocked] if blocked else lagging)}
    # The env that needs the least new version is the first that can go on.
    env = blocked or max(sorted(ages), key=lambda e: ages[e], default="")
    max_age = ages.get(env, known.config.max_age)
    adapter = min(known.sampled(env))
    return Waiting(
        kind=Wait.VERSION,
        step=step,
        env=blocked,
        adapter=adapter,
        version=oldest_version(known.own_step(adapter, step), max_age),
        published=known.published.get(adapter, -1),
        limit=max_age,
    )


def _env(
    kind: Wait, known: Situation, env: str, step: int, trial: Trial, limits: Limits, fractions: Mapping[str, float]
) -> Waiting:
    """The need of the step for `env`: what it is owed now, and its share of what the step still lacks."""
    done = progress(trial, limits)
    if not env:
        return Waiting(kind=kind, step=step, done=done)
    dead = known.patience.dead(known.pool.now).get(env)
    if dead is not None:
        return Waiting(kind=Wait.ENV_DEAD, step=step, env=env, done=done, seconds=float(round(dead)))
    size = sum(budget.size_of(known.config.unit, tokens=g.tokens, rollouts=g.rollouts) for g in trial.groups)
    lacking = size / done - size if done > 0 else 0.0
    owed = trial.deficits.get(env, 0.0) + fractions.get(env, 0.0) * lacking
    mean = known.means(fractions).get(env, (0.0, 0.0, 0.0))[0]
    pool = known.env(env)
    oldest = next(iter(pool.forming.values()), None)
    return Waiting(
        kind=kind,
        step=step,
        env=env,
        groups=max(1, math.ceil(owed / mean - 1e-9)) if mean else 1,
        forming=len(pool.forming),
        done=done,
        published=known.published.get("", -1),
        seconds=0.0 if oldest is None else float(round(max(0.0, known.pool.now - oldest.since))),
        dropped=pool.lost,
    )


def progress(trial: Trial, limits: Limits) -> float:
    """The filled share of the step, 0-1."""
    if limits.groups is not None:
        return len(trial.groups) / limits.groups
    if limits.rollouts is not None:
        return trial.rollouts / limits.rollouts
    return trial.tokens / limits.tokens
