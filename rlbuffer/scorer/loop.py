"""The scorer: finds pending groups that need what it gives, claims them, adds it, pushes them in their own place.

    read the pool -> claim -> fetch payloads -> logprobs, rewards -> push in place of the old entry
                        ^------ a claim expires 8 s after its scorer: another one takes it over ----'

A claim only spares double work. That a group is scored once is PUSH's doing: the scored push takes the place of an
entry that must still be pending. An answer that comes too late (the claim had expired and another was faster, or the
group was dropped meanwhile) is a duplicate and changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import uuid
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from rlbuffer.client.details import stand_ins
from rlbuffer.client.producer import Producer
from rlbuffer.config.settings import RunSettings, ScoreSettings
from rlbuffer.errors import (
    InvalidRollout,
    PayloadError,
    PushFailed,
    RewardFailed,
    RlbufferError,
    RunGone,
    ServerRefused,
)
from rlbuffer.process.heartbeat import starting
from rlbuffer.process.logs import fields
from rlbuffer.process.serving import serve_until_stopped
from rlbuffer.process.signals import Stopped
from rlbuffer.process.threads import in_thread
from rlbuffer.process.throughput_log import ThroughputLog
from rlbuffer.records.group import Group
from rlbuffer.records.rollout import with_column
from rlbuffer.records.waiting import Wait, Waiting
from rlbuffer.scorer.heartbeat import CLAIM_SECONDS, Beat
from rlbuffer.scorer.rewards import RewardFunction, make_rewards
from rlbuffer.store.records import PoolEntry
from rlbuffer.store.scorer import ScorerStore
from rlbuffer.wire import payload

if TYPE_CHECKING:
    from rlbuffer.client.buffer import Buffer
    from rlbuffer.scorer.reference import Reference

ENTRIES_PER_READ = 1000
"""Pool entries per read."""
SCORER_POLL_SECONDS = 0.1
"""Seconds between two looks into a pool that has nothing for this scorer, and for the wish to stop."""
RETRY_SECONDS = 1.0
"""Seconds before a group that another scorer holds, or that could not be scored, is tried again."""
GROUP_TRIES = 3
"""Times that a group is tried before it is left alone; it then drops as `small` after the group timeout."""

_log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Pending:
    """A pending push that needs what this scorer gives."""

    entry: PoolEntry
    try_at: float = 0.0
    failures: int = 0


def run_scorer(
    buffer: Buffer,
    name: str,
    key: str,
    settings: RunSettings,
    *,
    stop: threading.Event,
) -> bool:
    """Runs one scorer of ``[score.KEY]`` until `stop` is set, or the run has ended (-> True); what it has not pushed
    yet is given back then.

    Raises:
        ConfigError: its model or function cannot be loaded.
        PackedForwardError: the model cannot be run packed.
    """
    options, store = settings.score[key], buffer.store.role(ScorerStore)
    reference = None
    if options.model:
        from rlbuffer.scorer.reference import make_reference

        def tell(record: dict[str, Any]) -> Mapping[str, Any] | None:
            store.meta()  # RunGone where there is none: this begins none
            return store.heartbeat("scorer", name, record)

        with starting(tell, "it loads its model", gives=list(options.adds), envs=list(options.envs)):
            reference = make_reference(settings, options)

    async def work() -> bool:
        rewards = make_rewards(key, options) if options.reward else None
        store.open_run()  # after what may be refused: a scorer that cannot work begins no run
        scorer = _Scorer(buffer, name, options, reference, rewards, stop)
        return await scorer.run()

    return asyncio.run(work())


class _Scorer:
    at_once = 8
    """Groups that are scored together, packed."""

    def __init__(
        self,
        buffer: Buffer,
        name: str,
        options: ScoreSettings,
        reference: Reference | None,
        rewards: RewardFunction | None,
        stop: threading.Event,
    ) -> None:
        self._buffer, self._name, self._options = buffer, name, options
        self._store = buffer.store.role(ScorerStore)
        self._gives, self._envs = frozenset(options.adds), frozenset(options.envs)
        self._reference, self._rewards, self._stop = reference, rewards, stop
        self._progress = ThroughputLog(_log, "scored")
        self._owner = uuid.uuid4().hex
        self._beat = Beat(self._store, name, owner=self._owner, gives=options.adds, envs=options.envs)
        self._found: dict[str, _Pending] = {}
        """entry id -> push, in the order in which they came."""
        self._cursor = "0-0"
        self._known_end: str | None = None
        """What the run's meta said of its trainer's last step when this began: behind it, it waits for the next one."""
        self._losses = self._store.losses()

    async def run(self) -> bool:
        """Returns True when the run has ended."""
        self._beat.start()
        gives = sorted(self._gives)
        _log.info("gives %s", ", ".join(gives), extra=fields("ready", gives=gives))
        try:
            return await serve_until_stopped(
                self._serve_run, stop=self._stop, forget=self._run_gone, refused=self._refused
            )
        finally:
            self._beat.hold([])
            self._beat.close()
            self._progress.flush()
            beat = self._beat
            counts = {"groups": beat.groups, "rollouts": beat.rollouts}
            counts |= {"late": beat.late, "failed_groups": beat.failed_groups}
            text = ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in counts.items())
            _log.info("stopped: %s", text, extra=fields("stopped", **counts))

    def _run_gone(self, error: RunGone) -> None:
        self._beat.error = str(error)
        _log.warning("%s", error, extra=fields("restart"))

    def _refused(self, error: ServerRefused) -> None:
        self._beat.waiting = Waiting(kind=Wait.SERVER, detail=str(error))

    def _producer(self) -> Producer:
        meta = self._store.open_run()
        if self._known_end is None:
            self._known_end = meta.finished
        return Producer(self._store, self._name, epoch=meta.epoch, on_retry=self._held_up)

    def _has_ended(self) -> bool:
        """The run has ended, or its trainer has made its last step since this scorer began."""
        return self._store.meta().finished not in ("", self._known_end) or self._store.has_ended()

    async def _serve_run(self) -> bool:
        """Serves the run until it is stopped, or the run has ended (-> True)."""
        self._forget()
        producer = self._producer()
        looked = float("-inf")
        while not self._stop.is_set():
            if self._store.losses() != self._losses:
                self._forget()  # the server may be back with entries that it had lost the end of
            await asyncio.to_thread(self._read_pool)
            claimed = await asyncio.to_thread(self._claim)
            if not claimed:
                idle = Waiting(kind=Wait.NO_NEED, detail=", ".join(sorted(self._gives)))
                self._beat.waiting = None if self._found else idle
                if time.monotonic() - looked > RETRY_SECONDS:
                    looked = time.monotonic()
                    if await asyncio.to_thread(self._has_ended):
                        return True
                await asyncio.sleep(SCORER_POLL_SECONDS)
                continue
            self._beat.waiting = None
            ids = [pending.entry.entry_id for pending in claimed]
            self._beat.hold(ids)
            try:
                await self._score(producer, claimed)
            finally:
                self._beat.hold([])
                await asyncio.to_thread(self._store.release_scoring, ids, owner=self._owner)
        return False

    def _forget(self) -> None:
        self._losses, self._cursor = self._store.losses(), "0-0"
        self._found.clear()

    # -- finding -----------------------------------------------------------------------------------------------------
    def _read_pool(self) -> None:
        """Reads what is new in the pool."""
        while entries := [
            entry for entry in self._store.read_pool(self._cursor, count=ENTRIES_PER_READ) if not entry.jams
        ]:
            self._cursor = entries[-1].entry_id
            for entry in entries:
                self._found.pop(entry.replaces, None)
                if self._wanted(entry):
                    self._found.setdefault(entry.entry_id, _Pending(entry))

    def _wanted(self, entry: PoolEntry) -> frozenset[str]:
        """The columns and rewards that this scorer adds to a push."""
        if entry.info is None or (self._envs and entry.env not in self._envs):
            return frozenset()
        return self._gives & frozenset(entry.info.needs)

    def _claim(self) -> list[_Pending]:
        """Claims the next few; those that are gone are forgotten."""
        now = time.monotonic()
        due = [pending for pending in self._found.values() if pending.try_at <= now][: self.at_once]
        if not due:
            return []
        ids = [pending.entry.entry_id for pending in due]
        claimed, gone = self._store.claim_scoring(ids, owner=self._owner, ttl_seconds=CLAIM_SECONDS)
        for pending in due:
            if pending.entry.entry_id in gone:
                del self._found[pending.entry.entry_id]
            elif pending.entry.entry_id not in claimed:
                pending.try_at = now + RETRY_SECONDS
        return [pending for pending in due if pending.entry.entry_id in claimed]

    # -- scoring -----------------------------------------------------------------------------------------------------
    async def _score(self, producer: Producer, claimed: Sequence[_Pending]) -> None:
        start = time.monotonic()
        read = await self._unless_stopped(in_thread(lambda: [self._read(pending) for pending in claimed]))
        work = {pending: group for pending, group in zip(claimed, read, strict=True) if group is not None}
        await self._add_column(work)
        # All of them at once: `concurrent` rollouts are asked about, however small the groups are.
        asked = {pending: asyncio.ensure_future(self._rewarded(pending, group)) for pending, group in work.items()}
        try:
            for pending, rewarded in asked.items():
                try:
                    group = await self._unless_stopped(rewarded)
                    pushed = await self._unless_stopped(in_thread(partial(self._stored, producer, group, pending)))
                except (RewardFailed, InvalidRollout, PushFailed) as error:
                    self._fail(pending, str(error))
                else:
                    self._found.pop(pending.entry.entry_id, None)
                    self._note(group, is_first=bool(pushed), seconds=time.monotonic() - start)
        finally:
            for rewarded in asked.values():
                rewarded.cancel()
            await asyncio.gather(*asked.values(), return_exceptions=True)

    async def _rewarded(self, pending: _Pending, group: Group) -> Group:
        """The group with its rewards, which needs nothing more that this scorer adds."""
        needs = self._wanted(pending.entry)
        if self._rewards is not None:
            group = replace(group, rollouts=tuple(await self._rewards.add(group, needs)))
        return replace(group, needs=tuple(need for need in group.needs if need not in needs))

    def _read(self, pending: _Pending) -> Group | None:
        """The whole group of a push; None when it cannot be read."""
        entry, info = pending.entry, pending.entry.info
        if info is None:
            return None
        refs = stand_ins([entry])
        try:
            rollouts, found = [], iter(self._store.read_payloads(refs))
            for rollout in info.rollouts:
                sequences = [*islice(found, len(rollout.sequences))]
                if None in sequences:
                    raise PayloadError(f"the payload of rollout {rollout.rollout_id} is missing")
                rollouts.append(payload.decode_whole(sequences, rollout.sequences))
                needs_column = self._options.column in info.needs and not rollout.failure
                if self._reference is not None and needs_column:
                    self._reference.check(rollouts[-1])
            rest = self._store.read_group_payloads([entry.payload_key])[0]
            answer, metadata = (None, {}) if rest is None else payload.decode_group_payload(rest)
            return Group(
                group_id=info.group_id,
                env=info.env,
                prompt_id=info.prompt_id,
                rollouts=tuple(rollouts),
                planned_size=info.planned_size,
                adapter=info.adapter,
                answer=answer,
                metadata=metadata,
                needs=info.needs,
                worker=info.worker,
                created=info.created,
                seconds=info.seconds,
            )
        except (PayloadError, InvalidRollout) as error:
            self._fail(pending, str(error))
            return None

    async def _add_column(self, work: dict[_Pending, Group]) -> None:
        """Adds the column where it is needed, to all groups packed together; takes out those that cannot have it."""
        reference, column = self._reference, self._options.column
        if reference is None:
            return
        wanting = {
            pending: [s for rollout in group.rollouts if not rollout.failure for s in rollout.sequences]
            for pending, group in work.items()
            if column in self._wanted(pending.entry)
        }
        every = [sequence for sequences in wanting.values() for sequence in sequences]
        try:
            values = iter(await self._unless_stopped(in_thread(lambda: reference.logprobs(every))) if every else [])
        except (RuntimeError, IndexError, RlbufferError) as error:
            for pending in wanting:
                self._fail(pending, f"{type(error).__name__}: {error}")
                del work[pending]
            return
        for pending, sequences in wanting.items():
            of_sequence = iter([*islice(values, len(sequences))])
            try:
                rollouts = tuple(
                    rollout
                    if rollout.failure
                    else with_column(rollout, column, [next(of_sequence) for _ in rollout.sequences])
                    for rollout in work[pending].rollouts
                )
                work[pending] = replace(work[pending], rollouts=rollouts)
            except InvalidRollout as error:  # logprobs that are not finite: of a model that is broken
                self._fail(pending, str(error))
                del work[pending]

    def _stored(self, producer: Producer, group: Group, pending: _Pending) -> str:
        """Returns the entry that it became; "" when another was first. Waits as long as the server refuses."""
        while True:
            try:
                return producer.push([(group, pending.entry.entry_id)])[0].entry_id
            except ServerRefused as error:
                self._held_up(error)

    def _note(self, group: Group, *, is_first: bool, seconds: float) -> None:
        """Counts a group that was scored, here or by another before."""
        if not is_first:
            self._beat.late += 1
            _log.debug("group %s was scored by another", group.group_id, extra=fields("late", group_id=group.group_id))
            return
        rollouts, tokens = len(group.rollouts), sum(rollout.length for rollout in group.rollouts)
        self._beat.groups += 1
        self._beat.rollouts += rollouts
        self._beat.tokens += tokens
        self._beat.error = ""
        counts = {
            "group_id": group.group_id,
            "env": group.env,
            "rollouts": rollouts,
            "tokens": tokens,
            "seconds": seconds,
        }
        _log.debug("group %s is scored", group.group_id, extra=fields("scored", **counts))
        self._progress.add(rollouts, tokens)

    def _held_up(self, error: RlbufferError) -> None:
        """The writer waits for the server. Raises Stopped when there is no time for that."""
        self._beat.waiting = Waiting(kind=Wait.SERVER, detail=str(error))
        if self._stop.is_set():
            raise Stopped

    def _fail(self, pending: _Pending, reason: str) -> None:
        pending.failures += 1
        pending.try_at = time.monotonic() + RETRY_SECONDS * 2**pending.failures
        rest = ""
        if pending.failures >= GROUP_TRIES:
            rest = f" ({pending.failures} times: it is left alone)"
            self._found.pop(pending.entry.entry_id, None)
            self._beat.failed_groups += 1
        self._beat.error = f"group {pending.entry.group_id} cannot be scored: {reason}{rest}"
        _log.warning("%s", self._beat.error, extra=fields("trouble"))

    async def _unless_stopped(self, work: Awaitable[T]) -> T:
        """Gives the result of `work`; gives it up when the scorer is asked to stop."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                if self._stop.is_set():
                    raise Stopped
                await asyncio.wait({task}, timeout=SCORER_POLL_SECONDS)
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
