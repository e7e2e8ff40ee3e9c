"""The pending groups of one env: each in a bucket where it will be looked for, with running sums of all."""

from __future__ import annotations

from collections import OrderedDict, deque

from rlbuffer.batcher.age import VersionIndex
from rlbuffer.batcher.groups import GroupState
from rlbuffer.batcher.ordering import PriorityIndex


class Lane:
    """The groups of one env and adapter: versions of different adapters cannot be compared."""

    __slots__ = ("forming", "ranked", "ready", "used")

    def __init__(self) -> None:
        self.ready: VersionIndex[GroupState] = VersionIndex()
        self.forming: VersionIndex[GroupState] = VersionIndex()
        self.used: VersionIndex[GroupState] = VersionIndex()
        """Groups that were trained and may be trained again; fresh ones go before them."""
        self.ranked = PriorityIndex()
        """Ready groups by priority; empty where versions decide the order."""

    def discard(self, group: GroupState) -> None:
        """Takes out a group that is ready."""
        self.ready.discard(group)
        self.ranked.discard(group)
        self.used.discard(group)


class EnvPool:
    """One env's groups."""

    __slots__ = (
        "expiring",
        "forming_tokens",
        "lanes",
        "least",
        "lost",
        "max_age_seconds",
        "order",
        "ready_groups",
        "ready_rollouts",
        "ready_tokens",
    )

    def __init__(self, *, least: int = 1, max_age_seconds: float | None = None) -> None:
        self.least = least
        """`min_group_size` of this env."""
        self.max_age_seconds = max_age_seconds
        self.lanes: dict[str, Lane] = {}
        """Adapter -> its groups."""
        self.order: OrderedDict[str, GroupState] = OrderedDict()
        """Forming groups by their first part, the oldest first: whose timeout comes next."""
        self.expiring: deque[GroupState] = deque()
        """Groups in the order of their first push; empty where `max_age_seconds` is not set."""
        self.forming_tokens = 0
        self.ready_groups = 0
        self.ready_rollouts = 0
        self.ready_tokens = 0
        self.lost = ""
        """Why the last group was dropped, while none has become ready since: an env may lose all it sends."""

    def lane(self, adapter: str) -> Lane:
        """The adapter's groups."""
        lane = self.lanes.get(adapter)
        if lane is None:
            lane = self.lanes[adapter] = Lane()
        return lane

    def count(self, group: GroupState, sign: int) -> None:
        """Moves the running sums of ready groups."""
        self.ready_groups += sign
        self.ready_rollouts += sign * group.rollouts
        self.ready_tokens += sign * group.tokens
