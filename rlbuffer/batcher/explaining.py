"""The reason why a step is not there yet: its kind, and its sentence (:mod:`rlbuffer.narration.waiting`)."""

from __future__ import annotations

from collections.abc import Mapping

from rlbuffer.batcher import budget
from rlbuffer.batcher.age import oldest_version
from rlbuffer.batcher.selection import Limits, Trial
from rlbuffer.batcher.situation import Mean, Situation
from rlbuffer.narration import waiting
from rlbuffer.records.waiting import Wait
from rlbuffer.state.text import plural


def reason(
    known: Situation, step: int, trial: Trial, limits: Limits, fractions: Mapping[str, float], waits_to_learn: int
) -> tuple[Wait, str]:
    """The reason why `step` is not made: the pauses, a version, the env that is short, or the one whose turn it is.

    `waits_to_learn` groups would be a step by now, if any of them taught anything.
    """
    if waits_to_learn:
        seconds = known.config.fill_timeout_seconds or 0.0
        return Wait.NOTHING_TO_LEARN, waiting.to_learn(step, waits_to_learn, seconds)
    if known.is_last:
        paused = sorted(env for env in known.paused if not known.is_finished(env))
        return (Wait.PAUSED, waiting.for_paused(paused)) if paused else (Wait.LAST_STEP, waiting.for_end(step - 1))
    if not fractions and known.paused:
        return Wait.PAUSED, waiting.all_paused(sorted(known.paused))
    envs = known.known()
    lagging = [e for e in envs if known.env_lags(e, step)]
    blocked = [e for e in trial.short if e in lagging]
    all_lag = len(lagging) == len(envs) if envs else known.env_lags("", step)
    if blocked or (not trial.groups and all_lag):
        return Wait.VERSION, _for_version(known, step, blocked[0] if blocked else "", lagging)
    published = known.published.get("")
    means = known.means(fractions)
    if trial.short:
        env = trial.short[0]
        return Wait.ENV_SHORT, waiting.for_share(_need(known, env, trial, limits, fractions, means), published)
    # Where nothing is ready at all, `proportional` gives nobody a share: then it is any env that sent something.
    there = [e for e in known.pool.envs if e not in known.absent]
    exhausted = [e for e in trial.exhausted if e not in known.done]
    env = max(exhausted or there, key=lambda e: (trial.deficits.get(e, 0.0), e), default="")
    need = _need(known, env, trial, limits, fractions, means) if env and there else None
    done, what = progress(trial, limits)
    return Wait.FILLING, waiting.for_groups(step, done=done, what=what, need=need, published=published)


def _for_version(known: Situation, step: int, blocked: str, lagging: list[str]) -> str:
    ages = {e: known.config.for_env(e).max_age for e in ([blocked] if blocked else lagging)}
    # The env that needs the least new version is the first that can go on.
    env = blocked or max(sorted(ages), key=lambda e: ages[e], default="")
    max_age = ages.get(env, known.config.max_age)
    adapter = min(known.sampled(env))
    return waiting.for_version(
        step,
        needed=oldest_version(known.own_step(adapter, step), max_age),
        published=known.published.get(adapter, -1),
        max_age=max_age,
        env=blocked,
        adapter=adapter,
    )


def _need(
    known: Situation,
    env: str,
    trial: Trial,
    limits: Limits,
    fractions: Mapping[str, float],
    means: Mapping[str, Mean],
) -> waiting.EnvNeed:
    """The need of the step for `env`: what it is owed now, and its share of what the step still lacks."""
    done, _ = progress(trial, limits)
    size = sum(budget.size_of(known.config.unit, tokens=g.tokens, rollouts=g.rollouts) for g in trial.groups)
    lacking = size / done - size if done > 0 else 0.0
    owed = trial.deficits.get(env, 0.0) + fractions.get(env, 0.0) * lacking
    mean = means.get(env, (0.0, 0.0, 0.0))[0]
    pool = known.env(env)
    oldest = next(iter(pool.forming.values()), None)
    return waiting.EnvNeed(
        env=env,
        missing=owed / mean if mean else 1.0,
        ready=pool.ready_groups,
        forming=len(pool.forming),
        oldest_seconds=None if oldest is None else max(0.0, known.pool.now - oldest.since),
        is_silent=env not in known.pool.envs and env not in known.accounts,
        dead_seconds=known.patience.dead(known.pool.now).get(env),
        lost=pool.lost,
    )


def progress(trial: Trial, limits: Limits) -> tuple[float, str]:
    """The filled share of the step, 0-1, and the same in words."""
    if limits.groups is not None:
        return len(trial.groups) / limits.groups, f"{len(trial.groups)} of {plural(limits.groups, 'group')} ready"
    if limits.rollouts is not None:
        return trial.rollouts / limits.rollouts, f"{trial.rollouts} of {plural(limits.rollouts, 'rollout')} ready"
    return trial.tokens / limits.tokens, f"{trial.tokens} of {limits.tokens} tokens ready"
