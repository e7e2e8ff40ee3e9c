"""What open rollouts need beside requests: the abandoned ones are ended, and the groups that have ended are pushed.

Every gateway does it, for all: of several at once one is first, and the others change nothing. A group that cannot be
pushed is said once, counted, and tried again ever more seldom; the others do not wait for it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial

from rlbuffer.config.settings import RunSettings
from rlbuffer.errors import InvalidRollout, OpenRolloutUnknown, RlbufferError, ServerFull
from rlbuffer.gateway.rollouts import STALE, by_size, checked_about, group_of, rollout_of
from rlbuffer.process.threads import in_thread
from rlbuffer.records.failure import Failure
from rlbuffer.records.group import Group
from rlbuffer.records.rollout import Rollout
from rlbuffer.store.gateway import GatewayStore
from rlbuffer.store.open_rollouts import End, OpenRollout, WaitingGroup

SWEEP_SECONDS = 1.0
"""Seconds between two sweeps."""
OTHERS_SECONDS = 2.0
"""A group waits for so long for the gateway that ended its last rollout, before another one pushes it."""
LONGEST_GRACE_SECONDS = 60.0
"""Longest that agents have, once the server is there again, before anything counts as abandoned."""
LONGEST_GAP_SECONDS = 10.0
"""A look at the server that comes later than so long after the one before was held up: others were, too."""
GROUPS_PER_SWEEP = 16
FULL_SECONDS = 180.0
"""For so long a server may be full, and nothing on it can make room, before a group that waits loses its calls."""
NEXT_SECONDS = 10.0
"""Seconds until the next one does, where that was not enough."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 2.0, 60.0
"""Pause before a group that could not be pushed is tried again; doubled each time."""
_log = logging.getLogger(__name__)


class Contact:
    """For how long the server has been there without a break, by its own clock, which deadlines are of.

    While it was away, hung or had its clock set, no agent could say that it is still at work. So could none while no
    gateway ran, and a process that has just started has seen nothing before.
    """

    def __init__(self, idle_seconds: float) -> None:
        self._grace = min(LONGEST_GRACE_SECONDS, idle_seconds)
        self._gap = SWEEP_SECONDS + min(LONGEST_GAP_SECONDS, idle_seconds)
        self._since, self._last, self._losses = 0.0, float("-inf"), -1

    def noted(self, now: float, losses: int) -> bool:
        """The server answers. -> it has been there for as long as agents need to be heard.

        Args:
            now: the server's clock, seconds.
            losses: connections that this process has lost.
        """
        if not self._last <= now <= self._last + self._gap or losses != self._losses:
            self._since = now
        self._last, self._losses = now, losses
        return now - self._since >= self._grace

    def lost(self) -> None:
        """The server does not answer, or refuses."""
        self._last = float("-inf")


class Sweeper:
    """Sweeps until it is closed.

    Args:
        store: the run.
        settings: what groups need is said there.
        worker: name under which groups are pushed.
        noted: hears of each group that is stored: its rollouts and tokens.
    """

    def __init__(self, store: GatewayStore, settings: RunSettings, worker: str, noted: Callable[[Group], None]) -> None:
        self._store, self._settings, self._worker, self._noted = store, settings, worker, noted
        self._woken, self._contact = asyncio.Event(), Contact(settings.gateway.idle_seconds)
        self._own = set[str]()
        """Groups of which this gateway ended a rollout: pushed at once."""
        self._seen: dict[str, float] = {}
        """Group that waits -> monotonic time when it was seen first."""
        self._full_since = math.inf
        """Monotonic: since then every push was refused for memory."""
        self._later: dict[str, tuple[float, float]] = {}
        """Group that could not be pushed -> monotonic time of the next try, and the pause before the one after it."""
        self.stuck_because = ""
        """Why the last of these could not."""
        self.abandoned = 0
        """Open rollouts that were ended here."""
        self.trouble = ""
        """What hinders the sweep now, as a sentence; "" for nothing."""
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begins, on the running loop."""
        self._tasks = [asyncio.create_task(self._ends()), asyncio.create_task(self._pushes())]

    async def close(self) -> None:
        """Pushes what has ended here, unless the server is away, and stops."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._tasks and not self.trouble:
            await self._guarded(self._push_all)

    def ended(self, group_id: str) -> None:
        """A rollout of this group has just ended here: it is looked at now."""
        self._own.add(group_id)
        self._woken.set()

    @property
    def stuck(self) -> int:
        """Groups that could not be pushed."""
        return len(self._later)

    async def _ends(self) -> None:
        while True:
            await self._guarded(self._end_abandoned)
            await asyncio.sleep(SWEEP_SECONDS)

    async def _end_abandoned(self) -> None:
        def end_them() -> list[str]:
            try:
                is_there = self._contact.noted(self._store.now(), self._store.losses())
                return self._store.end_abandoned() if is_there else []
            except RlbufferError:
                self._contact.lost()
                raise

        names = await in_thread(end_them)
        self.abandoned += len(names)
        for name in names:
            _log.warning("open rollout %s is abandoned: nothing was heard of it. It is a failed attempt", name)

    async def _pushes(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(SWEEP_SECONDS):
                    await self._woken.wait()
            self._woken.clear()
            await self._guarded(self._push_all)

    async def _guarded(self, work: Callable[[], object]) -> None:
        """Whatever goes wrong ends no sweep: the next one tries again."""
        try:
            await work()  # type: ignore[misc]
            self.trouble = ""
        except Exception as error:  # records come from the server, where anybody may have written them
            told = str(error) if isinstance(error, RlbufferError) else type(error).__name__
            if told != self.trouble:
                _log.warning("open rollouts are not looked after, and the next look tries again: %s", told)
            self.trouble = told

    async def _push_all(self) -> None:
        waiting = await in_thread(lambda: self._store.waiting(limit=GROUPS_PER_SWEEP + len(self._later)))
        group_ids = {group.group_id for group in waiting}
        self._later = {group: at for group, at in self._later.items() if group in group_ids}
        now = time.monotonic()
        self._seen = {group: self._seen.get(group, now) for group in group_ids}
        is_full = has_room = False
        for group in waiting:
            at, pause = self._later.get(group.group_id, (0.0, FIRST_PAUSE_SECONDS))
            is_fresh = now - self._seen[group.group_id] < OTHERS_SECONDS
            if now < at or (is_fresh and group.group_id not in self._own):
                continue
            try:
                pushed = await in_thread(partial(self._push, group))
            except Exception as error:
                told = str(error) if isinstance(error, RlbufferError) else type(error).__name__
                is_full = is_full or isinstance(error, ServerFull)
                if group.group_id not in self._later:
                    _log.warning("group %s cannot be pushed, and is tried again: %s", group.group_id, told)
                self.stuck_because = told
                self._later[group.group_id] = now + pause, min(2 * pause, LONGEST_PAUSE_SECONDS)
                continue
            has_room = True
            self._later.pop(group.group_id, None)
            self._own.discard(group.group_id)
            if pushed is not None:
                self._noted(pushed)
        if has_room or not waiting:
            self._full_since = math.inf
        elif is_full:
            self._full_since = min(self._full_since, now)
        is_stuck = is_full and now - self._full_since > FULL_SECONDS
        if is_stuck and await in_thread(partial(self._make_room, waiting)):
            self._full_since = now - FULL_SECONDS + NEXT_SECONDS

    def _make_room(self, waiting: Sequence[WaitingGroup]) -> bool:
        """The largest group that waits loses its calls: a push needs room beside them, and nothing else makes any.

        -> whether one has.
        """
        largest = max(waiting, key=lambda group: group.bytes)
        if not largest.bytes or self._store.can_make_room():
            return False
        why = f"the server was full for {FULL_SECONDS:g} s, and nothing on it could make room"
        self._store.drop_calls(largest, why)
        _log.warning("group %s is not trained, and its %d bytes are dropped: %s", largest.group_id, largest.bytes, why)
        self._later.pop(largest.group_id, None)
        return True

    def _push(self, waiting: WaitingGroup) -> Group | None:
        """Pushes a group. -> it, where this gateway was the first."""
        version = max(self._store.policy().version, 0)
        rollouts = [self._rollout(waiting, one, version) for one in waiting.rollouts]
        group = self._group(waiting, rollouts)
        largest: Iterator[int] | None = None
        while True:
            try:
                status, _ = self._store.push_rollouts(waiting, group)
            except OpenRolloutUnknown:  # another gateway was faster, and it is retired already
                return None
            except InvalidRollout as error:  # larger than a push may be: the others go without its largest rollout
                largest = largest or iter(by_size(group))
                place = next(largest, None)
                if place is None:
                    raise
                _log.warning(
                    "open rollout %s is not trained: its group is too large for a push", rollouts[place].rollout_id
                )
                rollouts[place] = _failed(waiting.rollouts[place], Failure("too_large", str(error)), version)
                group = self._group(waiting, rollouts)
                continue
            return group if str(status) == "stored" else None

    def _rollout(self, waiting: WaitingGroup, one: OpenRollout, version: int) -> Rollout:
        """A rollout that can be pushed, whatever the server has of it."""
        if one.dropped:
            return _failed(one, Failure("server_full", one.dropped), version)
        end = one.end or End(failure=Failure("damaged", "its end cannot be read"))
        if waiting.is_void and end.failure is None:
            end = End(failure=STALE, details=end.details)
        try:
            calls = self._store.read_calls(one.name)
            if len(calls) != one.calls:
                raise InvalidRollout(f"{one.calls - len(calls)} of {one.calls} calls are missing")
            return rollout_of(calls, end, rollout_id=one.name, version=version)
        except (InvalidRollout, LookupError, TypeError, ValueError) as error:
            _log.warning("open rollout %s cannot be trained: what was recorded of it is damaged", one.name)
            return _failed(one, Failure("damaged", f"{type(error).__name__}: {error}"), version)

    def _group(self, waiting: WaitingGroup, rollouts: list[Rollout]) -> Group:
        made = partial(
            group_of,
            waiting.group_id,
            waiting.env,
            rollouts=rollouts,
            needs=self._settings.needs_of(waiting.env),
            created=waiting.begun_ms / 1000,
            worker=self._worker,
            seconds=waiting.seconds,
        )
        try:
            return made(checked_about(waiting.group_id, waiting.env, waiting.about))
        except InvalidRollout:  # what was said at its opening is damaged
            return made({})


def _failed(one: OpenRollout, failure: Failure, version: int) -> Rollout:
    return rollout_of((), End(failure=failure), rollout_id=one.name, version=version)
