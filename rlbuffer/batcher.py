"""The batcher: infos of pushed groups in, decisions out.

Pure: no server, no clock, no randomness but the generator it is given, so that the same calls give the same decisions
on every machine and a restart from a saved state goes on with the same bytes. What it decides happens elsewhere::

    add(info) ... next(step) -> Decision --commit--> committed(plan)
                                         --gone----> refused(plan, gone)
                                         --drops---> dropped(drops)

A decision moves nothing of the account: deficits and means follow only `committed`. What must be dropped leaves the
index at once and is repeated by every decision until `dropped` confirms it.

Time: `now` is any clock that does not run backwards, the same one in `add` and `next`. A group's timeout counts from
the `now` of its first part's `add` and is looked at only in `next`; a new leader that passes its own time to `add`
starts the timeouts anew, so time in which no batcher ran does not count.

Cost: a step touches the groups that it selects or drops, and running sums of the others (:mod:`rlbuffer.policy.pool`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from rlbuffer.batches import Decision, Drop, Plan, StepPlan
from rlbuffer.config import BatcherConfig
from rlbuffer.errors import RlbufferError
from rlbuffer.policy import admission, budget, closing, composing, waiting
from rlbuffer.policy.age import oldest_version
from rlbuffer.policy.groups import GroupState
from rlbuffer.policy.ordering import load_selector
from rlbuffer.policy.patience import Patience
from rlbuffer.policy.pool import EnvPool, Pool
from rlbuffer.policy.selection import Limits, Trial, select
from rlbuffer.records import GroupInfo

_EMPTY = EnvPool()
Mean = tuple[float, float, float]
"""Mean group in (budget's unit, tokens, rollouts)."""


@dataclass(frozen=True, slots=True)
class _Decided:
    """The last plan, and the accounts as they will be when it is committed."""

    step: int
    group_ids: tuple[str, ...]
    accounts: dict[str, budget.EnvAccount]


class Batcher:
    """Decides what each step trains on. See the module's docstring for the order of calls.

    Args:
        config: the settings; changing them means a new batcher.
        state: `Decision.state` of the last committed step; None starts a new run.

    Raises:
        RlbufferError: the state was written by another version.
        ConfigError: `order` names a selector that cannot be imported.
    """

    def __init__(self, config: BatcherConfig, state: Mapping[str, Any] | None = None) -> None:
        self._config = config
        self._accounts = budget.load(state)
        self._pool = Pool(config)
        self._published: dict[str, int] = {}
        self._decided: _Decided | None = None
        self._short: frozenset[str] = frozenset()
        self._paused: set[str] = set()
        self._patience = Patience(config)
        self._selector = load_selector(config)

    # -- what happened ------------------------------------------------------------------------------------------------
    def add(self, info: GroupInfo, *, entry_id: str, now: float, uses: int = 0, pushed: float | None = None) -> None:
        """Takes in one push: a group or a part of one. An entry that is known already is ignored.

        Args:
            info: what was pushed.
            entry_id: its entry in the pool.
            now: seconds; the group's timeout counts from here.
            uses: steps that trained the group before; then it must be whole in this one push (else see `restore`).
            pushed: when it was pushed, on the same clock, if that was before `now`; `max_age_seconds` counts from here.

        Raises:
            RlbufferError: the group was used as often as `max_uses` allows, so it cannot be pending.
        """
        if uses:
            self.restore([(entry_id, info)], uses=uses, now=now, pushed=pushed)
            return
        self._pool.add(info, entry_id, now, pushed)
        self._patience.heard(info.env, self._pool.now)

    def restore(
        self, parts: Sequence[tuple[str, GroupInfo]], *, uses: int, now: float, pushed: float | None = None
    ) -> None:
        """Takes in a group that was trained before and may be trained again: all its (entry id, push), whole.

        Raises:
            RlbufferError: the group was used as often as `max_uses` allows.
        """
        if uses >= self._config.max_uses:
            group_id = parts[0][1].group_id
            raise RlbufferError(f"group {group_id} was trained {uses} times: max_uses is {self._config.max_uses}")
        self._pool.restore(parts, uses=uses, now=now, pushed=pushed)

    def remove(self, entry_id: str) -> None:
        """Forgets an entry that is gone from the store; if its group has other parts, they are dropped as invalid."""
        self._pool.remove(entry_id)

    def close(self, group_ids: Iterable[str]) -> None:
        """Takes in tombstones: whatever comes of these groups is late."""
        self._pool.close(group_ids)

    def set_published(self, version: int, adapter: str = "") -> None:
        """Takes in which policy version workers can sample from now; -1 when none was announced."""
        self._published[adapter] = version

    def pause(self, env: str) -> None:
        """`env` takes no part until it is resumed: no tickets, nothing of it is selected, no step waits for it.

        What it has in the pool stays there and grows older. Its share goes to the others in proportion.
        """
        self._paused.add(env)
        self._patience.forget(env)

    def resume(self, env: str) -> None:
        """`env` takes part again; what it missed while it was paused is not owed to it."""
        self._paused.discard(env)

    def committed(self, plan: StepPlan) -> None:
        """The store committed the plan of the last decision: its groups are gone, the accounts move.

        Raises:
            RlbufferError: it is not the plan that was decided last.
        """
        decided = self._decided
        if decided is None or (decided.step, decided.group_ids) != (plan.step, plan.group_ids):
            raise RlbufferError(f"step {plan.step} was committed, but it is not the plan that was decided last")
        self._accounts = decided.accounts
        self._decided = None
        self._patience.committed()
        self._pool.consume(plan.group_ids)

    def refused(self, plan: StepPlan, gone: Iterable[str]) -> None:
        """The store refused the plan because entries are gone: forgets them; `next` may plan the step again."""
        self._decided = None
        for entry_id in gone:
            self._pool.remove(entry_id)

    def dropped(self, drops: Iterable[Drop]) -> None:
        """The store made these drops: forgets them. Until then `next` repeats them."""
        self._pool.confirm(drops)

    def pending_tokens(self, env: str) -> int:
        """Tokens of the env's valid rollouts that wait to be trained, forming and ready."""
        return self._pool.pending_tokens(env)

    # -- what to do ---------------------------------------------------------------------------------------------------
    def next(self, step: int, *, world_size: int, now: float, rng: np.random.Generator) -> Decision:
        """Decides about `step`: a plan, or why there is none yet; and what must be dropped in either case.

        Call it only when the step may be committed (`step <= trained + 1 + lookahead`); asking again changes nothing.

        Args:
            step: from 1; the one after the last committed.
            world_size: ranks that the plan deals rows to.
            now: seconds, on the clock of `add`.
            rng: for selectors that draw; the built-in orders do not.

        Raises:
            ConfigError: the user's selector failed.
        """
        pool, patience = self._pool, self._patience
        pool.advance(now)
        pool.sweep_future(step)
        for env in list(pool.envs):
            if not self._lags(env, step):
                pool.sweep_stale(env, step)
        if self._selector is not None:
            pool.rank(self._selector, rng)
        limits = self._limits(world_size)
        fractions = self._fractions(step)
        patience.judge(pool.now, [env for env in fractions if budget.has_budget(self._config, env)])
        trial = self._select(step, limits, fractions)
        for group in trial.surplus:
            pool.drop_flat(group)
        self._short = frozenset(trial.short)
        wanted = self._wanted(trial, step)
        patience.looked(
            pool.now,
            short=[env for env in trial.short + trial.lent if not self._lags(env, step)],
            wanted=[env for env in wanted if not self._lags(env, step)],
        )
        found = self._close(trial, limits, world_size)
        drops = tuple(pool.drops.values())
        if found is None:
            self._decided = None
            return Decision(
                plan=None,
                state=budget.dump(self._accounts),
                drops=drops,
                waiting=self._sentence(step, trial, limits, fractions),
                allowances=self.allowances(step, world_size=world_size, wanted=wanted),
                dead=patience.dead(pool.now),
            )
        groups, plan, closed_by = found
        step_plan = composing.step_plan(step, groups, plan, closed_by, self._config)
        sizes = [(g.env, g.tokens, g.rollouts) for g in groups]
        accounts = budget.settle(self._accounts, sizes, fractions, self._config.unit)
        self._decided = _Decided(step, step_plan.group_ids, accounts)
        self._short = frozenset()
        return Decision(
            plan=step_plan,
            state=budget.dump(accounts),
            drops=drops,
            allowances=self._allow(step + 1, limits, accounts, taken=groups),
            dead=patience.dead(pool.now),
        )

    def allowances(
        self, step: int, *, world_size: int, version: int | None = None, wanted: Collection[str] = ()
    ) -> dict[str, int]:
        """env -> tickets that may be out while `step` is the next to be planned; ``*`` stands for envs not named.

        Decisions carry them; between decisions (the step may not be committed yet) ask here as groups come in.

        Args:
            step: the one after the last committed.
            world_size: ranks of the step.
            version: published policy version, if newer than what `set_published` said.
            wanted: envs that get at least one ticket as long as a group sampled now can still train.
        """
        if version is not None:
            self.set_published(version)
        return self._allow(step, self._limits(world_size), self._accounts, wanted=wanted)

    # -- selecting ----------------------------------------------------------------------------------------------------
    def _lags(self, env: str, step: int) -> bool:
        """True when the published version is so old that nothing sampled now could train at `step`."""
        published = self._published.get("")
        return published is not None and published < oldest_version(step, self._config.for_env(env, "max_age"))

    def _limits(self, world_size: int) -> Limits:
        config = self._config
        return Limits(
            rows=world_size * config.micro_batches_per_rank * config.rows_per_micro_batch,
            row_tokens=config.row_tokens,
            groups=config.step_groups,
            rollouts=config.step_rollouts,
            flat=config.flat if isinstance(config.flat, float) else None,
            used=config.replay_fraction,
        )

    def _known(self) -> list[str]:
        return budget.known_envs(self._config, [*self._accounts, *self._pool.envs])

    def _size(self, tokens: int, rollouts: int) -> int:
        return budget.size_of(self._config.unit, tokens=tokens, rollouts=rollouts)

    def _fractions(self, step: int) -> dict[str, float]:
        ready: dict[str, float] = {}
        for env, pool in self._pool.envs.items():
            unit = self._config.unit
            ready[env] = pool.ready_groups if unit == "groups" else self._size(pool.ready_tokens, pool.ready_rollouts)
        return budget.shares(self._config, self._known(), ready, step=step, paused=self._paused)

    def _select(self, step: int, limits: Limits, fractions: Mapping[str, float]) -> Trial:
        config = self._config
        return select(
            candidates={env: self._walk(env, pool, step) for env, pool in self._pool.envs.items()},
            deficits={env: account.deficit for env, account in self._accounts.items()},
            fractions=fractions,
            means={env: mean[0] for env, mean in self._means(fractions, self._accounts).items()},
            budgeted=[env for env in fractions if fractions[env] > 0 and budget.has_budget(config, env)],
            limits=limits,
            unit=config.unit,
            close_fill=config.close_fill,
            excused=self._patience.excused(self._pool.now),
        )

    def _walk(self, env: str, pool: EnvPool, step: int) -> Iterator[GroupState]:
        """The env's ready groups in the order in which they should train."""
        oldest = oldest_version(step, self._config.for_env(env, "max_age"))
        newest_first = self._config.order != "oldest_first"
        if self._pool.ranks:
            fresh = pool.ranked.walk(oldest=oldest)
        else:
            fresh = pool.ready.walk(newest_first=newest_first, oldest=oldest)
        return chain(fresh, pool.used.walk(newest_first=newest_first, oldest=oldest))

    def _means(self, envs: Iterable[str], accounts: Mapping[str, budget.EnvAccount]) -> dict[str, Mean]:
        """env -> its mean group: of those trained, else of those ready, else of the other envs; (0, 0, 0) for none."""
        means: dict[str, Mean] = {}
        unknown = []
        for env in envs:
            mean = self._mean(env, accounts.get(env))
            if mean is None:
                unknown.append(env)
            else:
                means[env] = mean
        sums = [sum(column) for column in zip(*means.values(), strict=True)] or [0.0, 0.0, 0.0]
        count = max(1, len(means))
        return means | dict.fromkeys(unknown, (sums[0] / count, sums[1] / count, sums[2] / count))

    def _mean(self, env: str, account: budget.EnvAccount | None) -> Mean | None:
        pool = self._pool.envs.get(env, _EMPTY)
        if account is not None and account.groups:
            tokens, rollouts = account.tokens, account.rollouts
        elif pool.ready_groups:
            tokens, rollouts = pool.ready_tokens / pool.ready_groups, pool.ready_rollouts / pool.ready_groups
        else:
            return None
        unit = {"tokens": tokens, "rollouts": rollouts}.get(self._config.unit, 1.0)
        return unit, tokens, rollouts

    # -- closing ------------------------------------------------------------------------------------------------------
    def _close(self, trial: Trial, limits: Limits, world_size: int) -> tuple[Sequence[GroupState], Plan, str] | None:
        """The groups of the step, their plan and what closed it; None when the step stays open."""
        groups = trial.groups
        micro_steps = self._config.micro_batches_per_rank

        def planner(some: Sequence[GroupState]) -> Plan:
            return composing.plan_groups(some, self._config, world_size)

        if trial.ended == "count":
            return groups, planner(groups), "groups" if limits.groups is not None else "rollouts"
        if groups and trial.ended == "short" and self._patience.may_close(self._pool.now, trial.short):
            if not limits.by_rows:
                return groups, planner(groups), "partial"
            count, plan = closing.longest_fit(groups, planner, micro_steps)
            return groups[:count], plan, "partial"
        if not limits.by_rows:
            return None
        is_full = trial.ended == "full"
        if not is_full and trial.balanced:
            plan = planner(groups[: trial.balanced])
            if plan.micro_steps <= micro_steps:
                return groups[: trial.balanced], plan, "fill"
            is_full = True
        # Any packing leaves at most one row less than half full, so below half there is always room.
        if not is_full and 2 * trial.tokens > limits.tokens:
            is_full = closing.needs_more_rows(groups, limits.row_tokens, limits.rows)
        if not is_full:
            return None
        count, plan = closing.longest_fit(groups, planner, micro_steps)
        return groups[:count], plan, "capacity"

    # -- admitting ----------------------------------------------------------------------------------------------------
    def _wanted(self, trial: Trial, step: int) -> list[str]:
        """Envs that the open step waits for: those that are short, else all that have nothing more to give."""
        if trial.short:
            return trial.short + trial.lent
        selected = {g.env for g in trial.groups}
        known = [e for e in self._known() if e not in self._paused and not budget.is_off(self._config, e, step)]
        unheard = [e for e in known if e not in selected and e not in trial.exhausted]
        return trial.exhausted + [e for e in unheard if not self._pool.envs.get(e, _EMPTY).ready_groups]

    def _allow(
        self,
        step: int,
        limits: Limits,
        accounts: Mapping[str, budget.EnvAccount],
        *,
        wanted: Collection[str] = (),
        taken: Iterable[GroupState] = (),
    ) -> dict[str, int]:
        config = self._config
        known = budget.known_envs(config, [*accounts, *self._pool.envs])
        fractions = budget.shares(config, known, None, step=step, paused=self._paused)
        used: dict[str, int] = {}
        for group in taken:
            used[group.env] = used.get(group.env, 0) + 1
        means = {e: self._mean(e, accounts.get(e)) for e in known}
        supply = {}
        for env in fractions:
            max_age = config.for_env(env, "max_age")
            pool = self._pool.envs.get(env, _EMPTY)
            oldest = oldest_version(step, max_age)
            # What cannot train any more is not supply, though it may wait to be swept.
            pending = pool.ready.count(oldest) + len(pool.order) - used.get(env, 0)
            window = self._window(step, max_age)
            if self._short and env not in self._short and config.order == "newest_first":
                # The step waits for another env. Newest first, whatever this one samples beyond a step's worth only
                # pushes its own older groups out of the next steps.
                window = min(window, 1)
            supply[env] = admission.EnvSupply(
                window=window, pending=max(0, pending), share=fractions[env], mean=means[env]
            )
        per_step = admission.groups_per_step(
            supply, tokens=limits.tokens, groups=limits.groups, rollouts=limits.rollouts
        )
        out = admission.allowances(supply, per_step, wanted=wanted)
        out.update(dict.fromkeys(self._paused, 0))
        if budget.is_open(config, step) and self._window(step, config.max_age) > 0:
            out[admission.ANY_ENV] = admission.START_TICKETS
        return out

    def _window(self, step: int, max_age: int) -> int:
        # Before anyone said what is published, assume the newest that there can be.
        version = self._published.get("", step - 1)
        return admission.window(version=version, max_age=max_age, last_step=step - 1) if version >= 0 else 0

    # -- saying why ---------------------------------------------------------------------------------------------------
    def _sentence(self, step: int, trial: Trial, limits: Limits, fractions: Mapping[str, float]) -> str:
        if not fractions and self._paused:
            return waiting.all_paused(sorted(self._paused))
        published = self._published.get("")
        lagging = [e for e in self._known() if self._lags(e, step)]
        blocked = [e for e in trial.short if e in lagging]
        if published is not None and (blocked or (not trial.groups and self._all_lag(lagging, step))):
            ages = {e: self._config.for_env(e, "max_age") for e in (blocked[:1] or lagging)}
            max_age = max(ages.values(), default=self._config.max_age)
            return waiting.for_version(
                step,
                needed=oldest_version(step, max_age),
                published=published,
                max_age=max_age,
                env=blocked[0] if blocked else "",
            )
        means = self._means(fractions, self._accounts)
        if trial.short:
            env = trial.short[0]
            return waiting.for_share(self._need(env, trial, limits, fractions, means), published)
        # Where nothing is ready at all, `proportional` gives nobody a share: then it is any env that sent something.
        there = [e for e in self._pool.envs if e not in self._paused]
        env = max(trial.exhausted or there, key=lambda e: (trial.deficits.get(e, 0.0), e), default="")
        need = self._need(env, trial, limits, fractions, means) if env and there else None
        done, what = waiting.progress(trial, limits)
        return waiting.for_groups(step, done=done, what=what, need=need, published=published)

    def _all_lag(self, lagging: Collection[str], step: int) -> bool:
        known = self._known()
        return len(lagging) == len(known) if known else self._lags("", step)

    def _need(
        self, env: str, trial: Trial, limits: Limits, fractions: Mapping[str, float], means: Mapping[str, Mean]
    ) -> waiting.EnvNeed:
        """What the step still needs of `env`: what it is owed now, and its share of what the step still lacks."""
        done, _ = waiting.progress(trial, limits)
        size = sum(self._size(g.tokens, g.rollouts) for g in trial.groups)
        lacking = size / done - size if done > 0 else 0.0
        owed = trial.deficits.get(env, 0.0) + fractions.get(env, 0.0) * lacking
        mean = means.get(env, (0.0, 0.0, 0.0))[0]
        pool = self._pool.envs.get(env, _EMPTY)
        oldest = next(iter(pool.order.values()), None)
        return waiting.EnvNeed(
            env=env,
            missing=owed / mean if mean else 1.0,
            ready=pool.ready_groups,
            forming=len(pool.order),
            oldest_seconds=None if oldest is None else max(0.0, self._pool.now - oldest.since),
            is_silent=env not in self._pool.envs and env not in self._accounts,
            dead_seconds=self._patience.dead(self._pool.now).get(env),
            lost=pool.lost,
        )
