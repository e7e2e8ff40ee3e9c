"""The age of data, and an index that finds groups that are too old without looking at the rest.

Step s trains version s - 1, so a rollout whose oldest token was sampled by version v has age (s - 1) - v there, the
time it spent in the pool included. Groups are kept in buckets by version: sweeping pops whole buckets, selecting walks
buckets from one end, and neither touches a group that it leaves alone.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from rlbuffer.batcher.group import PooledGroup


def age_at(step: int, min_version: int) -> int:
    """Age, in policy versions, of data sampled by `min_version` when `step` trains on it."""
    return step - 1 - min_version


def oldest_version(step: int, max_age: int) -> int:
    """The oldest policy version that `step` may train on; never below 0."""
    return max(0, step - 1 - max_age)


def last_version(step: int, max_age: int) -> int:
    """The version whose data may train at `step` and at no later one; below 0: there is none yet."""
    return step - 1 - max_age


def is_future(step: int, max_version: int) -> bool:
    """True when data was sampled by weights that `step` has not made yet: only after a rewind, or by mistake."""
    return max_version > step - 1


class VersionIndex:
    """Groups in buckets by their oldest policy version, first in first out inside a bucket.

    Every operation costs O(1) per group it returns or moves, plus O(versions held) where a bucket appears or goes.
    A group must be discarded before its version changes.
    """

    __slots__ = ("_buckets", "_versions")

    def __init__(self) -> None:
        # OrderedDict, because deleting from the front of a dict makes its next first element O(n) to find.
        self._buckets: dict[int, OrderedDict[str, PooledGroup]] = {}
        self._versions: list[int] = []

    def add(self, group: PooledGroup) -> None:
        """Puts a group at the end of its version's bucket."""
        bucket = self._buckets.get(group.min_version)
        if bucket is None:
            bucket = self._buckets[group.min_version] = OrderedDict()
            insort(self._versions, group.min_version)
        bucket[group.group_id] = group

    def discard(self, group: PooledGroup) -> None:
        """Takes a group out; nothing happens when it is not there."""
        bucket = self._buckets.get(group.min_version)
        if bucket is None or bucket.pop(group.group_id, None) is None:
            return
        if not bucket:
            self._forget(group.min_version)

    def pop_older_than(self, version: int) -> list[PooledGroup]:
        """Removes and returns every group sampled by a version below `version`, oldest first."""
        out: list[PooledGroup] = []
        while self._versions and self._versions[0] < version:
            oldest = self._versions[0]
            out.extend(self._buckets[oldest].values())
            self._forget(oldest)
        return out

    def walk(
        self, *, newest_first: bool, oldest: int, key: Callable[[PooledGroup], Any] | None = None
    ) -> Iterator[PooledGroup]:
        """Groups of version `oldest` or newer, in the order in which they should train: those of a version by `key`,
        else as they came. Must not change meanwhile."""
        versions = self._versions[bisect_left(self._versions, oldest) :]
        for version in reversed(versions) if newest_first else versions:
            groups = self._buckets[version].values()
            yield from groups if key is None else sorted(groups, key=key)

    def of(self, version: int) -> list[PooledGroup]:
        """The groups of one version, as they came."""
        return [*self._buckets.get(version, {}).values()]

    def count(self, oldest: int = 0) -> int:
        """Number of groups of version `oldest` or newer."""
        return sum(len(self._buckets[v]) for v in self._versions[bisect_left(self._versions, oldest) :])

    def counts(self) -> Iterator[tuple[int, int]]:
        """Version -> number of its groups."""
        return ((version, len(self._buckets[version])) for version in self._versions)

    def __len__(self) -> int:
        return sum(len(b) for b in self._buckets.values())

    def _forget(self, version: int) -> None:
        del self._buckets[version]
        del self._versions[bisect_left(self._versions, version)]
