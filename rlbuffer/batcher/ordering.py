"""The order of an env's groups where it is not a matter of versions: by priority.

`priority` takes the groups that teach most first, as far as can be told without their payloads: by the variance of
what `flat_by` judges, which is the reward. With rewards of 0 and 1 that is p (1 - p), most where a prompt is solved
half of the time. Those that teach whatever their rewards are go before all others, those that teach nothing behind
them. Among equals the newer version goes first, then the one that was ready first.

The user's own selector is a callable named by a dotted path, ``package.module:name`` (a class is called without
arguments first)::

    def selector(group: Candidate, rng: numpy.random.Generator) -> float: ...

It is asked once per group, in the first decision after the group became ready, and what it answers stays the group's
priority: the largest goes first. It sees no payloads, and must be quick: it runs in the batcher.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np

from rlbuffer.batcher.group import PooledGroup
from rlbuffer.config.batcher import BatcherConfig
from rlbuffer.config.imports import failed_in, load, refused
from rlbuffer.errors import InvalidRollout

_SLACK = 64
"""Entries of a heap that may be outdated beyond half of it before it is made again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A ready group as a selector sees it."""

    group_id: str
    env: str
    prompt_id: str
    adapter: str
    rewards: tuple[float, ...]
    """Rewards of the valid rollouts."""
    lengths: tuple[int, ...]
    """Tokens of the valid rollouts."""
    min_policy_version: int
    max_policy_version: int
    uses: int
    """Steps that trained it before."""
    lesson: float = 0.0
    """What it teaches, by :meth:`rlbuffer.batcher.teaching.Teaching.lesson`; below 0: nothing."""


Selector = Callable[[Candidate, np.random.Generator], float]


def by_lesson(group: Candidate, rng: np.random.Generator) -> float:
    """What the group teaches."""
    return group.lesson


def load_selector(config: BatcherConfig) -> Selector | None:
    """Loads the selector that `order` names; None where versions decide.

    Raises:
        ConfigError: it cannot be imported, or is not callable; the message says why.
    """
    order = config.order
    if order == "priority":
        return by_lesson
    if ":" not in order:
        return None
    made: Selector = load("batcher.order", order, "(group, rng)")
    return made


def priority_of(
    group: PooledGroup, selector: Selector, rng: np.random.Generator, order: str, lesson: float = 0.0
) -> float:
    """The selector's answer, checked. `lesson` is what the group teaches.

    Raises:
        ConfigError: it raised, or gave something else than a number.
        InvalidRollout: it gave a number that is not finite, so there is no place for this group.
    """
    candidate = Candidate(
        group_id=group.group_id,
        env=group.env,
        prompt_id=group.prompt_id,
        adapter=group.adapter,
        rewards=tuple(group.rewards),
        lengths=tuple(info.length for info in group.infos),
        min_policy_version=group.min_version,
        max_policy_version=group.max_version,
        uses=group.used,
        lesson=lesson,
    )
    try:
        answer = selector(candidate, rng)
        try:
            value = float(answer)
        except OverflowError:  # an integer beyond every float
            value = math.inf if answer > 0 else -math.inf
    except (Exception, SystemExit) as error:  # as above: it is not our code
        raise refused(
            "batcher.order", order, f"failed for group {group.group_id}: {failed_in(selector, error)}"
        ) from error
    if not math.isfinite(value):
        raise InvalidRollout(f"batcher.order = {order!r} gave {value} for this group: it must be a finite number")
    return value


class PriorityIndex:
    """Groups by priority, the largest first. O(log n) per group that comes, goes or is walked over."""

    __slots__ = ("_heap", "_live", "_sequence")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, str]] = []
        self._live: dict[str, tuple[int, PooledGroup]] = {}
        self._sequence = 0

    def add(self, group: PooledGroup, priority: float) -> None:
        """Puts a group in; one that is here already changes its priority."""
        self._sequence += 1
        self._live[group.group_id] = (self._sequence, group)
        heappush(self._heap, (-priority, -group.min_version, self._sequence, group.group_id))

    def discard(self, group: PooledGroup) -> None:
        """Takes a group out; nothing happens when it is not there."""
        if self._live.pop(group.group_id, None) is None:
            return
        while self._heap and not self._is_live(self._heap[0]):
            heappop(self._heap)
        if len(self._heap) > 2 * len(self._live) + _SLACK:
            self._heap = [entry for entry in self._heap if self._is_live(entry)]
            heapify(self._heap)

    def walk(self, *, oldest: int) -> Iterator[PooledGroup]:
        """Groups of version `oldest` or newer, the largest priority first. Must not change meanwhile."""
        heap = self._heap
        frontier = [(heap[0], 0)] if heap else []
        while frontier:
            entry, place = heappop(frontier)
            for child in (2 * place + 1, 2 * place + 2):
                if child < len(heap):
                    heappush(frontier, (heap[child], child))
            if self._is_live(entry):
                group = self._live[entry[3]][1]
                if group.min_version >= oldest:
                    yield group

    def __len__(self) -> int:
        return len(self._live)

    def _is_live(self, entry: tuple[float, int, int, str]) -> bool:
        return self._live.get(entry[3], (0,))[0] == entry[2]
