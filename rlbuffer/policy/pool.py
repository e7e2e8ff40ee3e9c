"""The batcher's index of what is pending: every entry read once, every group in a bucket where it will be looked for.

Nothing here walks the pool. A step touches the groups that it selects or drops; what it needs to know of the others is
kept as running sums.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from heapq import heappop, heappush

import numpy as np

from rlbuffer.batches import Drop
from rlbuffer.config import BatcherConfig
from rlbuffer.policy.age import VersionIndex, age_at, is_future, oldest_version
from rlbuffer.policy.groups import GroupState, Rejected, drop_part
from rlbuffer.policy.ordering import PriorityIndex, Selector, priority_of
from rlbuffer.records import GroupInfo

TOMBSTONE_SECONDS = 3600.0
"""How long a closed group is remembered at least, so that a late part of it is known as late."""


class EnvPool:
    """One env's groups."""

    __slots__ = (
        "expiring",
        "forming",
        "forming_tokens",
        "lost",
        "order",
        "ranked",
        "ready",
        "ready_groups",
        "ready_rollouts",
        "ready_tokens",
        "used",
    )

    def __init__(self) -> None:
        self.ready: VersionIndex[GroupState] = VersionIndex()
        self.forming: VersionIndex[GroupState] = VersionIndex()
        self.order: OrderedDict[str, GroupState] = OrderedDict()
        """Forming groups by their first part, the oldest first: whose timeout comes next."""
        self.used: VersionIndex[GroupState] = VersionIndex()
        """Groups that were trained and may be trained again; fresh ones go before them."""
        self.ranked = PriorityIndex()
        """Ready groups by priority; empty where versions decide the order."""
        self.expiring: deque[GroupState] = deque()
        """Groups in the order of their first push; empty where `max_age_seconds` is not set."""
        self.forming_tokens = 0
        self.ready_groups = 0
        self.ready_rollouts = 0
        self.ready_tokens = 0
        self.lost = ""
        """Why the last group was dropped, while none has become ready since: an env may lose all it sends."""

    def count(self, group: GroupState, sign: int) -> None:
        """Moves the running sums of ready groups."""
        self.ready_groups += sign
        self.ready_rollouts += sign * group.rollouts
        self.ready_tokens += sign * group.tokens


class Pool:
    """All pending groups, tombstones of closed ones, and drops that the store has not confirmed yet."""

    def __init__(self, config: BatcherConfig) -> None:
        self.config = config
        self.ranks = config.order == "priority" or ":" in config.order
        """Priorities decide the order, not versions."""
        self.envs: dict[str, EnvPool] = {}
        self.drops: dict[tuple[str, ...], Drop] = {}
        """entry ids -> drop; repeated until confirmed."""
        self.now = float("-inf")
        self.step = 0
        """Last step that was asked for."""
        self._dropping: dict[str, tuple[tuple[str, ...], GroupInfo]] = {}
        """entry id -> all entries of its unconfirmed drop, and what it holds."""
        self._groups: dict[str, GroupState] = {}
        self._entries: dict[str, str] = {}
        self._closed: OrderedDict[str, float] = OrderedDict()
        self._future: list[tuple[int, int, GroupState]] = []
        self._unranked: list[GroupState] = []
        self._sequence = 0

    # -- arriving -----------------------------------------------------------------------------------------------------
    def add(self, info: GroupInfo, entry_id: str, now: float, pushed: float | None = None) -> None:
        """Merges one push into its group; an entry that is already here is ignored."""
        if entry_id in self._entries:
            return
        self._hear(now)
        self._entries[entry_id] = info.group_id
        if info.group_id in self._closed:
            self._queue(drop_part(entry_id, info, Rejected("late", "the group is closed")), {entry_id: info})
            return
        group = self._groups.get(info.group_id)
        if group is None:
            group = self._groups[info.group_id] = GroupState(info, self.now, pushed)
            self._env(group.env).order[group.group_id] = group
            if self.config.for_env(group.env, "max_age_seconds") is not None:
                self._env(group.env).expiring.append(group)
        env = self._env(group.env)
        if not group.is_closed:
            env.forming.discard(group)
        before = group.tokens
        why = group.take(entry_id, info, self.config.row_tokens)
        if why is not None:
            self._queue(drop_part(entry_id, info, why), {entry_id: info})
        if group.is_closed:
            return
        env.forming_tokens += group.tokens - before
        if group.members:
            env.forming.add(group)
        self._settle(group, is_over=False)

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
        env.used.add(group)
        env.count(group, 1)
        if not group.members:
            self.drop(group, "oversized", "no rollout of it fits a row any more")
        elif self.config.for_env(group.env, "max_age_seconds") is not None:
            env.expiring.append(group)

    def _settle(self, group: GroupState, *, is_over: bool) -> None:
        """Moves a forming group on if it is whole, too small for ever, or its time is up."""
        least = self.config.for_env(group.env, "min_group_size")
        why = group.too_small(least, is_over=is_over, timeout_seconds=self.config.group_timeout_seconds)
        if why is not None:
            self.drop(group, why.reason, why.detail)
        elif is_over or group.is_whole(least):
            if self.config.flat == "drop" and group.is_flat:
                self.drop_flat(group)
                return
            self._unform(group)
            group.is_closed = True
            env = self._env(group.env)
            env.ready.add(group)
            env.count(group, 1)
            env.lost = ""
            if self.ranks:
                self._unranked.append(group)
            if is_future(self.step, group.max_version):
                self._sequence += 1
                heappush(self._future, (-group.max_version, self._sequence, group))

    # -- leaving ------------------------------------------------------------------------------------------------------
    def drop(self, group: GroupState, reason: str, detail: str) -> None:
        """Takes a group out and queues its drop."""
        self._forget(group)
        if group.parts:
            self._queue(group.drop(reason, detail), group.parts)

    def drop_flat(self, group: GroupState) -> None:
        """Drops a group without variance in reward: it, or more of its kind, is not wanted."""
        rest = "" if self.config.flat == "drop" else f", and a step holds at most {self.config.flat:g} of flat groups"
        self.drop(group, "flat", f"all {group.rollouts} rollouts have reward {group.members[0].info.reward:g}{rest}")

    def consume(self, group_ids: Iterable[str]) -> None:
        """A commit consumed these groups: forgets them, or keeps them for another use.

        Late parts of them are still known as late.
        """
        for group_id in group_ids:
            group = self._groups.get(group_id)
            if group is not None and group.used + 1 < self.config.max_uses:
                env = self._env(group.env)
                env.ready.discard(group)
                env.ranked.discard(group)
                env.used.discard(group)
                group.used += 1
                env.used.add(group)
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
            self._queue(group.drop("invalid", f"its part {entry_id} is gone from the pool"), group.parts)

    def close(self, group_ids: Iterable[str]) -> None:
        """Remembers groups as closed; what is pending of them is late."""
        for group_id in group_ids:
            group = self._groups.get(group_id)
            if group is not None and not group.used:
                self.drop(group, "late", "the group is closed")
            self._closed[group_id] = self.now

    def confirm(self, drops: Iterable[Drop]) -> None:
        """Forgets drops that the store has made."""
        for drop in drops:
            self.drops.pop(drop.entry_ids, None)
            for entry_id in drop.entry_ids:
                self._entries.pop(entry_id, None)
                self._dropping.pop(entry_id, None)

    # -- time and age -------------------------------------------------------------------------------------------------
    def advance(self, now: float) -> None:
        """Closes or drops the groups whose time is up, and forgets old tombstones."""
        self._hear(now)
        timeout = self.config.group_timeout_seconds
        for env in list(self.envs.values()):
            while env.order:
                group = next(iter(env.order.values()))
                if group.since + timeout > self.now:
                    break
                self._settle(group, is_over=True)
        for name, env in list(self.envs.items()):
            limit = self.config.for_env(name, "max_age_seconds")
            while limit is not None and env.expiring and env.expiring[0].pushed + limit < self.now:
                group = env.expiring.popleft()
                if self._groups.get(group.group_id) is group:
                    waited = self.now - group.pushed
                    self.drop(group, "stale", f"{waited:.1f} s in the pool > max_age_seconds {limit:g}")
        keep = max(TOMBSTONE_SECONDS, 2 * timeout)
        while self._closed and next(iter(self._closed.values())) + keep < self.now:
            self._closed.popitem(last=False)

    def rank(self, selector: Selector, rng: np.random.Generator) -> None:
        """Gives the groups that became ready their priority."""
        unranked, self._unranked = self._unranked, []
        for group in unranked:
            if self._groups.get(group.group_id) is group:
                self._env(group.env).ranked.add(group, priority_of(group, selector, rng, self.config.order))

    def sweep_stale(self, env: str, step: int) -> None:
        """Drops an env's groups that are too old for `step` and for every later one."""
        max_age = self.config.for_env(env, "max_age")
        pool = self._env(env)
        oldest = oldest_version(step, max_age)
        for index in (pool.ready, pool.forming, pool.used):
            for group in index.pop_older_than(oldest):
                age = age_at(step, group.min_version)
                self.drop(group, "stale", f"age {age} > max_age {max_age} at step {step}")

    def sweep_future(self, step: int) -> None:
        """Drops groups sampled by weights that `step` does not have yet."""
        self.step = step
        while self._future and is_future(step, -self._future[0][0]):
            _, _, group = heappop(self._future)
            if self._groups.get(group.group_id) is group:
                self.drop(group, "future", f"policy version {group.max_version} > {step - 1} at step {step}")
        # What is left at the top is not from the future, so nothing below it is: steps only grow.
        self._future.clear()

    def _hear(self, now: float) -> None:
        if self.now == float("-inf"):
            # A takeover closes groups before it tells any time: their tombstones age from here.
            self._closed = OrderedDict.fromkeys(self._closed, now)
        self.now = max(self.now, now)

    # -- inside -------------------------------------------------------------------------------------------------------
    def _env(self, name: str) -> EnvPool:
        pool = self.envs.get(name)
        if pool is None:
            pool = self.envs[name] = EnvPool()
        return pool

    def pending_tokens(self, name: str) -> int:
        """Tokens of an env's valid rollouts, forming and ready."""
        env = self.envs.get(name)
        return 0 if env is None else env.ready_tokens + env.forming_tokens

    def _queue(self, drop: Drop, parts: Mapping[str, GroupInfo]) -> None:
        self.drops[drop.entry_ids] = drop
        self._dropping.update({entry_id: (drop.entry_ids, info) for entry_id, info in parts.items()})
        if drop.reason not in ("late", "duplicate") and drop.rollouts:  # those come of groups that did train
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
            env.forming.discard(group)
            env.forming_tokens -= group.tokens

    def _forget(self, group: GroupState) -> None:
        env = self._env(group.env)
        if group.is_closed:
            env.ready.discard(group)
            env.ranked.discard(group)
            env.used.discard(group)
            env.count(group, -1)
        else:
            self._unform(group)
        del self._groups[group.group_id]
        self._closed[group.group_id] = self.now
