"""The index of what is pending: every entry read once, every group where it will be looked for.

::

    add, restore --> forming --(all came and nothing lacks; its time is up)--> ready --consume--> used, or gone
                        |                                                                 |                 |
                        +--advance, sweep_future, sweep_stale, rank, close, remove, drop--+-----------------+
                                                    |
                                                    v
                                   dropped(reason): in `drops` until `confirm`

Only :class:`Pool` moves groups, and nothing walks all of them: a step touches those that it selects or drops, and what
it needs to know of the others is kept as running sums. A group changes between `EnvGroups.remove`, which takes it out
of every index and sum, and `EnvGroups.add`, which puts it where it belongs by then.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from itertools import chain, count
from typing import Any

import numpy as np

from rlbuffer.batcher.age import VersionIndex, age_at, is_future, oldest_version
from rlbuffer.batcher.group import PooledGroup, Rejected, drop_part
from rlbuffer.batcher.ordering import PriorityIndex, Selector, priority_of
from rlbuffer.batcher.teaching import Teaching
from rlbuffer.config.batcher import BatcherConfig, EnvSettings, remembered_steps
from rlbuffer.errors import InvalidRollout
from rlbuffer.records.info import GroupInfo
from rlbuffer.records.states import Reason, Trait
from rlbuffer.records.step_plan import Drop

USUAL_SECONDS = 20.0
"""An env that loses all it sends for so long is told of, even for a reason that is usual."""
TOMBSTONE_SECONDS = 3600.0
"""Seconds that a closed group is remembered at least, so that a late part of it is known as late; and for some
steps."""
StepOf = Callable[[str], int]
"""adapter -> the step that is planned, in the adapter's own count."""


class Lane:
    """The groups of one env and adapter: versions of different adapters cannot be compared."""

    __slots__ = ("forming", "ranked", "ready", "used")

    def __init__(self) -> None:
        self.forming = VersionIndex()
        """Those of which a rollout has joined."""
        self.ready = VersionIndex()
        self.used = VersionIndex()
        """Groups that were trained and may be trained again; fresh ones go before them."""
        self.ranked = PriorityIndex()
        """Ready groups by priority; empty where versions decide the order."""


class EnvGroups:
    """One env's groups by adapter, and running sums of them. Only the pool changes it."""

    __slots__ = (
        "_order",
        "due",
        "expiring",
        "forming",
        "forming_tokens",
        "lanes",
        "lost",
        "lost_at",
        "needs",
        "ready_groups",
        "ready_rollouts",
        "ready_tokens",
        "repeated",
        "settings",
    )

    def __init__(self, settings: EnvSettings) -> None:
        self.settings = settings
        self.lanes: dict[str, Lane] = {}
        """Adapter -> its groups."""
        self.needs: Counter[str] = Counter()
        """What is missing -> forming groups that need it."""
        self.forming: OrderedDict[str, PooledGroup] = OrderedDict()
        """In the order in which their first parts were read."""
        self._order = count()
        self.due: list[tuple[float, int, str]] = []
        """A heap of what is or was forming, by :attr:`PooledGroup.since`: a scorer's push may be of the oldest."""
        self.expiring: list[tuple[float, int, PooledGroup]] = []
        """A heap of groups by their first push; empty where `max_age_seconds` is not set."""
        self.forming_tokens = 0
        self.ready_groups = 0
        """Those that were used before count, too."""
        self.ready_rollouts = 0
        self.ready_tokens = 0
        self.lost: Drop | None = None
        """The last drop, while no group has become ready since: an env may lose all it sends."""
        self.lost_at = 0.0
        """When the first of these was dropped, on the pool's clock."""
        self.repeated = 0
        """Rollouts since then that came again, or of groups that are gone. Fewer than a group has are stragglers of one
        that trained."""

    def loss(self, now: float) -> str:
        """Why the last group was dropped, where that is worth a word; "" elsewhere."""
        lost = self.lost
        if lost is None or (Trait.USUAL in lost.reason.traits and now - self.lost_at < USUAL_SECONDS):
            return ""
        return f"{lost.reason}: {lost.detail}"

    def lane(self, adapter: str) -> Lane:
        """The adapter's groups."""
        lane = self.lanes.get(adapter)
        if lane is None:
            lane = self.lanes[adapter] = Lane()
        return lane

    def remove(self, group: PooledGroup) -> None:
        """Takes a group out of every index and sum, so that it may change. Its place in time it keeps until it ends or
        is ready."""
        self._count(group, -1)
        lane = self.lane(group.adapter)
        if group.is_ready:
            lane.ready.discard(group)
            lane.used.discard(group)
            lane.ranked.discard(group)
        else:
            lane.forming.discard(group)

    def make_older(self, group: PooledGroup, since: float, pushed: float) -> None:
        """A forming group that was taken out began before: a scorer has pushed its first part again."""
        group.since, group.pushed = min(group.since, since), min(group.pushed, pushed)
        heappush(self.due, (group.since, next(self._order), group.group_id))
        self.watch_age(group)

    def watch_age(self, group: PooledGroup) -> None:
        """Takes note of when the group will be too old, by the clock."""
        if self.settings.max_age_seconds is not None:
            heappush(self.expiring, (group.pushed, next(self._order), group))

    def add(self, group: PooledGroup) -> None:
        """Puts a group where it belongs."""
        self._count(group, 1)
        lane = self.lane(group.adapter)
        if group.is_ready:
            (lane.used if group.used else lane.ready).add(group)
            return
        if group.group_id not in self.forming:
            heappush(self.due, (group.since, next(self._order), group.group_id))
        self.forming[group.group_id] = group
        if group.rollouts:
            lane.forming.add(group)

    def ready(self, unit: str) -> int:
        """How much is ready, in a budget's unit."""
        return {"tokens": self.ready_tokens, "rollouts": self.ready_rollouts}.get(unit, self.ready_groups)

    def sums(self, newest: Mapping[str, int]) -> dict[str, Any]:
        """The groups in numbers; ages count from the adapter's `newest` version. Costs as much as versions are held."""
        ages: Counter[str] = Counter()
        for adapter, lane in self.lanes.items():
            for version, groups in chain(lane.forming.counts(), lane.ready.counts(), lane.used.counts()):
                ages[str(max(0, newest.get(adapter, 0) - version))] += groups
        return {
            "groups_ready": self.ready_groups,
            "groups_forming": len(self.forming),
            "rollouts_ready": self.ready_rollouts,
            "tokens_ready": self.ready_tokens,
            "tokens_forming": self.forming_tokens,
            "ages": dict(ages),
        }

    def _count(self, group: PooledGroup, sign: int) -> None:
        if group.is_ready:
            self.ready_groups += sign
            self.ready_rollouts += sign * group.rollouts
            self.ready_tokens += sign * group.tokens
            return
        self.forming_tokens += sign * group.tokens
        for need in group.needs:
            self.needs[need] += sign


class Pool:
    """All pending groups, tombstones of closed ones, and drops that the store has not confirmed yet."""

    def __init__(self, config: BatcherConfig, teaching: Teaching) -> None:
        self.config = config
        self.teaching = teaching
        self.envs: dict[str, EnvGroups] = {}
        """To look at."""
        self.drops: dict[tuple[str, ...], Drop] = {}
        """entry ids -> drop; repeated until confirmed."""
        self.now = float("-inf")
        self._ranks = config.order == "priority" or ":" in config.order
        """Priorities decide the order, not versions."""
        self._dropping: dict[str, tuple[tuple[str, ...], GroupInfo]] = {}
        """entry id -> all entries of its unconfirmed drop, and what it holds."""
        self._groups: dict[str, PooledGroup] = {}
        self._entries: dict[str, str] = {}
        """entry id -> its group."""
        self._closed: OrderedDict[str, tuple[float, int]] = OrderedDict()
        """Closed group -> when, and the step that was planned then."""
        self._began: tuple[float, int] | None = None
        """The first time and step that were told: what was closed before, by a takeover, was closed then."""
        self._step = 0
        self._unjudged: list[PooledGroup] = []
        """Groups that got a part since the last sweep: one of them may be from the future."""
        self._unranked: list[PooledGroup] = []

    # -- arriving -----------------------------------------------------------------------------------------------------
    def add(
        self,
        info: GroupInfo,
        entry_id: str,
        now: float,
        pushed: float | None = None,
        replaces: str = "",
        came: float | None = None,
    ) -> PooledGroup | None:
        """Merges one push into its group; an entry that is already here is ignored. `replaces` is gone then. -> the
        group, where this push is all of it, and nothing more is to come.

        Groups of its env whose time was up when it came are closed before: what joins, and which group is ready first,
        does not depend on when somebody looked.
        """
        if entry_id in self._entries:
            return None
        self.now = max(self.now, now)
        self._close_over(self.env(info.env), now if came is None else came)
        group = self._groups.get(info.group_id)
        if replaces in self._entries and self._exchange(info, entry_id, replaces):
            return _alone(group, entry_id)
        self._entries[entry_id] = info.group_id
        if info.group_id in self._closed:
            self._queue(drop_part(entry_id, info, Rejected(Reason.LATE, "the group is closed")), {entry_id: info})
            return None
        group = self._groups.get(info.group_id)
        if group is None:
            group = self._begin(info, now, pushed)
        elif not group.is_ready:
            env = self._groups_of(group.env)
            env.remove(group)
            first = now if pushed is None else pushed
            if now < group.since or first < group.pushed:
                env.make_older(group, now, first)
        why = group.take(entry_id, info, self.config.row_tokens)
        if why is not None:
            self._queue(drop_part(entry_id, info, why), {entry_id: info})
        self._unjudged.append(group)
        if not group.is_ready:
            self._put_back(group)
        return _alone(group, entry_id)

    def restore(
        self, parts: Sequence[tuple[str, GroupInfo]], *, uses: int, now: float, pushed: float | None = None
    ) -> None:
        """Takes in a group that was trained `uses` times before; a group that is already here is ignored."""
        self.now = max(self.now, now)
        first = parts[0][1]
        if first.group_id in self._groups:
            return
        group = self._begin(first, now, pushed, uses)
        for entry_id, info in parts:
            self._entries[entry_id] = group.group_id
            why = group.take(entry_id, info, self.config.row_tokens)
            if why is not None:
                group.keep_rejected(entry_id, info, why)
        group.is_ready = True
        self._unjudged.append(group)  # steps that trained it may be void
        self._groups_of(group.env).add(group)
        if not group.rollouts:
            self.drop(group, Reason.OVERSIZED, "no rollout of it fits a row any more")

    def _begin(self, info: GroupInfo, since: float, pushed: float | None, uses: int = 0) -> PooledGroup:
        """A new group, not placed yet."""
        group = self._groups[info.group_id] = PooledGroup(info, since, pushed, uses)
        env = self._groups_of(group.env)
        env.lane(group.adapter)  # it is sampled there, whatever becomes of the group
        env.watch_age(group)
        return group

    def _exchange(self, info: GroupInfo, entry_id: str, old: str) -> bool:
        """Puts a push in the place of one that is here. -> False when its group waits for nothing any more: then it
        is a push like any other, unless no rollout of it has joined."""
        group = self._groups.get(info.group_id)
        if group is None or old not in group.parts or (group.is_ready and old not in group.rejected):
            self.remove(old)
            return False
        del self._entries[old]
        self._entries[entry_id] = info.group_id
        if group.is_ready:
            group.keep_rejected(
                entry_id, info, group.rejected.pop(old), [reason for _, reason in group.parts.pop(old).left_out]
            )
            return True
        self._groups_of(group.env).remove(group)
        for key, part, why in group.exchange(old, entry_id, info, self.config.row_tokens):
            self._queue(drop_part(key, part, why), {key: part})
        self._put_back(group)
        return True

    # -- leaving ------------------------------------------------------------------------------------------------------
    def drop(self, group: PooledGroup, reason: Reason, detail: str) -> None:
        """Takes a group out and queues its drop."""
        self._groups_of(group.env).remove(group)
        self._end(group, reason, detail)

    def drop_rest(self, *, paused: Collection[str]) -> None:
        """Drops what is left when no further step can be made."""
        for name in sorted(self.envs.keys() - set(paused)):
            for lane in self.envs[name].lanes.values():
                for group in [*lane.ready.walk(newest_first=False, oldest=0)]:
                    self.drop(group, Reason.STALE, "nothing more comes, and no step can hold it")
                for group in [*lane.used.walk(newest_first=False, oldest=0)]:
                    self.drop(group, Reason.VOID, "nothing more comes that it could be trained again with")

    def consume(self, group_ids: Iterable[str]) -> None:
        """A commit consumed these groups: forgets them, or keeps them for another use.

        Late parts of them are still known as late.
        """
        for group_id in group_ids:
            group = self._groups.get(group_id)
            if group is None:
                continue
            self._groups_of(group.env).remove(group)
            if group.used + 1 < self.config.max_uses:
                group.used += 1
                self._groups_of(group.env).add(group)
                continue
            self._forget(group)
            for entry_id in group.parts:
                self._entries.pop(entry_id, None)

    def remove(self, entry_id: str) -> None:
        """Forgets an entry that is gone from the store; what is left of its group is no longer whole and is dropped."""
        group = self._groups.get(self._entries.pop(entry_id, ""))
        self._withdraw(entry_id)
        if group is not None and entry_id in group.rejected:
            del group.rejected[entry_id]
            del group.parts[entry_id]  # what it held has come all the same
        elif group is not None and entry_id in group.parts:
            self._groups_of(group.env).remove(group)
            del group.parts[entry_id]
            self._end(group, Reason.INVALID, f"its part {entry_id} is gone from the pool")

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
    def advance(self, now: float, step: int, *, forgets: bool = True, done: Collection[str] = ()) -> None:
        """Closes or drops the groups whose time is up, and those of envs that are said to be `done`, unless a scorer
        may still complete them; forgets old tombstones unless told otherwise.

        `step` is the one that is planned.
        """
        self.now = max(self.now, now)
        self._step = step
        for name in sorted(done):
            env = self.env(name)
            for group in [*env.forming.values()]:
                if not group.needs:
                    env.remove(group)
                    self._put_back(group, ", and its env is done")
        for env in self.envs.values():
            self._close_over(env, self.now)
        for env in self.envs.values():
            limit = env.settings.max_age_seconds
            while limit is not None and env.expiring and env.expiring[0][0] + limit < self.now:
                _, _, group = heappop(env.expiring)
                if self._is_here(group):
                    waited = self.now - group.pushed
                    self.drop(group, Reason.STALE, f"{waited:.1f} s in the pool > max_age_seconds {limit:g}")
        if forgets:
            self._forget_tombstones()

    def sweep_future(self, step_of: StepOf) -> None:
        """Drops groups sampled by weights that are not made yet. Only what came since is looked at: steps only grow, so
        a group that is not from the future never will be. One that is must go at once, also while it is forming: the
        version that it names will be made one day, as another one."""
        unjudged, self._unjudged = self._unjudged, []
        steps = {adapter: step_of(adapter) for adapter in {group.adapter for group in unjudged}}
        for group in unjudged:
            step = steps[group.adapter]
            if is_future(step, group.max_version) and self._is_here(group):
                detail = f"policy version {group.max_version} > {step - 1} at step {step}{_whose(group.adapter)}"
                self.drop(group, Reason.FUTURE, detail)

    def sweep_stale(self, step_of: StepOf, published: Mapping[str, int]) -> None:
        """Drops groups that are too old for their step, and so for every later one. But not where the newest version,
        `published` by adapter, is that old itself: it is waited for."""
        for env in self.envs.values():
            max_age = env.settings.max_age
            for adapter, lane in env.lanes.items():
                step = step_of(adapter)
                oldest = _oldest_kept(step, max_age, published.get(adapter))
                for index in (lane.ready, lane.forming, lane.used):
                    for group in index.pop_older_than(oldest):
                        age = age_at(step, group.min_version)
                        detail = f"age {age} > max_age {max_age} at step {step}{_whose(adapter)}"
                        self.drop(group, Reason.STALE, detail)

    def rank(self, selector: Selector, rng: np.random.Generator) -> None:
        """Gives the groups that became ready their priority; one that gets none is dropped.

        Raises:
            ConfigError: the selector failed.
        """
        unranked, self._unranked = self._unranked, []
        for group in filter(self._is_here, unranked):
            try:
                priority = priority_of(group, selector, rng, self.config.order, self.teaching.lesson(group))
            except InvalidRollout as error:
                self.drop(group, Reason.INVALID, str(error))
                continue
            self._groups_of(group.env).lane(group.adapter).ranked.add(group, priority)

    # -- looking ------------------------------------------------------------------------------------------------------
    @property
    def needs(self) -> dict[tuple[str, str], int]:
        """(env, what is missing) -> forming groups that need it."""
        return {(name, need): n for name, env in self.envs.items() for need, n in env.needs.items() if n}

    @property
    def is_empty(self) -> bool:
        """No group is here, and every drop is confirmed."""
        return not self._groups and not self.drops

    def env(self, name: str) -> EnvGroups:
        """An env's groups, with running sums."""
        return self.envs.get(name) or EnvGroups(self.config.for_env(name))

    def is_known(self, group_id: str) -> bool:
        """True when something of the group is here, or it is closed."""
        return group_id in self._groups or group_id in self._closed

    def has_fresh(self, name: str) -> bool:
        """True when the env has a group that was not trained yet."""
        env = self.env(name)
        return bool(env.forming) or any(len(lane.ready) for lane in env.lanes.values())

    def kept(self, name: str, step_of: StepOf, published: Mapping[str, int]) -> int:
        """The env's groups, forming or ready; without those that :meth:`sweep_stale` drops."""
        env = self.env(name)
        oldest = {a: _oldest_kept(step_of(a), env.settings.max_age, published.get(a)) for a in env.lanes}
        return len(env.forming) + sum(lane.ready.count(oldest[adapter]) for adapter, lane in env.lanes.items())

    def queues(self, name: str, step_of: StepOf) -> dict[str, Iterator[PooledGroup]]:
        """adapter -> the env's ready groups that can train, in the order in which they should. The pool must not change
        meanwhile."""
        env, newest_first = self.env(name), self.config.order != "oldest_first"
        out: dict[str, Iterator[PooledGroup]] = {}
        for adapter, lane in env.lanes.items():
            oldest = oldest_version(step_of(adapter), env.settings.max_age)
            key = by_ticket if self.config.slow == "wait" else None
            ready = lane.ready.walk(newest_first=newest_first, oldest=oldest, key=key)
            fresh = lane.ranked.walk(oldest=oldest) if self._ranks else ready
            out[adapter] = chain(fresh, lane.used.walk(newest_first=newest_first, oldest=oldest))
        return out

    # -- inside -------------------------------------------------------------------------------------------------------
    def _groups_of(self, name: str) -> EnvGroups:
        env = self.envs.get(name)
        if env is None:
            env = self.envs[name] = EnvGroups(self.config.for_env(name))
        return env

    def _is_here(self, group: PooledGroup) -> bool:
        return self._groups.get(group.group_id) is group

    def _close_over(self, env: EnvGroups, at: float) -> None:
        """Lets forming groups whose time was up at `at` take no more rollouts."""
        timeout = self.config.group_timeout_seconds
        while env.due and env.due[0][0] + timeout <= at:
            since, _, group_id = heappop(env.due)
            group = env.forming.get(group_id)
            if group is not None and group.since == since:
                env.remove(group)
                self._put_back(group, f" after {timeout:g} s")

    def _put_back(self, group: PooledGroup, over: str = "") -> None:
        """Puts a forming group back that was taken out, unless it is too small, or nobody wants it.

        It is ready when nothing more is to come, or its time is `over`: that says how.
        """
        env = self._groups_of(group.env)
        if over or not group.is_waiting:
            why = group.too_small(env.settings.min_group_size, over)
            if why is None and self.config.flat == "drop" and not self.teaching.of(group):
                why = Rejected(Reason.FLAT, self.teaching.flatness(group))
            if why is not None:
                self._end(group, *why)
                return
            group.is_ready = True
            env.forming.pop(group.group_id, None)
            env.lost, env.repeated = None, 0
            if self._ranks:
                self._unranked.append(group)
        env.add(group)

    def _end(self, group: PooledGroup, reason: Reason, detail: str) -> None:
        """Drops a group that was taken out; what it holds of untrainable rollouts goes for their reason."""
        self._forget(group)
        for entry_id, why in ({} if group.used else group.rejected).items():
            info = group.parts.pop(entry_id).info
            self._queue(drop_part(entry_id, info, why), {entry_id: info})
        if group.parts:
            self._queue(group.drop(reason, detail), {key: part.info for key, part in group.parts.items()})

    def _forget(self, group: PooledGroup) -> None:
        self._groups_of(group.env).forming.pop(group.group_id, None)
        del self._groups[group.group_id]
        self._closed[group.group_id] = self.now, self._step

    def _queue(self, drop: Drop, parts: Mapping[str, GroupInfo]) -> None:
        self.drops[drop.entry_ids] = drop
        self._dropping.update({entry_id: (drop.entry_ids, info) for entry_id, info in parts.items()})
        self.lose(drop, min((info.planned_size for info in parts.values()), default=1))

    def lose(self, drop: Drop, planned_size: int = 1) -> None:
        """Notes why something of an env was dropped, which is what people ask when none of it is ready."""
        if not drop.rollouts:
            return
        env, group = self._groups_of(drop.env), self._groups.get(drop.group_id)
        if Trait.AGAIN in drop.reason.traits:
            if group is not None and group.is_ready:
                return
            env.repeated += drop.rollouts
            if env.repeated + (0 if group is None else group.arrived) < planned_size:
                return
        if env.lost is None:
            env.lost_at = self.now
        env.lost = drop

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

    def _forget_tombstones(self) -> None:
        self._began = began = self._began or (self.now, self._step)
        keep = max(TOMBSTONE_SECONDS, 2 * self.config.group_timeout_seconds)
        steps = remembered_steps(self.config.largest_max_age)
        while self._closed:
            at, step = map(max, next(iter(self._closed.values())), began)
            if at + keep >= self.now or step + steps >= self._step:
                break
            self._closed.popitem(last=False)


def _alone(group: PooledGroup | None, entry_id: str) -> PooledGroup | None:
    """The group, where this entry is all of it, and nothing more is to come."""
    is_alone = group is not None and group.parts.keys() == {entry_id} and not group.is_waiting
    return group if is_alone else None


def _oldest_kept(step: int, max_age: int, published: int | None) -> int:
    """The oldest version of which groups are kept for `step`: all of them where the newest, `published`, is so old."""
    oldest = oldest_version(step, max_age)
    return oldest if published is None or published >= oldest else 0


def by_ticket(group: PooledGroup) -> tuple[int, str]:
    """Sort key: the group whose ticket was given first. As they came the slow ones would stand last."""
    return ticket_order(group.group_id)


def ticket_order(group_id: str) -> tuple[int, str]:
    """Of the groups of an env, ``<env>.<number>``: by number."""
    return len(group_id), group_id


def _whose(adapter: str) -> str:
    return f" of adapter {adapter}" if adapter else ""
