"""One leadership: what a leader does from its takeover until it stops, loses the lease or the server, or recovers.

Its memory lives in this object alone. Forgetting everything is making another one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlbuffer.batcher.turn import take_turn
from rlbuffer.config.batcher import BatcherConfig
from rlbuffer.config.losses import columns_of, needs_advantage
from rlbuffer.config.trainer import TrainerSettings
from rlbuffer.daemon.archiving import Archiving
from rlbuffer.daemon.lease_keeper import LeaseKeeper
from rlbuffer.daemon.memory_watch import MemoryWatch
from rlbuffer.daemon.pending import Pending, untrainable
from rlbuffer.daemon.reporter import TELEMETRY_SECONDS, Reporter
from rlbuffer.daemon.server_watch import ServerWatch
from rlbuffer.daemon.watches import (
    Claims,
    Ends,
    Envs,
    OpenRollouts,
    OperatorRequests,
    Retirement,
    TrainerWord,
    Watch,
    full_disk,
    is_silent,
    scorers_missing,
)
from rlbuffer.packing.further_columns import agree
from rlbuffer.process.garbage_collection import without_garbage_collection
from rlbuffer.process.logs import fields
from rlbuffer.records.states import CommitStatus
from rlbuffer.records.step_plan import Decision, StepPlan
from rlbuffer.records.waiting import FOR_GROUPS, Wait, Waiting
from rlbuffer.state.env_causes import explained
from rlbuffer.state.heartbeats import (
    GATEWAY,
    KINDS,
    Process,
    is_starting,
    processes,
    rank_problems,
    while_starting,
    worker_problems,
)
from rlbuffer.store.leader import LeaderStore
from rlbuffer.store.payloads import Trainable
from rlbuffer.store.records import Attempt, Decided, LeaderRead

_log = logging.getLogger(__name__)
LEADER_POLL_SECONDS = 0.02
"""Longest that a new push or a finished step waits to be noticed."""
RANK_FRESH_SECONDS = 10.0
"""Ranks beat every second; one that is silent for longer may be of a trainer that is gone."""
BURST_SECONDS = 0.005
"""Time left to what is pushed together with groups that make no step yet: a turn for each of them would be too many."""
BACKLOG_SECONDS = 5.0
"""Longest that no step is made while the pool is read. Groups that others push as fast may go on for ever."""


class LeaderTerm:
    """The time for which a process leads without a pause: one leadership after the other, while none is cut off."""

    def __init__(self, store: LeaderStore, archive: Archiving, server: ServerWatch) -> None:
        self.archive = archive
        """Keeps what retires."""
        self.server = server
        """Looks whether it is still as it was at the start."""
        self.since, self.began = store.now(), time.monotonic()
        """Its beginning: server time, and monotonic seconds."""
        self.trainer = TrainerWord(store, began=self.began, word=store.trainer().seen_ms)
        self.is_new = True
        """No leadership of it has taken over."""


class Leadership:
    """Leads a run under one fencing token.

    Args:
        store: the run.
        config: what steps are made of.
        reporter: says what happens.
        lease: is renewed while this leads.
        trainer: the trainer's settings, as far as this process knows them.
        term: what this leadership begins or goes on with.
        asked: what operators had asked for when the config was settled.
    """

    def __init__(
        self,
        store: LeaderStore,
        config: BatcherConfig,
        reporter: Reporter,
        *,
        lease: LeaseKeeper,
        trainer: TrainerSettings,
        term: LeaderTerm,
        asked: int = 0,
    ) -> None:
        self._store = store
        self._config = config
        self._reporter = reporter
        self._lease = lease
        self._term, self._archive, self._trainer = term, term.archive, term.trainer
        self._meta = store.meta()
        learns = needs_advantage(trainer.loss)
        self._pending = pending = Pending(
            store, config, reporter, since=term.since, began=term.began, needs_advantage=learns
        )
        self._needed = columns_of(trainer.loss)
        """Columns without which the trainer cannot train."""
        self._memory = MemoryWatch(store)
        self._ends, self._wishes = Ends(pending.batcher), OperatorRequests(asked, self._meta.epoch)
        self._envs = Envs(config, pending.batcher)
        self._watches: tuple[Watch, ...] = (
            self._ends,
            Claims(store, pending, self._archive),
            self._wishes,
            Retirement(store, pending, self._archive, self._memory),
            OpenRollouts(store),
            self._trainer,
            self._envs,
        )
        self._processes: tuple[Process, ...] = ()
        self._can = Trainable()
        """What its ranks can train."""
        self._beats_at = self._published = float("-inf")
        self._allowances: Mapping[str, int] = {}
        self._is_idle = False
        """No step can be made of what is here; nor will one be when the trainer goes on."""
        self._undecided: tuple[int, float, Waiting | None] = 0, float("-inf"), None
        """The step that was decided last and not made, when (monotonic), and why."""
        self._is_burst = False
        """The last turn took in groups, and made no step."""
        self._whole_at = time.monotonic()
        """When (monotonic) nothing was left unread."""
        self._began = pending.read_at
        """When everything was read, on the batcher's clock."""
        self.ended: int | None = None
        """The step after which the run has ended, once it has."""

    def take_over(self) -> None:
        """Everything comes from the server."""
        self._reporter.forget()
        self._archive.take_in(self._meta)
        self._memory.start(self._meta)
        self._stay()
        if self._meta.error:
            # Not before: ranks that wait must not miss an error that comes again.
            self._store.set_error("")
        # Collections would be two fifths of the CPU of taking over 100,000 groups.
        with without_garbage_collection(stays=True):
            self._pending.restore()
            while self._pending.take_in().entries:
                self._stay()
        self._began = self._pending.read_at
        extra = fields(
            "ready" if self._term.is_new else "read again",
            run=self._store.run,
            step=self._meta.step,
            epoch=self._meta.epoch,
            pending=self._pending.count,
            server=dict(self._store.server()),
        )
        level = logging.INFO if self._term.is_new else logging.DEBUG
        _log.log(level, 'serving run "%s" from step %d', self._store.run, self._meta.step, extra=extra)
        self._term.is_new = False
        self._reporter.stats.lead(self._pending.batcher, self._config)

    def turn(self) -> None:
        """One look at the run, all watches, one decision. Raises ReadAgain."""
        look = self._read()
        self._stay()
        self._tell_workers(look.trainer)
        for watch in self._watches:
            watch.tick(look)
            if watch.why is not None:
                # Nothing that is sampled now is known to train, and an allowance of before lets workers go on for ever.
                self._is_idle = is_silent(look.trainer) or look.trainer.number == 0
                self._publish({})
                self._report(watch.why)
                return
        if look.sources is not None:
            self._whole_at = time.monotonic()
        elif time.monotonic() - self._whole_at < BACKLOG_SECONDS:
            return  # the rest of the pool is read first: how old its groups are goes by now
        # A third of the CPU of a step of 32,768 rollouts, whose plan and parts are gone when it is made.
        with without_garbage_collection():
            self._lead(look)

    def _read(self) -> LeaderRead:
        if self._is_burst:
            time.sleep(BURST_SECONDS)
        now = time.monotonic()
        is_due = now - self._beats_at > TELEMETRY_SECONDS
        look = self._pending.take_in(block_seconds=LEADER_POLL_SECONDS, beats=KINDS if is_due else ())
        if is_due:
            self._beats_at = now
            self._processes = tuple(each for kind, beats in look.beats.items() for each in processes(kind, beats))
            ranks = look.beats.get("rank", {}).values()
            self._can = Trainable.of(beat for beat in ranks if beat["seconds_ago"] <= RANK_FRESH_SECONDS)
        self._meta, self._is_burst = look.meta, bool(look.entries)
        return look

    def _lead(self, look: LeaderRead) -> None:
        trainer, step, batcher = look.trainer, look.meta.step + 1, self._pending.batcher
        self._is_idle = is_silent(trainer)
        published = {adapter: policy.version for adapter, policy in trainer.policies.items()}
        self._reporter.stats.published = published
        held = self._trainer.busy(look, self._config) or self._filling(look)
        started, now = time.perf_counter(), self._pending.read_at
        turn = take_turn(
            batcher,
            step=step,
            published=published,
            under_way=self._store.tickets_out() if self._config.slow == "wait" else {},
            is_held=held is not None,
            world_size=trainer.world_size,
            now=now,
        )
        decision = turn.decision
        if decision is not None and self._has_ended(decision, trainer):
            return
        pending = self._pending
        decided = Decided(
            read=pending.read,
            decided=now,
            since=pending.since,
            began=self._began,
            published=published,
            is_held=decision is None,
        )
        pending.drop(turn.drops, decided)
        self._publish({} if trainer.is_finished else turn.allowances)
        if decision is None:
            self._report(self._end_of(trainer) or held)
            return
        # While no tickets are given, silence is what was asked for.
        self._envs.report_silent({} if self._wishes.is_draining else decision.dead, step)
        if decision.plan is not None:
            self._commit(decision, decision.plan, trainer, started, decided)
            return
        self._is_idle = True
        why = self._end_of(trainer) or decision.why
        is_draining = self._wishes.is_draining and why is not None and why.kind in FOR_GROUPS
        why = Waiting(kind=Wait.DRAINING) if is_draining else why
        self._undecided = step, time.monotonic(), why
        self._report(why)

    def _filling(self, look: LeaderRead) -> Waiting | None:
        """The reason of the last decision, where only groups came since, and still too few of them: another decision
        would be the same. One of a step that waits is made once nothing comes, or every second."""
        step, at, why = self._undecided
        is_same = step == look.meta.step + 1 and time.monotonic() - at < TELEMETRY_SECONDS
        return why if look.entries and is_same and self._pending.batcher.lacks_groups(look.trainer.world_size) else None

    def _end_of(self, trainer: Attempt) -> Waiting | None:
        """The reason of a trainer that has made its last step; None of one that has not, or left otherwise."""
        return Waiting(kind=Wait.ENDED, step=trainer.trained) if trainer.is_finished else None

    def _tell_workers(self, trainer: Attempt) -> None:
        """Workers may not read what the trainer says; they read meta."""
        finished = f"{trainer.number} {trainer.trained}" if trainer.is_finished else ""
        if finished != self._meta.finished:
            if finished:
                self._publish({})  # a worker that begins behind the end takes none of before it
            self._store.set_finished(finished)

    def _has_ended(self, decision: Decision, trainer: Attempt) -> bool:
        """True when the run has ended: nothing more comes, and what came is trained. One that had ended may go on."""
        step, ended = self._meta.step, self._meta.ended
        if not decision.is_over or trainer.trained < step:
            if ended is not None:
                self._store.set_ended(None)
            return False
        if ended != step and not self._store.set_ended(step, self._ends.sources.written):
            return False
        self.ended = step
        self._reporter.ended(step)
        return True

    def _stay(self) -> None:
        """Raises LeaseLost when the lease expired, or the server was away since this leadership began.

        It may be back without its newest writes: a drop, a commit, pushes that were read already. Then the trainer must
        speak again before anything is committed.
        """
        self._lease.check(self._meta.step + 1)
        self._store.stay(self._store.since)

    def _publish(self, allowances: Mapping[str, int]) -> None:
        """Publishes the allowances also when nothing changed: an older one that was delayed on its way may have
        replaced them."""
        now = time.monotonic()
        if allowances != self._allowances or now - self._published > TELEMETRY_SECONDS:
            self._store.set_allowances(allowances)
            self._allowances, self._published = dict(allowances), now
        self._pending.close_tickets()

    def _commit(self, decision: Decision, plan: StepPlan, trainer: Attempt, started: float, decided: Decided) -> None:
        used = self._pending.of(plan)
        reason = "a payload is missing or of another size than its metadata says"
        broken = dict.fromkeys(self._store.pin(plan.rollouts, used), reason)
        if not broken:
            infos = {use.entry_id: use.info for use in plan.entries}
            columns, broken = agree(plan, self._needed)
            broken |= untrainable(infos, self._can)
        if broken:
            self._pending.drop_broken(broken)
            return
        status, found = self._store.commit(
            plan,
            used,
            meta=self._memory.marked(self._meta, trainer),
            state=decision.state,
            waiting_for_version=decision.waiting_for_version,
            columns=columns,
            decided=decided,
        )
        if status == CommitStatus.GONE:
            self._pending.refused(plan, found)
            return
        self._pending.committed(plan)
        self._meta = replace(self._meta, step=plan.step)
        self._is_idle = self._is_burst = False
        self._report(None)
        seconds = time.perf_counter() - started
        self._memory.committed(found)
        self._reporter.stats.committed(plan, used, found, seconds)
        self._reporter.step(found, round(1000 * seconds, 2), plan.flat)

    def _report(self, waiting: Waiting | None) -> None:
        workers = [process for process in self._processes if process.kind == "worker"]
        gateways = [process for process in self._processes if process.kind == GATEWAY]
        waiting = explained(waiting, workers, self._pending.batcher.silence(self._pending.now), gateways)
        waiting = while_starting(waiting, self._processes)
        if waiting is not None:
            waiting = full_disk(self._processes) or waiting
        missing = scorers_missing(self._pending.batcher.needs, self._processes)
        self._reporter.report(
            waiting,
            self._state,
            [
                *self._term.server.problems(),
                *self._archive.problems(),
                *self._memory.problems(),
                *missing,
            ],
            [
                *worker_problems(workers, waiting, is_starting=is_starting(self._processes)),
                *rank_problems(self._processes),
            ],
        )

    def _state(self) -> dict[str, Any]:
        """The leader's own part of its heartbeat."""
        return {
            "step": self._meta.step,
            "envs": self._pending.batcher.pool_sums(self._meta.step),
            "idle": self._is_idle,
            "archive": str(self._archive.folder or ""),
        }
