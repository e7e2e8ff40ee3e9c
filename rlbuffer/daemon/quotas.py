"""Quotas: the bytes that an env, or a worker process, may have pending.

The leader counts what it has read of the pool and publishes what is left (`room`). PUSH takes from that, and refuses
when nothing is left: an honest push waits. Whoever writes into the pool past PUSH is counted all the same: what came
when a quota was used up and a quarter more is dropped.
"""

from __future__ import annotations

from collections import Counter

from rlbuffer.config.batcher import BatcherConfig
from rlbuffer.store.records import PoolEntry

OVER_SHARE = 1.25
"""Share of its quota from which further pushes of an env or a worker are dropped. Honest ones stop at the quota, except
those that come while the leader publishes."""
OTHER_ENVS = "*"
"""Stands for the envs that no setting names, which share a quota."""


class Quotas:
    """Counts what is pending, in bytes of payload and metadata."""

    def __init__(self, config: BatcherConfig) -> None:
        self._config = config
        self._env_quotas = {OTHER_ENVS: config.quota_bytes}
        self._env_quotas |= {env: config.for_env(env).quota_bytes for env in (*config.budgets, *config.envs)}
        self._sizes: dict[str, tuple[int, tuple[str, ...]]] = {}
        """Entry -> its bytes, and the fields of `room` that they count under."""
        self.pending: Counter[str] = Counter()
        """Field -> bytes."""
        self._fresh: list[str] = []
        """Entries since the last look at what is beyond."""
        self.are_any = config.worker_quota_bytes is not None or any(self._env_quotas.values())

    def add(self, entry: PoolEntry) -> None:
        """An entry was read."""
        if not self.are_any or entry.info is None:
            return
        worker = entry.payload_key.rpartition(":")[2].partition(".")[0]
        fields = tuple(f for f in (self.field_of(entry.env), f"worker {worker}") if self.quota(f) is not None)
        self._sizes[entry.entry_id] = sum(rollout.size for rollout in entry.info.rollouts), fields
        self._count(entry.entry_id, 1)
        self._fresh.append(entry.entry_id)

    def remove(self, entry_id: str) -> None:
        """An entry is pending no more."""
        if entry_id in self._sizes:
            self._count(entry_id, -1)
            del self._sizes[entry_id]

    def quota(self, field: str) -> int | None:
        """Bytes; None where there is no quota."""
        kind, _, name = field.partition(" ")
        if kind == "worker":
            return self._config.worker_quota_bytes
        return self._env_quotas[name]

    def field_of(self, env: str) -> str:
        """The field of `room` that pushes of `env` take from."""
        return f"env {env if env in self._env_quotas else OTHER_ENVS}"

    def room(self) -> dict[str, int]:
        """The bytes that are left, by the fields of `room`."""
        room = {f"env {env}": quota for env, quota in self._env_quotas.items() if quota is not None}
        if self._config.worker_quota_bytes is not None:
            room[f"worker {OTHER_ENVS}"] = self._config.worker_quota_bytes
        for field in self.pending:
            room[field] = (self.quota(field) or 0) - self.pending[field]
        return room

    def full(self) -> dict[str, tuple[int, int]]:
        """Fields whose quota is used up -> bytes pending, quota."""
        sizes = {field: (size, self.quota(field) or 0) for field, size in self.pending.items()}
        return {field: (size, quota) for field, (size, quota) in sizes.items() if size >= quota}

    def settle(self) -> None:
        """Lets all that is pending stay, however much it is, as a leadership begins: quotas may be smaller now."""
        self._fresh.clear()

    def beyond(self) -> dict[str, str]:
        """Entries read since the last call that came when a quota was used up by far -> why they cannot stay."""
        fresh, self._fresh = self._fresh, []
        beyond: dict[str, str] = {}
        over: Counter[str] = Counter()
        for entry_id in reversed(fresh):
            size, fields = self._sizes.get(entry_id, (0, ()))
            for field in fields:
                quota = self.quota(field) or 0
                if self.pending[field] - over[field] - size >= OVER_SHARE * quota:
                    beyond[entry_id] = f"beyond the quota of {field}: {quota} bytes were pending, and a quarter more"
            if entry_id in beyond:
                over.update(dict.fromkeys(fields, size))
        return beyond

    def _count(self, entry_id: str, sign: int) -> None:
        size, fields = self._sizes[entry_id]
        for field in fields:
            self.pending[field] += sign * size
            if not self.pending[field]:
                del self.pending[field]
