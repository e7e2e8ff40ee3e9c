"""The batcher: infos of pushed groups in, decisions out.

Pure: no server, no clock, no randomness except the generator it is given. The same calls give the same decisions on
every machine, and a restart from a saved state goes on with the same bytes. Its decisions are carried out elsewhere::

    add(info) ... next(step) -> Decision --commit--> committed(plan)
                                         --gone----> refused(plan, gone)
                                         --drops---> dropped(drops)

A decision moves nothing of the account: deficits and means follow only `committed`. A group to be dropped leaves the
index at once and is repeated by every decision until `dropped` confirms it.

Time: `now` is any clock that does not run backwards, the same one in `add` and `next`. A group's timeout counts from
the `now` of its first part's `add` and is looked at only in `next`; a new leader that passes its own time to `add`
starts the timeouts again, so time in which no batcher ran does not count.

Cost: a step touches the groups that it selects or drops, and sums of the others (:mod:`rlbuffer.batcher.pool`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlbuffer.batcher import adapters, admission, budget, closing, pace, slow, step_plan
from rlbuffer.batcher.group import PooledGroup, Rejected
from rlbuffer.batcher.ordering import load_selector
from rlbuffer.batcher.pool import EnvGroups, Pool
from rlbuffer.batcher.selection import Limits, Trial, select
from rlbuffer.batcher.situation import Situation, reason
from rlbuffer.batcher.spillover import Patience
from rlbuffer.batcher.teaching import Teaching
from rlbuffer.config.batcher import BatcherConfig
from rlbuffer.errors import RlbufferError
from rlbuffer.records.info import GroupInfo
from rlbuffer.records.states import ClosedBy, Reason
from rlbuffer.records.step_plan import Decision, Drop, StepPlan


@dataclass(frozen=True, slots=True)
class _Decided:
    """The last plan, and the accounts as they will be when it is committed."""

    step: int
    group_ids: tuple[str, ...]
    accounts: dict[str, budget.EnvAccount]
    adapters: adapters.AdapterAccounts
    pace: pace.Pace
    at: float


class Batcher:
    """Decides what each step trains on. See the module's docstring for the order of calls.

    Args:
        config: the settings; changing them means a new batcher.
        state: `Decision.state` of the last committed step; None starts a new run.
        needs_advantage: as far as is known, the trainer's loss learns nothing where the advantage is 0.

    Raises:
        RlbufferError: the state was written by another version.
        ConfigError: `order` names a selector, or `advantage` an estimator, that cannot be imported.

    Example:
        >>> import numpy as np
        >>> from rlbuffer.testing import make_group
        >>> batcher = Batcher(BatcherConfig(32, step_groups=2))
        >>> _ = batcher.add(make_group(env="math", seed=0).info(), entry_id="1-0", now=0.0)
        >>> rng = np.random.default_rng(0)
        >>> batcher.next(1, world_size=1, now=0.0, rng=rng).why.kind
        <Wait.FILLING: 'filling'>
        >>> _ = batcher.add(make_group(env="math", seed=1).info(), entry_id="2-0", now=1.0)
        >>> decision = batcher.next(1, world_size=1, now=1.0, rng=rng)
        >>> decision.plan.group_ids
        ('math.0', 'math.1')
        >>> batcher.committed(decision.plan)
    """

    def __init__(
        self, config: BatcherConfig, state: Mapping[str, Any] | None = None, *, needs_advantage: bool = True
    ) -> None:
        self._config = config
        estimators = step_plan.load_estimators(config)
        self.teaching = Teaching(config, needs_advantage=needs_advantage, estimators=estimators)
        """Judges whether a group teaches anything; to ask."""
        self._pool = Pool(config, self.teaching)
        self.pools: Mapping[str, EnvGroups] = self._pool.envs
        """env -> its pending groups, with running sums; to look at."""
        self._patience = Patience(config)
        self._situation = Situation(
            config=config,
            pool=self._pool,
            patience=self._patience,
            accounts=budget.load(state),
            adapters=adapters.AdapterAccounts.load(state, announced=config.is_stream),
            pace=pace.load(state),
        )
        self._step = int((state or {}).get("step", 0))
        """The last committed one, as far as the state tells."""
        self._at = float((state or {}).get("at", "-inf"))
        """When it was decided: over a takeover, too, so that a step does not wait all over again."""
        self._waits_since = self._at
        self._decided: _Decided | None = None
        self._awaited: set[str] = set()
        """Envs that the open step needed when it was decided last, of which nothing came since."""
        self._full_since: float | None = None
        """When the open step could be made for the first time; it may wait for what is under way since."""
        self.waited_for: Mapping[str, Sequence[str]] = {}
        """env -> groups that the last decision waits for, though the step is full; to look at."""
        self._selector = load_selector(config)

    # -- what happened ------------------------------------------------------------------------------------------------
    def add(
        self,
        info: GroupInfo,
        *,
        entry_id: str,
        now: float,
        uses: int = 0,
        pushed: float | None = None,
        replaces: str = "",
        came: float | None = None,
    ) -> PooledGroup | None:
        """Takes in one push: a group or a part of one. An entry that is known already is ignored.

        Returns:
            The group, where this push is all of it and nothing more is to come: what it teaches can be told. None else.

        Args:
            info: what was pushed.
            entry_id: its entry in the pool.
            now: seconds; the group's timeout counts from here.
            uses: steps that trained the group before; then it must be whole in this one push (else see `restore`).
            pushed: when it was pushed, on the same clock, if that was before `now`; `max_age_seconds` counts from here.
            replaces: the entry whose place it took, with what that one needed; it is not in the store any more.
            came: when this push came, on the same clock, if its rollouts came before it: a scorer's.

        Raises:
            RlbufferError: the group was used as often as `max_uses` allows, so it cannot be pending.
        """
        if uses:
            self.restore([(entry_id, info)], uses=uses, now=now, pushed=pushed)
            return None
        group = self._pool.add(info, entry_id, now, pushed, replaces, came)
        self._awaited.discard(info.env)
        if not replaces:
            self._patience.heard(info.env, self._pool.now)
        return group

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
        """Takes in tombstones: later pushes of these groups are late."""
        self._pool.close(group_ids)

    def set_published(self, version: int, adapter: str = "") -> None:
        """Takes in which policy version of an adapter workers can sample from now; -1 when none was announced."""
        self._situation.published[adapter] = version

    def set_under_way(self, tickets: Mapping[str, Mapping[int, int]]) -> None:
        """Takes in the tickets that are out: env -> number -> version with which it was taken."""
        self._situation.under_way = tickets

    def pause(self, env: str) -> None:
        """`env` takes no part until it is resumed: no tickets, nothing of it is selected, no step waits for it.

        Its groups in the pool stay there and grow older. Its share goes to the others in proportion.
        """
        self._situation.paused.add(env)
        self._patience.forget(env)

    def resume(self, env: str) -> None:
        """`env` takes part again; what it missed while it was paused is not owed to it."""
        self._situation.paused.discard(env)

    def set_sources(
        self, *, done: Collection[str], declared: Collection[str] = (), others: Collection[str] = ()
    ) -> None:
        """Takes in the envs that send nothing more, and those that may still send something.

        No step waits for envs that are done. Their forming groups close with the next decision where somebody has
        `declared` it; else, as ever, when one is whole or its time is up: an env is done by its tickets when a part of
        each group was read. Once there are no others but paused envs, the steps take what there is; the last decision
        `is_over`.
        """
        situation = self._situation
        situation.done, situation.declared, situation.others = frozenset(done), frozenset(declared), frozenset(others)

    @property
    def needs(self) -> dict[tuple[str, str], int]:
        """(env, what is missing) -> forming groups that wait for a scorer to add it."""
        return self._pool.needs

    def committed(self, plan: StepPlan) -> None:
        """The store committed the plan of the last decision: its groups are gone, the accounts move.

        Raises:
            RlbufferError: it is not the plan that was decided last.
        """
        decided = self._decided
        if decided is None or (decided.step, decided.group_ids) != (plan.step, plan.group_ids):
            raise RlbufferError(f"step {plan.step} was committed, but it is not the plan that was decided last")
        self._situation.accounts, self._situation.adapters = decided.accounts, decided.adapters
        self._situation.pace = decided.pace
        self._step, self._at, self._decided = decided.step, decided.at, None
        self._waits_since, self._full_since = self._at, None
        self._patience.committed(is_full=plan.closed_by not in (ClosedBy.TIMEOUT, ClosedBy.PARTIAL))
        self._pool.consume(plan.group_ids)

    def refused(self, plan: StepPlan, gone: Iterable[str]) -> None:
        """The store refused the plan because entries are gone: forgets them; `next` may plan the step again."""
        self._decided = None
        for entry_id in gone:
            self._pool.remove(entry_id)

    def dropped(self, drops: Iterable[Drop]) -> None:
        """The store made these drops: forgets them. Until then `next` repeats them."""
        self._pool.confirm(drops)

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
            ConfigError: the user's selector or estimator failed.
        """
        pool, patience, situation = self._pool, self._patience, self._situation
        self.waited_for = {}
        self._drop_rest_when_over(step, now, rng)
        limits = situation.limits(world_size)
        fractions, waits_to_learn = situation.fractions(step), 0
        patience.judge(pool.now, [env for env in fractions if budget.has_budget(self._config, env)])
        while True:
            trial, awaited = self._try(step, limits, fractions)
            closed = closing.close(trial, situation, limits, world_size)
            closed = closed or self._close_rest(step, limits, fractions, world_size)
            if closed is None:
                break
            advantages, untrainable = step_plan.advantages_of(closed.laid_out, self._config, self.teaching.estimators)
            useless = [(group, Rejected(Reason.INVALID, why)) for group, why in untrainable]
            useless = useless or closing.useless(closed, self.teaching)
            for group, rejected in useless:  # the step is made of others
                pool.drop(group, *rejected)
            if useless:
                continue
            if closing.waits_to_learn(closed, self.teaching):
                waits_to_learn, closed = len(closed.groups), None
            break
        drops, late = tuple(pool.drops.values()), None
        if closed is not None:
            self._full_since = pool.now if self._full_since is None else self._full_since
            waited = pool.now - self._full_since
            is_over = waited >= self._config.slow_wait_seconds
            self.waited_for = {} if is_over else slow.awaited(situation, step, closed.groups)
            if not self.waited_for:
                return self._plan(step, closed, advantages, fractions, limits, drops)
            late, awaited = slow.reason(situation, step, self.waited_for, waited), ()
        self._decided, self._awaited = None, set(awaited)
        return Decision(
            plan=None,
            state=self._state(self._step, self._at, situation),
            drops=drops,
            why=late or reason(situation, step, trial, limits, fractions, waits_to_learn),
            allowances=admission.allow(situation, step, limits, awaited=awaited),
            dead=patience.dead(pool.now),
            is_over=situation.is_over,
        )

    def allowances(self, step: int, *, world_size: int) -> dict[str, int]:
        """env -> tickets that may be out while `step` is the next to be planned; ``*`` stands for envs not named.

        Decisions carry them; between decisions (the step may not be committed yet) ask here as groups come in.
        """
        return admission.allow(self._situation, step, self._situation.limits(world_size), awaited=self._awaited)

    def lacks_groups(self, world_size: int) -> bool:
        """True while what is ready fills no step, whichever it is: then `next` makes none, unless time or an end
        closes it. Costs nothing."""
        envs = self.pools.values()
        return self._situation.limits(world_size).lacks(
            groups=sum(env.ready_groups for env in envs),
            rollouts=sum(env.ready_rollouts for env in envs),
            tokens=sum(env.ready_tokens for env in envs),
            adapters=len({adapter for env in envs for adapter in env.lanes}),
            close_fill=self._config.close_fill,
        )

    def pool_sums(self, step: int) -> dict[str, dict[str, Any]]:
        """env -> its groups in numbers, after `step`: as :meth:`EnvGroups.sums` says."""
        published = self._situation.published
        steps = 0 if self._config.is_stream else step
        newest = {**published, "": max(steps, published.get("", 0))}
        return {name: env.sums(newest) for name, env in self.pools.items()}

    def silence(self, now: float) -> dict[str, float]:
        """env -> seconds since something of it came, of those of which this batcher has seen any; to say."""
        return self._patience.silence(now)

    def lose(self, drop: Drop) -> None:
        """Something of an env was dropped that was never here, or is here no more; to say."""
        self._pool.lose(drop)

    def sweep(self, step: int) -> tuple[Drop, ...]:
        """Lets go what is too old for `step`, where `next` may not be asked yet. -> what must be dropped."""
        self._pool.sweep_stale(self._situation.steps(step), self._situation.published)
        return tuple(self._pool.drops.values())

    # -- inside -------------------------------------------------------------------------------------------------------
    @staticmethod
    def _state(step: int, at: float, situation: Situation) -> dict[str, Any]:
        """What is known as after `step`, as msgpack types."""
        dumped = budget.dump(situation.accounts) | situation.adapters.dump() | situation.pace.dump()
        return dumped | {"step": step} | ({"at": at} if math.isfinite(at) else {})

    def _drop_rest_when_over(self, step: int, now: float, rng: np.random.Generator) -> None:
        """Drops or closes what time and age have overtaken, and ranks what became ready."""
        situation = self._situation
        self._pool.advance(
            now, step, forgets=not any(situation.adapters.accounts), done=situation.done & situation.declared
        )
        self._waits_since = min(self._waits_since, self._pool.now)  # no step waits for a clock that was set back
        self._pool.sweep_future(situation.steps(step))
        self.sweep(step)
        if self._selector is not None:
            self._pool.rank(self._selector, rng)

    def _try(self, step: int, limits: Limits, fractions: Mapping[str, float]) -> tuple[Trial, Collection[str]]:
        """One trial, what it teaches about who is waited for, and the envs that need at least one ticket."""
        situation, pool = self._situation, self._pool
        trial = self._select(step, limits, fractions)
        for group in trial.surplus:
            most = f"a step holds at most {self._config.flat:g} of flat groups"
            pool.drop(group, Reason.FLAT, f"{self.teaching.flatness(group)}, and {most}")
        situation.short = frozenset(trial.short)
        awaited = admission.awaited_envs(situation, trial, step)
        self._patience.looked(
            pool.now,
            short=[env for env in trial.short + trial.lent if not situation.env_lags(env, step)],
            awaited=[
                env
                for env in awaited
                if not situation.env_lags(env, step) and not admission.waits_for_scorers(situation, env, step)
            ],
        )
        return trial, awaited

    def _select(self, step: int, limits: Limits, fractions: Mapping[str, float], *, waits: bool = True) -> Trial:
        """One trial; unless it `waits`, no env is waited for, and the others fill its place."""
        config, situation = self._config, self._situation
        return select(
            candidates=situation.queues(step),
            deficits={env: account.deficit for env, account in situation.accounts.items()},
            fractions=fractions,
            means={env: mean[0] for env, mean in situation.means(fractions).items()},
            budgeted=[
                env
                for env in fractions
                if waits and fractions[env] > 0 and env not in situation.done and budget.has_budget(config, env)
            ],
            limits=limits,
            unit=config.unit,
            close_fill=config.close_fill,
            teaches=self.teaching.of,
            excused=self._patience.excused(self._pool.now),
            overdue=self._patience.overdue(self._pool.now),
            is_last=situation.last_of(step),
        )

    def _close_rest(
        self, step: int, limits: Limits, fractions: Mapping[str, float], world_size: int
    ) -> closing.Closed | None:
        """Closes a step with what is ready when it is not waited for any longer: `fill_timeout_seconds` are over, or
        nothing more comes."""
        situation, timeout, now = self._situation, self._config.fill_timeout_seconds, self._pool.now
        is_last = situation.is_last
        if not is_last and (timeout is None or now - self._waits_since < timeout):
            return None
        groups = self._select(step, limits, fractions, waits=False).groups
        fresh = [group.pushed for group in groups if not group.used]
        if fresh and (is_last or (timeout is not None and now - min(fresh) >= timeout)):
            closed_by = ClosedBy.END if is_last else ClosedBy.TIMEOUT
            return closing.close_as_it_is(groups, situation, limits, world_size, closed_by)
        if is_last:
            self._pool.drop_rest(paused=situation.paused)
        return None

    def _plan(
        self,
        step: int,
        closed: closing.Closed,
        advantages: NDArray[np.float32],
        fractions: Mapping[str, float],
        limits: Limits,
        drops: tuple[Drop, ...],
    ) -> Decision:
        """The decision to commit a step, and the accounts as they will be then."""
        situation, now, groups = self._situation, self._pool.now, closed.groups
        sizes = [(g.env, g.tokens, g.rollouts) for g in groups]
        accounts = budget.settle(situation.accounts, sizes, fractions, self._config.unit)
        accounted, progress = situation.adapters.settle(step, groups, self._config, situation.published)
        asked: int | None = None
        if not self._config.is_stream:
            progress, asked = adapters.asking(progress, situation.published, situation.youngest_limit, step)
        paced = (
            situation.pace.after(situation.published.get("", -1), len(groups))
            if self._config.is_stream
            else situation.pace
        )
        flat = 0 if self.teaching.is_trainers else sum(not self.teaching.of(group) for group in groups)
        plan = step_plan.step_plan(
            step, closed.laid_out, advantages, closed.plan, closed.closed_by, self._config, progress, flat
        )
        self._awaited.clear()
        self._decided = _Decided(step, plan.group_ids, accounts, accounted, paced, now)
        situation.short = frozenset()
        after = replace(situation, accounts=accounts, adapters=accounted, pace=paced)
        return Decision(
            plan=plan,
            state=self._state(step, now, after),
            drops=drops,
            allowances=admission.allow(after, step + 1, limits, taken=groups),
            waiting_for_version=asked,
            dead=self._patience.dead(now),
        )
