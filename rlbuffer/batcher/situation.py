"""The batcher's knowledge (the pool, the accounts, what is published, who is paused) and why there is no step yet."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

from rlbuffer.batcher import budget
from rlbuffer.batcher.adapters import AdapterAccounts, Queue
from rlbuffer.batcher.age import last_version, oldest_version
from rlbuffer.batcher.group import PooledGroup
from rlbuffer.batcher.pace import Pace
from rlbuffer.batcher.pool import Pool, StepOf
from rlbuffer.batcher.selection import Limits, Trial
from rlbuffer.batcher.spillover import Patience
from rlbuffer.config.batcher import BatcherConfig
from rlbuffer.records.waiting import Cause, Wait, Waiting

Mean = tuple[float, float, float]
"""Mean group in (budget's unit, tokens, rollouts)."""


@dataclass(slots=True, kw_only=True)
class Situation:
    """Everything that a decision is made of."""

    config: BatcherConfig
    pool: Pool
    patience: Patience
    accounts: Mapping[str, budget.EnvAccount]
    """env -> account, as after the last committed step."""
    adapters: AdapterAccounts
    pace: Pace = field(default_factory=Pace)
    """Of a stream's trainer."""
    published: dict[str, int] = field(default_factory=dict)
    """adapter -> version that workers can sample from; -1 when none was announced."""
    paused: set[str] = field(default_factory=set)
    done: frozenset[str] = frozenset()
    """Envs from which nothing more comes except their pending groups and further parts of them."""
    declared: frozenset[str] = frozenset()
    """Envs of `done` from which no further part comes either, because somebody has said so."""
    others: frozenset[str] = frozenset()
    """Other producers that may still send something."""
    short: frozenset[str] = frozenset()
    """Envs that the open step waits for."""
    under_way: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    """env -> number of a ticket that lives -> version with which it was taken."""

    # -- envs ---------------------------------------------------------------------------------------------------------
    def known(self) -> list[str]:
        """Envs that have a budget or have sent a group, sorted."""
        return budget.known_envs(self.config, [*self.accounts, *self.pool.envs])

    def is_finished(self, env: str) -> bool:
        """True when it sends nothing more, and all that it sent is gone from the pool."""
        return env in self.done and not self.pool.has_fresh(env)

    @property
    def absent(self) -> set[str]:
        """Envs that take no part in a step: those that are paused, and those that are done and used up."""
        return self.paused | {env for env in self.done if self.is_finished(env)}

    @property
    def is_closing(self) -> bool:
        """True when nothing more comes at all: what is ready is what there is. Paused envs do not count."""
        return bool(self.done) and self.done.union(self.paused).issuperset(self.others.union(self.known()))

    @property
    def is_last(self) -> bool:
        """True when nothing more becomes ready either: no group waits for a scorer."""
        return self.is_closing and not any(p.forming for e, p in self.pool.envs.items() if e not in self.paused)

    @property
    def is_over(self) -> bool:
        """True when the run has nothing more to do."""
        everybody = self.others.union(self.known())
        return bool(self.done) and self.done.issuperset(everybody) and self.pool.is_empty

    def fractions(self, step: int) -> dict[str, float]:
        """env -> its share of `step`."""
        ready = {env: pool.ready(self.config.unit) for env, pool in self.pool.envs.items()}
        return budget.shares(self.config, self.known(), ready, step=step, paused=self.absent)

    def mean(self, env: str) -> Mean | None:
        """The env's mean group: of those trained, else of those ready; None when there are none."""
        account = self.accounts.get(env)
        if account is not None and account.groups:
            return self._mean(account.tokens, account.rollouts, 1)
        return self.ready_mean(env)

    def ready_mean(self, env: str) -> Mean | None:
        """The mean of the env's ready groups; None when there are none."""
        pool = self.pool.env(env)
        return self._mean(pool.ready_tokens, pool.ready_rollouts, pool.ready_groups)

    def _mean(self, tokens: float, rollouts: float, groups: int) -> Mean | None:
        if not groups:
            return None
        tokens, rollouts = tokens / groups, rollouts / groups
        return {"tokens": tokens, "rollouts": rollouts}.get(self.config.unit, 1.0), tokens, rollouts

    def spread(self, env: str) -> float:
        """Standard deviation of the tokens of a group that trained; 0 before there are any."""
        account = self.accounts.get(env)
        return 0.0 if account is None else math.sqrt(account.variance)

    def means(self, envs: Iterable[str]) -> dict[str, Mean]:
        """env -> its mean group, of the other envs where it has none; (0, 0, 0) for none at all."""
        own_means = {env: self.mean(env) for env in envs}
        means = {env: mean for env, mean in own_means.items() if mean is not None}
        sums = [sum(column) for column in zip(*means.values(), strict=True)] or [0.0, 0.0, 0.0]
        count = max(1, len(means))
        other = (sums[0] / count, sums[1] / count, sums[2] / count)
        return means | {env: other for env in own_means if env not in means}

    # -- versions -----------------------------------------------------------------------------------------------------
    def steps(self, step: int) -> StepOf:
        """adapter -> `step` in its own count."""
        return partial(self.adapters.own_step, step=step, published=self.published)

    def sampled(self, env: str) -> list[str]:
        """Adapters that are sampled in `env`, as far as is known: those it has sent, else any that is published."""
        sent = self.pool.env(env).lanes.keys() | self.adapters.tags.get(env, {}).keys()
        return sorted(sent or [a for a, v in self.published.items() if v >= 0] or [""])

    def lags(self, env: str, adapter: str, step: int) -> bool:
        """True when the adapter's published version is so old that nothing sampled now could train at `step`."""
        published = self.published.get(adapter)
        oldest = oldest_version(self.steps(step)(adapter), self.config.for_env(env).max_age)
        return published is not None and published < oldest

    def env_lags(self, env: str, step: int) -> bool:
        """True when that is so for whatever the env samples."""
        return all(self.lags(env, adapter, step) for adapter in self.sampled(env))

    def youngest_limit(self, adapter: str) -> int | None:
        """The smallest `max_age` of the envs that sample `adapter`; None when no env does."""
        envs = [env for env in self.known() if env not in self.paused and adapter in self.sampled(env)]
        ages = [self.config.for_env(env).max_age for env in envs]
        if not ages and adapter in self.published and not self.known():
            return self.config.max_age
        return min(ages, default=None)

    # -- groups -------------------------------------------------------------------------------------------------------
    def queues(self, step: int) -> dict[str, Queue]:
        """env -> its ready groups in the order in which they should train."""
        step_of, tags, is_last = self.steps(step), self.adapters.tags, self.last_of(step)
        return {e: Queue(self.pool.queues(e, step_of), tags.get(e), self.config.unit, is_last) for e in self.pool.envs}

    def last_of(self, step: int) -> Callable[[PooledGroup], bool] | None:
        """Tells whether a group can train at `step` and at no later one; None where none of those is preferred."""
        if self.config.slow != "wait":
            return None
        step_of = self.steps(step)

        def is_last(group: PooledGroup) -> bool:
            last = last_version(step_of(group.adapter), self.config.for_env(group.env).max_age)
            return not group.used and group.min_version == last

        return is_last

    def limits(self, world_size: int) -> Limits:
        """The bounds of a step."""
        config = self.config
        return Limits(
            rows=world_size * config.micro_batches_per_rank * config.rows_per_micro_batch,
            row_tokens=config.row_tokens,
            groups=config.step_groups or None,
            rollouts=config.step_rollouts,
            flat=config.flat if isinstance(config.flat, float) else None,
            used=config.replay_fraction,
        )


def reason(
    situation: Situation, step: int, trial: Trial, limits: Limits, fractions: Mapping[str, float], waits_to_learn: int
) -> Waiting:
    """The reason why `step` is not made: the pauses, a version, the env that is short, or the one whose turn it is.

    `waits_to_learn` groups would be a step by now, if any of them taught anything.
    """
    if waits_to_learn:
        return Waiting(kind=Wait.NOTHING_TO_LEARN, step=step, groups=waits_to_learn)
    if situation.is_last:
        paused = sorted(env for env in situation.paused if not situation.is_finished(env))
        if not paused:
            return Waiting(kind=Wait.LAST_STEP, step=step - 1)
    else:
        paused = [] if fractions else sorted(situation.paused)
    if paused:
        return Waiting(kind=Wait.PAUSED, env=", ".join(paused))
    envs = situation.known()
    lagging = [e for e in envs if situation.env_lags(e, step)]
    blocked = [e for e in trial.short if e in lagging]
    all_lag = len(lagging) == len(envs) if envs else situation.env_lags("", step)
    if blocked or (not trial.groups and all_lag):
        return _version(situation, step, blocked[0] if blocked else "", lagging)
    if trial.short:
        return _env(Wait.ENV_SHORT, situation, trial.short[0], step, trial, limits, fractions)
    # Where nothing is ready at all, `proportional` gives nobody a share: then it is any env that sent something.
    there = [e for e in situation.pool.envs if e not in situation.absent]
    exhausted = [e for e in trial.exhausted if e not in situation.done]
    env = max(exhausted or there, key=lambda e: (trial.deficits.get(e, 0.0), e), default="") if there else ""
    return _env(Wait.FILLING, situation, env, step, trial, limits, fractions)


def _version(situation: Situation, step: int, blocked: str, lagging: list[str]) -> Waiting:
    ages = {e: situation.config.for_env(e).max_age for e in ([blocked] if blocked else lagging)}
    # The env that needs the least new version is the first that can go on.
    env = blocked or max(sorted(ages), key=lambda e: ages[e], default="")
    max_age = ages.get(env, situation.config.max_age)
    adapter = min(situation.sampled(env))
    return Waiting(
        kind=Wait.VERSION,
        step=step,
        env=blocked,
        adapter=adapter,
        version=oldest_version(situation.steps(step)(adapter), max_age),
        published=situation.published.get(adapter, -1),
        limit=max_age,
    )


def _env(
    kind: Wait, situation: Situation, env: str, step: int, trial: Trial, limits: Limits, fractions: Mapping[str, float]
) -> Waiting:
    """The need of the step for `env`: what it is owed now, and its share of what the step still lacks."""
    done = progress(trial, limits)
    if not env:
        return Waiting(kind=kind, step=step, done=done, is_stream=situation.config.is_stream)
    cause, detail = _cause(situation, env)
    dropped = situation.pool.env(env).loss(situation.pool.now)
    dead = situation.patience.dead(situation.pool.now).get(env)
    if dead is not None:
        seconds = float(round(dead))
        return Waiting(
            kind=Wait.ENV_DEAD,
            step=step,
            env=env,
            done=done,
            seconds=seconds,
            cause=cause,
            dropped=dropped,
            detail=detail,
        )
    size = sum(budget.size_of(situation.config.unit, tokens=g.tokens, rollouts=g.rollouts) for g in trial.groups)
    lacking = size / done - size if done > 0 else 0.0
    owed = trial.deficits.get(env, 0.0) + fractions.get(env, 0.0) * lacking
    mean = situation.means(fractions).get(env, (0.0, 0.0, 0.0))[0]
    pool = situation.pool.env(env)
    oldest = next(iter(pool.forming.values()), None)
    return Waiting(
        kind=kind,
        step=step,
        env=env,
        groups=max(1, math.ceil(owed / mean - 1e-9)) if mean else 1,
        forming=len(pool.forming),
        done=done,
        published=situation.published.get("", -1),
        seconds=0.0 if oldest is None else float(round(max(0.0, situation.pool.now - oldest.since))),
        cause=cause,
        dropped=dropped,
        detail=detail,
        is_stream=situation.config.is_stream,
    )


def _cause(situation: Situation, env: str) -> tuple[str, str]:
    """Why nothing more of `env` is there, as far as the pool tells: ("", "") where it is a matter of who samples it."""
    pool = situation.pool.env(env)
    if pool.loss(situation.pool.now):
        return Cause.DROPPED, ""
    needs = sorted(need for need, groups in pool.needs.items() if groups)
    if needs and all(group.is_whole for group in pool.forming.values()):
        return Cause.SCORER, ", ".join(needs)
    return (Cause.DONE, "") if env in situation.done else ("", "")


def progress(trial: Trial, limits: Limits) -> float:
    """The filled share of the step, 0-1."""
    if limits.groups is not None:
        return len(trial.groups) / limits.groups
    if limits.rollouts is not None:
        return trial.rollouts / limits.rollouts
    return trial.tokens / limits.tokens
