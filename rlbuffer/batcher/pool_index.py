"""The batcher's index of what is pending: every entry read once, every group in a bucket where it will be looked for.

Nothing here walks the pool. A step touches the groups that it selects or drops; what it needs to know of the others is
kept as running sums.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from rlbuffer.batcher.age import age_at, is_future, oldest_version
from rlbuffer.batcher.env_pool import EnvPool
from rlbuffer.batcher.groups import GroupState, Rejected, drop_part
from rlbuffer.batcher.ordering import Selector, priority_of
from rlbuffer.batcher.teaching import Teaching
from rlbuffer.config.batcher import BatcherConfig, remembered_steps
from rlbuffer.errors import InvalidRollout
from rlbuffer.records.info import GroupInfo
from rlbuffer.records.states import Reason
from rlbuffer.records.step_plan import Drop

TOMBSTONE_SECONDS = 3600.0
"""Seconds that a closed group is remembered at least, so that a late part of it is known as late; and for some
steps."""


class PoolIndex:
    """All pending groups, tombstones of closed ones, and drops that the store has not confirmed yet."""

    def __init__(self, config: BatcherConfig, teaching: Teaching) -> None:
        self.config = config
        self.teaching = teaching
        self.ranks = config.order == "priority" or ":" in config.order
        """Priorities decide the order, not versions."""
        self.envs: dict[str, EnvPool] = {}
        self.drops: dict[tuple[str, ...], Drop] = {}
        """entry ids -> drop; repeated until confirmed."""
        self.needs: Counter[tuple[str, str]] = Counter()
        """(env, what is missing) -> forming groups that need it."""
        self.now = float("-inf")
        self._dropping: dict[str, tuple[tuple[str, ...], GroupInfo]] = {}
        """entry id -> all entries of its unconfirmed drop, and what it holds."""
        self._groups: dict[str, GroupState] = {}
        self._entries: dict[str, str] = {}
        self._closed: OrderedDict[str, tuple[float, int]] = OrderedDict()
        """Closed group -> when, and the step that was planned then."""
        self._step = 0
        self._unjudged: list[GroupState] = []
        """Groups that got a part since the last sweep: one of them may be from the future."""
        self._unranked: list[GroupState] = []

    # -- arriving -----------------------------------------------------------------------------------------------------
    def add(self, info: GroupInfo, entry_id: str, now: float, pushed: float | None = None, replaces: str = "") -> None:
        """Merges one push into its group; an entry that is already here is ignored. `replaces` is gone then."""
        if entry_id in self._entries:
            return
        self._hear(now)
        if replaces in self._entries and self._exchange(info, entry_id, replaces):
            return
        self._entries[entry_id] = info.group_id
        if info.group_id in self._closed:
            self._queue(drop_part(entry_id, info, Rejected(Reason.LATE, "the group is closed")), {entry_id: info})
            return
        group = self._groups.get(info.group_id)
        if group is None:
            self._begin(info, entry_id, pushed)
            return
        env = self._env(group.env)
        lane = env.lane(group.adapter)
        if not group.is_closed:
            lane.forming.discard(group)
        before = group.tokens
        self._take(group, entry_id, info)
        if group.is_closed:
            return
        env.forming_tokens += group.tokens - before
        if group.rollouts:
            lane.forming.add(group)
        self._settle(group, env, is_over=False)

    def _begin(self, info: GroupInfo, entry_id: str, pushed: float | None) -> None:
        """Takes in the first part of a group. Most groups are whole with it, and never form."""
        group = self._groups[info.group_id] = GroupState(info, self.now, pushed)
        env = self._env(group.env)
        if env.max_age_seconds is not None:
            env.expiring.append(group)
        self._take(group, entry_id, info)
        if group.is_whole(env.least):
            self._finish(group, env)
            return
        env.order[group.group_id] = group
        env.forming_tokens += group.tokens
        if group.rollouts:
            env.lane(group.adapter).forming.add(group)
        self._settle(group, env, is_over=False)

    def _exchange(self, info: GroupInfo, entry_id: str, old: str) -> bool:
        """Puts a push in the place of one that is here. -> False when its group waits for nothing any more: then it
        is a push like any other."""
        group = self._groups.get(info.group_id)
        if group is None or group.is_closed or old not in group.parts:
            self.remove(old)
            return False
        del self._entries[old]
        self._entries[entry_id] = info.group_id
        env = self._env(group.env)
        lane = env.lane(group.adapter)
        lane.forming.discard(group)
        before = group.tokens
        self._count_needs(group, -1)
        for key, part, why in group.exchange(old, entry_id, info, self.config.row_tokens):
            self._queue(drop_part(key, part, why), {key: part})
        self._count_needs(group, 1)
        env.forming_tokens += group.tokens - before
        if group.rollouts:
            lane.forming.add(group)
        self._settle(group, env, is_over=False)
        return True

    def _count_needs(self, group: GroupState, sign: int) -> None:
        for need in group.needs:
            self.needs[group.env, need] += sign

    def _take(self, group: GroupState, entry_id: str, info: GroupInfo) -> None:
        self._count_needs(group, -1)
        why = group.take(entry_id, info, self.config.row_tokens)
        self._unjudged.append(group)
        self._count_needs(group, 1)
        if why is not None:
            self._queue(drop_part(entry_id, info, why), {entry_id: info})

    def restore(
        self, parts: Sequence[tuple[str, GroupInfo]], *, uses: int, now: float, pushed: float | None = None
    ) -> None:
        """Takes in a group that was trained `uses` times before; a group that is already here is ignored."""
        self._hear(now)
        first = parts[0][1]
        if first.group_id in self._groups:
            return
        group = GroupState(first, self.now, pushed, uses)
        for entry_id, info in parts:
            self._entries[entry_id] = group.group_id
            group.take(entry_id, info, self.config.row_tokens)
            group.parts[entry_id] = info
        group.is_closed = True
        self._groups[group.group_id] = group
        env = self._env(group.env)
        env.lane(group.adapter).used.add(group)
        env.count(group, 1)
        self._unjudged.append(group)  # steps that trained it may be void
        if not group.rollouts:
            self.drop(group, Reason.OVERSIZED, "no rollout of it fits a row any more")
        elif env.max_age_seconds is not None:
            env.expiring.append(group)

    def _settle(self, group: GroupState, env: EnvPool, *, is_over: bool, is_done: bool = False) -> None:
        """Moves a forming group on if it is whole, too small for ever, or its time is up (or its env `is_done`)."""
        timeout = None if is_done else self.config.group_timeout_seconds
        why = group.too_small(env.least, is_over=is_over, timeout_seconds=timeout)
        if why is not None:
            self.drop(group, why.reason, why.detail)
        elif is_over or group.is_whole(env.least):
            self._finish(group, env)

    def _finish(self, group: GroupState, env: EnvPool) -> None:
        """The group takes no more rollouts: it is ready, or nobody wants it."""
        if self.config.flat == "drop" and not self.teaching.of(group):
            self.drop_flat(group)
            return
        self._unform(group)
        group.is_closed = True
        env.lane(group.adapter).ready.add(group)
        env.count(group, 1)
        env.lost = ""
        if self.ranks:
            self._unranked.append(group)

    # -- leaving ------------------------------------------------------------------------------------------------------
    def drop(self, group: GroupState, reason: Reason, detail: str) -> None:
        """Takes a group out and queues its drop."""
        self._forget(group)
        if group.parts:
            self._queue(group.drop(reason, detail), group.parts)

    def let_go(self, *, paused: Collection[str]) -> None:
        """Drops what is left when no further step can be made."""
        for name in sorted(self.envs.keys() - set(paused)):
            for lane in self.envs[name].lanes.values():
                for group in [*lane.ready.walk(newest_first=False, oldest=0)]:
                    self.drop(group, Reason.STALE, "nothing more comes, and no step can hold it")
                for group in [*lane.used.walk(newest_first=False, oldest=0)]:
                    self.drop(group, Reason.VOID, "nothing more comes that it could be trained again with")

    def drop_flat(self, group: GroupState) -> None:
        """Drops a group that teaches nothing: it, or more of its kind, is not wanted."""
        rest = "" if self.config.flat == "drop" else f", and a step holds at most {self.config.flat:g} of flat groups"
        self.drop(group, Reason.FLAT, self.teaching.flatness(group) + rest)

    def consume(self, group_ids: Iterable[str]) -> None:
        """A commit consumed these groups: forgets them, or keeps them for another use.

        Late parts of them are still known as late.
        """
        for group_id in group_ids:
            group = self._groups.get(group_id)
            if group is not None and group.used + 1 < self.config.max_uses:
                lane = self._env(group.env).lane(group.adapter)
                lane.discard(group)
                group.used += 1
                lane.used.add(group)
            elif group is not None:
                self._forget(group)
                for entry_id in group.parts:
                    self._entries.pop(entry_id, None)

    def remove(self, entry_id: str) -> None:
        """Forgets an entry that is gone from the store; what is left of its group is no longer whole and is dropped."""
        group = self._groups.get(self._entries.pop(entry_id, ""))
        self._withdraw(entry_id)
        if group is None or entry_id not in group.parts:
            return
        self._forget(group)
        del group.parts[entry_id]
        if group.parts:
            self._queue(group.drop(Reason.INVALID, f"its part {entry_id} is gone from the pool"), group.parts)

    def close(self, group_ids: Iterable[str]) -> None:
        """Remembers groups as closed; what is pending of them is late."""
        for group_id in group_ids:
            group = self._groups.get(group_id)
            if group is not None and not group.used:
                self.drop(group, Reason.LATE, "the group is closed")
            self._closed[group_id] = self.now, self._step

    def confirm(self, drops: Iterable[Drop]) -> None:
        """Forgets drops that the store has made."""
        for drop in drops:
            self.drops.pop(drop.entry_ids, None)
            for entry_id in drop.entry_ids:
                self._entries.pop(entry_id, None)
                self._dropping.pop(entry_id, None)

    # -- time and age -------------------------------------------------------------------------------------------------
    @property
    def is_empty(self) -> bool:
        """No group is here, and every drop is confirmed."""
        return not self._groups and not self.drops

    def advance(self, now: float, step: int, *, forgets: bool = True, done: Collection[str] = ()) -> None:
        """Closes or drops the groups whose time is up, and those of envs that are said to be `done`, unless a scorer
        may still complete them; forgets old tombstones unless told otherwise.

        `step` is the one that is planned.
        """
        self._hear(now)
        if not self._step:  # what a takeover has closed was closed before this step
            self._closed = OrderedDict((group_id, (at, step)) for group_id, (at, _) in self._closed.items())
        self._step = step
        for name in sorted(done):
            for group in list(self.envs[name].order.values()) if name in self.envs else ():
                if not group.needs:
                    self._settle(group, self.envs[name], is_over=True, is_done=True)
        timeout = self.config.group_timeout_seconds
        for env in list(self.envs.values()):
            while env.order:
                group = next(iter(env.order.values()))
                if group.since + timeout > self.now:
                    break
                self._settle(group, env, is_over=True)
        for env in list(self.envs.values()):
            limit = env.max_age_seconds
            while limit is not None and env.expiring and env.expiring[0].pushed + limit < self.now:
                group = env.expiring.popleft()
                if self._groups.get(group.group_id) is group:
                    waited = self.now - group.pushed
                    self.drop(group, Reason.STALE, f"{waited:.1f} s in the pool > max_age_seconds {limit:g}")
        keep, steps = max(TOMBSTONE_SECONDS, 2 * timeout), remembered_steps(self.config.largest_max_age)
        while forgets and self._closed:
            at, closed = next(iter(self._closed.values()))
            if at + keep >= self.now or closed + steps >= step:
                break
            self._closed.popitem(last=False)

    def rank(self, selector: Selector, rng: np.random.Generator) -> None:
        """Gives the groups that became ready their priority; one that gets none is dropped.

        Raises:
            ConfigError: the selector failed.
        """
        unranked, self._unranked = self._unranked, []
        for group in unranked:
            if self._groups.get(group.group_id) is not group:
                continue
            try:
                priority = priority_of(group, selector, rng, self.config.order, self.teaching.lesson(group))
            except InvalidRollout as error:
                self.drop(group, Reason.INVALID, str(error))
                continue
            self._env(group.env).lane(group.adapter).ranked.add(group, priority)

    def sweep_stale(self, env: str, step: int, adapter: str = "") -> None:
        """Drops an env's groups of one adapter that are too old for `step`, counted in the adapter's own steps. So
        they are for every later step."""
        max_age = self.config.for_env(env).max_age
        lane = self._env(env).lane(adapter)
        oldest = oldest_version(step, max_age)
        whose = f" of adapter {adapter}" if adapter else ""
        for index in (lane.ready, lane.forming, lane.used):
            for group in index.pop_older_than(oldest):
                age = age_at(step, group.min_version)
                self.drop(group, Reason.STALE, f"age {age} > max_age {max_age} at step {step}{whose}")

    def sweep_future(self, step_of: Callable[[str], int]) -> None:
        """Drops groups sampled by weights that are not made yet. Only what came since is looked at: steps only grow, so
        a group that is not from the future never will be. One that is must go at once, also while it is forming: the
        version that it names will be made one day, as another one.

        Args:
            step_of: adapter -> the step that is planned, in the adapter's count.
        """
        unjudged, self._unjudged = self._unjudged, []
        steps: dict[str, int] = {}
        for group in unjudged:
            step = steps.get(group.adapter, 0)
            if not step:
                step = steps[group.adapter] = step_of(group.adapter)
            if is_future(step, group.max_version) and self._groups.get(group.group_id) is group:
                whose = f" of adapter {group.adapter}" if group.adapter else ""
                self.drop(
                    group, Reason.FUTURE, f"policy version {group.max_version} > {step - 1} at step {step}{whose}"
                )

    def _hear(self, now: float) -> None:
        if self.now == float("-inf"):
            # A takeover closes groups before it tells any time: their tombstones age from here.
            self._closed = OrderedDict((group_id, (now, step)) for group_id, (_, step) in self._closed.items())
        self.now = max(self.now, now)

    # -- inside -------------------------------------------------------------------------------------------------------
    def _env(self, name: str) -> EnvPool:
        pool = self.envs.get(name)
        if pool is None:
            own = self.config.for_env(name)
            pool = self.envs[name] = EnvPool(least=own.min_group_size, max_age_seconds=own.max_age_seconds)
        return pool

    def pending_tokens(self, name: str) -> int:
        """Tokens of an env's valid rollouts, forming and ready."""
        env = self.envs.get(name)
        return 0 if env is None else env.ready_tokens + env.forming_tokens

    def _queue(self, drop: Drop, parts: Mapping[str, GroupInfo]) -> None:
        self.drops[drop.entry_ids] = drop
        self._dropping.update({entry_id: (drop.entry_ids, info) for entry_id, info in parts.items()})
        if drop.reason not in (Reason.LATE, Reason.DUPLICATE) and drop.rollouts:  # those groups did train
            self._env(drop.env).lost = f"{drop.reason}: {drop.detail}"

    def _withdraw(self, entry_id: str) -> None:
        """An entry that is gone cannot be dropped any more; what else its drop holds still must be."""
        entry_ids, info = self._dropping.pop(entry_id, ((), None))
        drop = self.drops.pop(entry_ids, None)
        if drop is None or info is None or len(entry_ids) == 1:
            return
        left = tuple(e for e in entry_ids if e != entry_id)
        rollouts, tokens = max(0, drop.rollouts - len(info.rollouts)), max(0, drop.tokens - info.tokens)
        self.drops[left] = replace(drop, entry_ids=left, rollouts=rollouts, tokens=tokens)
        self._dropping.update({e: (left, self._dropping[e][1]) for e in left})

    def _unform(self, group: GroupState) -> None:
        env = self._env(group.env)
        if env.order.pop(group.group_id, None) is not None:
            env.lane(group.adapter).forming.discard(group)
            env.forming_tokens -= group.tokens

    def _forget(self, group: GroupState) -> None:
        env = self._env(group.env)
        if group.is_closed:
            env.lane(group.adapter).discard(group)
            env.count(group, -1)
        else:
            self._unform(group)
        self._count_needs(group, -1)
        del self._groups[group.group_id]
        self._closed[group.group_id] = self.now, self._step
