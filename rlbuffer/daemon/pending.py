"""The leader's memory: every pool entry, read once, and the batcher that decides about them."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rlbuffer.batcher.adapters import at_step
from rlbuffer.batcher.batcher import Batcher
from rlbuffer.config.batcher import BatcherConfig
from rlbuffer.daemon.reporter import Reporter
from rlbuffer.errors import StepRetired
from rlbuffer.records.info import ROW_DTYPE, GroupInfo
from rlbuffer.records.states import Reason
from rlbuffer.records.step_plan import Drop, StepPlan
from rlbuffer.store.leader import LeaderStore
from rlbuffer.store.payloads import Trainable
from rlbuffer.store.records import Decided, LeaderRead, PoolEntry

POOL_PAGE = 1000
"""Pool entries per read."""
_NUMBER = re.compile(r"[0-9]{1,15}\Z")
"""Number of a ticket: its group is called ``<env>.<number>``."""


class Pending:
    """The pool as this leader knows it. Drops go through here, so that server, batcher and memory agree.

    Args:
        store: the run.
        config: what steps are made of.
        reporter: hears of every drop.
        since: server time of the takeover, Unix seconds.
        began: the same moment, monotonic seconds.
        needs_advantage: as :class:`~rlbuffer.batcher.batcher.Batcher` takes it.
    """

    def __init__(
        self,
        store: LeaderStore,
        config: BatcherConfig,
        reporter: Reporter,
        *,
        since: float,
        began: float,
        needs_advantage: bool,
    ) -> None:
        self._store = store
        self._config = config
        self._reporter = reporter
        self.since = since
        """Server time of the takeover, Unix seconds."""
        self._began = began
        self._entries: dict[str, PoolEntry] = {}
        self._used: set[str] = set()
        """Entries of groups that were trained and may be again; they are in `_entries`, but not in the pool."""
        self.read = "0-0"
        """The last entry of the pool that was read."""
        self.read_at = since
        """When all was read that had come by then, on the batcher's clock, in whole milliseconds as entries have them.
        Decisions are made as of then: a group whose time is up now may lack a part that came before."""
        self._tickets: dict[str, list[int]] = {}
        """env -> numbers of tickets whose groups are read, which are still out."""
        self.replaced = 0
        """Entries read that took the place of another, whose payload is garbage since."""
        self.batcher = Batcher(config, state=_state(store), needs_advantage=needs_advantage)
        self.batcher.close(store.closed_groups())

    @property
    def count(self) -> int:
        """Entries in the pool."""
        return len(self._entries) - len(self._used)

    @property
    def now(self) -> float:
        """Unix seconds of the takeover and what has passed since: the server's clock may be set meanwhile."""
        return self.since + time.monotonic() - self._began

    def entries(self) -> Iterable[PoolEntry]:
        """All that is held, used groups too."""
        return self._entries.values()

    def of(self, plan: StepPlan) -> dict[str, PoolEntry]:
        """entry id -> entry, of what the plan trains."""
        return {use.entry_id: self._entries[use.entry_id] for use in plan.entries}

    def restore(self) -> None:
        """Takes in the groups that may be used again; releases those that this config or version cannot use."""
        for group in self._store.reused():
            parts = [(entry.entry_id, entry.info) for entry in group.entries if entry.info is not None]
            self._entries |= {entry.entry_id: entry for entry in group.entries}
            self._used |= {entry.entry_id for entry in group.entries}
            if group.uses < self._config.max_uses and len(parts) == len(group.entries) > 0:
                pushed = min(group.entries[0].pushed_ms / 1000, self.since)
                self.batcher.restore(parts, uses=group.uses, now=self.since, pushed=pushed)
            elif group.entries:
                env, entry_ids = group.entries[0].env, tuple(entry.entry_id for entry in group.entries)
                self.drop([Drop(group.group_id, env, Reason.VOID, 0, 0, entry_ids=entry_ids)])

    def take_in(self, *, block_seconds: float = 0.0, beats: Sequence[str] = ()) -> LeaderRead:
        """Looks at the run, and takes in the page of the pool that was read."""
        asked, floor = math.floor(1000 * self.now) / 1000, self.read_at
        look = self._store.take_look(self.read, count=POOL_PAGE, block_seconds=block_seconds, beats=beats)
        now = self.now
        if look.sources is not None:  # nothing is left unread
            self.read_at = max(self.read_at, asked)
        undecodable: list[tuple[Drop, list[PoolEntry]]] = []
        for entry in look.entries:
            if entry.jams:
                undecodable.append((_invalid(entry, "its id is of those after which the pool takes none"), [entry]))
                continue
            self.read = entry.entry_id
            if entry.info is None:
                undecodable.append((_invalid(entry, entry.error), [entry]))
                continue
            self._entries[entry.entry_id] = entry
            replaces = self._replaced(entry)
            pushed = min(entry.pushed_ms / 1000, now)  # an id may lie ahead of the clock
            # Time in which no batcher ran does not count against a group that is not full yet; nor does it where the
            # server's clock stands still, since what is new came after the last read.
            came = max(min(entry.came_ms / 1000, now), floor)
            since = max(pushed, self.since) if entry.first_ms else came
            group = self.batcher.add(
                entry.info, entry_id=entry.entry_id, now=since, pushed=pushed, replaces=replaces, came=came
            )
            self._reporter.stats.arrived(entry, group)
            env, _, number = entry.group_id.rpartition(".")
            if env == entry.env and _NUMBER.match(number):
                self._tickets.setdefault(env, []).append(int(number))
        if undecodable:
            self._store.drop(undecodable)
            self._reporter.dropped(drop for drop, _ in undecodable)
            for drop, _ in undecodable:
                self.batcher.lose(drop)
        return look

    def _replaced(self, entry: PoolEntry) -> str:
        """The entry whose place this one took; "" when it only says so: PUSH lets only the same rollouts do that."""
        old = self._entries.get(entry.replaces)
        if old is not None:
            if _shape(old) != _shape(entry):
                return ""
            del self._entries[entry.replaces]
        self.replaced += bool(entry.replaces)
        return entry.replaces

    def close_tickets(self) -> None:
        """Deletes the tickets of what was read. Only after the new allowances are published: with a ticket less out
        under the old ones, a worker would take one for a group that nobody needs."""
        for env in list(self._tickets):
            self._store.close_tickets(env, self._tickets.pop(env))

    def drop(self, drops: Iterable[Drop], decided: Decided | None = None) -> None:
        """Carries out what the batcher decided to drop; `decided` says what it knew."""
        drops = tuple(drops)
        if not drops:
            return
        self._store.drop([(d, [self._entries[e] for e in d.entry_ids]) for d in drops], decided)
        self.batcher.dropped(drops)
        # A group that was trained before is only released: its place in the account stays.
        self._reporter.dropped(drop for drop in drops if not self._used.issuperset(drop.entry_ids))
        for drop in drops:
            self._reporter.stats.dropped(drop.reason, [self._entries[e] for e in drop.entry_ids if e not in self._used])
            self._forget(drop.entry_ids)

    def drop_broken(self, broken: Mapping[str, str]) -> None:
        """Pushes that cannot be trained (their payloads are gone, or do not go with the others) drop as invalid.

        Args:
            broken: entry id -> what is wrong with it.
        """
        for entry_id, reason in broken.items():
            entry = self._entries.get(entry_id)
            if entry is None:
                continue  # it went with another part of its group
            whole, drop = [entry], _invalid(entry, reason)
            if entry_id in self._used:  # what waits for another use goes whole: its other parts would be nobody's
                whole = [e for i, e in self._entries.items() if i in self._used and e.group_id == entry.group_id]
            else:
                self._reporter.stats.dropped(drop.reason, [entry])
                self._reporter.dropped([drop])
                self.batcher.lose(drop)
            for part in whole:
                self.batcher.remove(part.entry_id)
            self._store.drop([(drop, whole)])
            self._forget([part.entry_id for part in whole])

    def refused(self, plan: StepPlan, gone: Iterable[str]) -> None:
        """The server has entries of the plan no more."""
        self._forget(gone)
        self.batcher.refused(plan, gone)

    def committed(self, plan: StepPlan) -> None:
        """The plan is a step."""
        self.batcher.committed(plan)
        for use in plan.entries:
            if use.is_kept:
                self._used.add(use.entry_id)
            else:
                self._forget([use.entry_id])
            for reason, rollouts, tokens in use.dropped:
                self._reporter.count(reason, rollouts, tokens)

    def _forget(self, entry_ids: Iterable[str]) -> None:
        for entry_id in entry_ids:
            self._entries.pop(entry_id, None)
            self._used.discard(entry_id)


def untrainable(infos: Mapping[str, GroupInfo], can: Trainable) -> dict[str, str]:
    """Pushes that ranks which `can` train so much cannot train, by their metadata alone. -> entry id -> why."""
    refusals = {
        key: can.refusal(
            adapter=info.adapter, largest_token=int(np.frombuffer(info.rows, ROW_DTYPE)["largest_token"].max())
        )
        for key, info in infos.items()
    }
    return {key: refusal for key, refusal in refusals.items() if refusal}


def _shape(entry: PoolEntry) -> tuple[str, str, int, int]:
    return entry.env, entry.group_id, entry.rollouts, entry.tokens


def _state(store: LeaderStore) -> Mapping[str, Any] | None:
    """The batcher's state as after the run's last step; the run may have been taken back since it was saved."""
    step = store.meta().step
    try:
        header = store.wait_step(step, block_seconds=0.0) if step else None
    except StepRetired:
        header = None  # only untrained steps can be taken back without force, and those are there
    return at_step(store.load_state(), step=step, progress=None if header is None else header.adapters)


def _invalid(entry: PoolEntry, detail: str) -> Drop:
    return Drop(
        group_id=entry.group_id,
        env=entry.env,
        reason=Reason.INVALID,
        rollouts=entry.rollouts,
        tokens=entry.tokens,
        entry_ids=(entry.entry_id,),
        detail=detail,
    )
