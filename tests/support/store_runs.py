"""A run to make moves on, for the tests of the store: on a real server and in memory, each under a name of its own."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from every_role import EveryRole

from rlbuffer.config.settings import ServerSettings
from rlbuffer.packing.further_columns import agree
from rlbuffer.records.group import Group
from rlbuffer.records.states import Reason
from rlbuffer.records.step_header import StepHeader
from rlbuffer.records.step_plan import Drop, GroupPart, Normalizers, Plan, PlannedRollouts, StepPlan
from rlbuffer.store.records import Lease, PoolEntry
from rlbuffer.store.session import open_store
from rlbuffer.testing import make_group

LEASE_SECONDS = 3600.0
"""No test takes longer: a lease that ends by itself is given another time."""


class Closes(Protocol):
    """A store, a reader, daemons."""

    def close(self) -> None: ...


T = TypeVar("T", bound=Closes)


class Run:
    """A run with a leader and a producer, and short names for what tests do with it."""

    def __init__(self, url: str, home: Path, name: str = "") -> None:
        """`name`: of the run; a new one where there is none."""
        self.url, self.home = url, home
        self.store = open_store(
            EveryRole, url, run=name or f"t{uuid.uuid4().hex[:12]}", home=home, server=ServerSettings()
        )
        self._opened: list[Closes] = [self.store]
        self.meta = self.store.open_run()
        self.sequence = 0

    @property
    def token(self) -> int:
        """The one of the lease under which the store changes the run; tests of fencing set another one."""
        return self.store.token

    @token.setter
    def token(self, token: int) -> None:
        self.store.token = token

    @property
    def client(self) -> Any:
        return self.store.connection.client

    @property
    def is_cluster(self) -> bool:
        return self.store.connection.is_cluster

    def again(self) -> EveryRole:
        """Another process's store of the same run."""
        store = open_store(EveryRole, self.url, run=self.store.run, home=self.home, server=ServerSettings())
        self._opened.append(store)
        return store

    def closes(self, opened: T) -> T:
        """Closes `opened` at the end, before the stores that its threads use."""
        self._opened.append(opened)
        return opened

    def close(self) -> None:
        """Closes everything that was opened here; collecting an open one is a warning, in whichever test comes next."""
        for opened in reversed(self._opened):
            opened.close()

    def lead(self, owner: str = "leader", *, ttl_seconds: float = LEASE_SECONDS) -> Lease:
        return self.store.lease(owner, ttl_seconds=ttl_seconds)

    def push(self, given: str | Group = "a.0", *, size: int = 2, version: int = 0, **fields: Any) -> Group:
        """A group, or one that is made up under its id."""
        group = given
        if isinstance(group, str):
            group = make_group(env=group.split(".")[0], size=size, version=version, group_id=group, **fields)
        self.store.push(group, producer="w", incarnation="u", sequence=self.sequence + 1, epoch=self.meta.epoch)
        self.sequence += 1
        return group

    def pool(self) -> list[PoolEntry]:
        return self.store.read_pool()

    def commit(
        self,
        step: int | None = None,
        *,
        entries: Sequence[PoolEntry] | None = None,
        world_size: int = 2,
        **changes: Any,
    ) -> tuple[str, Any]:
        """Commits everything that is pending, or `entries`, as the next step."""
        used = self.pool() if entries is None else list(entries)
        meta = self.store.meta()
        plan = plan_of(used, meta.step + 1 if step is None else step, world_size=world_size)
        if changes:
            plan = changed(plan, **changes)
        self.store.pin(plan.rollouts, {e.entry_id: e for e in used})
        by_id = {e.entry_id: e for e in used}
        columns, _ = agree(plan)
        return self.store.commit(plan, by_id, meta=meta, columns=columns, state={"deficits": {"a": 1.5}})

    def step(self, *groups: str, world_size: int = 2) -> StepHeader:
        """Pushes groups and commits them."""
        for group_id in groups:
            self.push(group_id, version=self.store.meta().step)
        if not self.token:
            self.lead()
        self.commit(world_size=world_size)
        header = self.store.wait_step(self.store.meta().step, block_seconds=0)
        assert header is not None
        return header

    def train(self, step: int, *, oldest_kept: int = 0) -> int:
        """Registers a trainer if there is none, and reports `step` as trained."""
        attempt = self.store.trainer()
        if not attempt.number:
            attempt = self.store.attempt(uuid="trainer", world_size=2, resume_step=0)
        self.store.report(attempt.number, epoch=self.meta.epoch, trained=step, digest="", oldest_kept=oldest_kept)
        return attempt.number

    def renew(self) -> None:
        """Removes every key of the run, and opens it anew."""
        for key in (*self.control_keys(), *self.payload_keys()):
            self.client.delete(key)
        self.meta = self.store.open_run()

    def drop(self, reason: str, entries: Sequence[PoolEntry]) -> Drop:
        drop = Drop(
            group_id=entries[0].group_id,
            env=entries[0].env,
            reason=reason,
            rollouts=sum(e.rollouts for e in entries),
            tokens=sum(e.tokens for e in entries),
            entry_ids=tuple(e.entry_id for e in entries),
            detail="because",
        )
        self.store.drop([(drop, entries)])
        return drop

    def age(self, kind: str, name: str, seconds: float) -> None:
        """Makes a heartbeat older."""
        key = self.store.keys.heartbeats(kind)
        at, _, record = self.client.hget(key, name).partition(b" ")
        self.client.hset(key, name, str(int(at) - round(1000 * seconds)).encode() + b" " + record)

    def control_keys(self) -> dict[str, Any]:
        """Every control key of the run with its whole content."""
        return {key: self._content(key) for key in self._names(f"{{rlb:{self.store.run}}}:*")}

    def payload_keys(self) -> list[str]:
        return self._names(f"rlb:{self.store.run}:g:*")

    def _names(self, pattern: str) -> list[str]:
        return sorted(key.decode() for key in self.client.scan_iter(match=pattern))

    def _content(self, key: str) -> Any:
        kind = self.client.type(key).decode()
        if kind == "hash":
            return self.client.hgetall(key)
        if kind == "zset":
            # By member: the scores say the order, and those that are clocks differ from run to run.
            return sorted(self.client.zrange(key, 0, -1, withscores=True))
        if kind == "stream":
            return self.client.xrange(key)
        return self.client.get(key)


def rollouts_of(entries: Sequence[PoolEntry], drop: Mapping[str, str] | None = None) -> PlannedRollouts:
    """All that is in `entries`, but the rollouts in `drop`: id -> reason."""
    return PlannedRollouts([_use(entry, drop or {}) for entry in entries])


def plan_of(
    entries: Sequence[PoolEntry], step: int, *, world_size: int = 2, drop: Mapping[str, str] | None = None
) -> StepPlan:
    """A step of everything in `entries`: one sequence a row, dealt to the ranks in turn; `drop`: id -> reason."""
    refs = rollouts_of(entries, drop)
    micro_steps = max(1, -(-len(refs) // world_size))
    rows = tuple(
        tuple((((m * world_size + r),) if m * world_size + r < len(refs) else (),) for r in range(world_size))
        for m in range(micro_steps)
    )
    groups = tuple(dict.fromkeys(ref.group_id for ref in refs))
    rollouts = {(ref.group_id, ref.rollout_id) for ref in refs}
    return StepPlan(
        step=step,
        group_ids=groups,
        rollouts=refs,
        advantages=np.arange(len(refs), dtype=np.float32) / 8,
        plan=Plan(rows=rows, world_size=world_size, row_tokens=64),
        normalizers=Normalizers(
            loss_tokens=sum(r.loss_tokens for r in refs), rollouts=len(rollouts), groups=len(groups)
        ),
        tokens=sum(r.length for r in refs),
        closed_by="capacity",
    )


def _use(entry: PoolEntry, drop: Mapping[str, str]) -> GroupPart:
    rollouts = entry.info.rollouts
    joined = [i for i, r in enumerate(rollouts) if r.rollout_id not in drop]
    return GroupPart(
        entry_id=entry.entry_id,
        info=entry.info,
        joined=joined,
        places=entry.info.places_of(joined),
        packed_tokens=sum(rollouts[i].length for i in joined),
        left_out=tuple((i, Reason(drop[r.rollout_id])) for i, r in enumerate(rollouts) if r.rollout_id in drop),
    )


def changed(plan: StepPlan, /, **changes: Any) -> StepPlan:
    """`plan` with other values; `masks_truncated`: nothing of a truncated rollout is trained."""
    values = {name: getattr(plan, name) for name in StepPlan.__dataclass_fields__}
    if "masks_truncated" in changes:
        changes["rollouts"] = PlannedRollouts(plan.entries, masks=changes.pop("masks_truncated"))
    return StepPlan(**(values | changes))
