"""One leadership: what a leader does from its takeover until it stops, loses the lease or the server, or recovers.

Its memory lives in this object alone. Forgetting everything is making another one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlbuffer.config.batcher import BatcherConfig
from rlbuffer.config.losses import needs_advantage
from rlbuffer.config.trainer import TrainerSettings, needed_columns
from rlbuffer.daemon.archiving import Archiving
from rlbuffer.daemon.doubts import Doubts
from rlbuffer.daemon.envs import EnvWatch
from rlbuffer.daemon.lease_keeper import LeaseKeeper
from rlbuffer.daemon.memory_watch import MemoryWatch
from rlbuffer.daemon.pending import Pending
from rlbuffer.daemon.scorers import ScorerWatch
from rlbuffer.daemon.sources import SourceWatch
from rlbuffer.daemon.teller import TELEMETRY_SECONDS, Teller
from rlbuffer.daemon.watches import WishWatch
from rlbuffer.daemon.workers import WorkerWatch
from rlbuffer.errors import LeaseLost, StepRetired
from rlbuffer.packing.further_columns import agree
from rlbuffer.process.garbage_collection import without_garbage_collection
from rlbuffer.process.logs import fields
from rlbuffer.records.states import CommitStatus
from rlbuffer.records.step_plan import Decision, StepPlan
from rlbuffer.records.waiting import Wait, Waiting
from rlbuffer.state.text import plural
from rlbuffer.store.claim import ATTEMPT_SECONDS
from rlbuffer.store.leader import LeaderStore
from rlbuffer.store.records import Attempt

_log = logging.getLogger(__name__)
LEADER_POLL_SECONDS = 0.02
"""Longest that a new push or a finished step waits to be noticed."""
SWEEP_SECONDS = 5.0
"""Seconds between two sweeps of what scored groups leave behind."""
GONE_SECONDS = 3.0
"""A trainer that has said nothing for so long may have left; what it said last tells whether it had made its steps."""
TRAINER_SILENT_SECONDS = 10.0
"""A trainer reports every second, also while it waits: after ten of these missed it is called silent."""
WAITS_FOR_GROUPS = frozenset({Wait.ENV_SHORT, Wait.FILLING, Wait.ENV_DEAD})
"""While an operator drains the run, none of these is worth a word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenure:
    """The time for which a process leads without a pause: one leadership after the other, while none is cut off."""

    archive: Archiving
    """Keeps what retires."""
    since: float | None = None
    """Server time when it began; None: with the next leadership."""
    began: float = 0.0
    """Monotonic seconds when it began."""
    word: int = 0
    """When the trainer had spoken last by then, by the server's clock, which may be set back: a change counts."""
    has_heard: bool = False
    """The trainer has said in it what it has trained, or is silent: the server's steps are its steps."""


class Leadership:
    """Leads a run under one fencing token.

    Args:
        store: the run.
        config: what steps are made of.
        teller: says what happens.
        lease: is renewed while this leads; every move is fenced by its token.
        trainer: the trainer's settings, as far as this process knows them.
        tenure: what this leadership begins or goes on with.
        asked: what operators had asked for when the config was settled.
    """

    def __init__(
        self,
        store: LeaderStore,
        config: BatcherConfig,
        teller: Teller,
        *,
        lease: LeaseKeeper,
        trainer: TrainerSettings,
        tenure: Tenure,
        asked: int = 0,
    ) -> None:
        self._store = store
        self._config = config
        self._teller = teller
        self._lease = lease
        self._is_first = tenure.since is None
        self._archive = tenure.archive
        self._since = store.now() if tenure.since is None else tenure.since
        self._began = time.monotonic() if tenure.since is None else tenure.began
        self._word = store.trainer().seen_ms if tenure.since is None else tenure.word
        self._meta = store.meta()
        self._wishes = WishWatch(store, asked, self._meta)
        learns = needs_advantage(trainer.loss)
        clock = {"since": self._since, "began": self._began}
        self._pending = Pending(store, config, teller, needs_advantage=learns, **clock)
        self._scorers = ScorerWatch(store, self._pending.batcher)
        self._workers = WorkerWatch(store)
        self._doubts = Doubts(store, self._meta.step)
        self._needed = needed_columns(trainer)
        """Columns without which the trainer cannot train."""
        self._swept = float("-inf")
        self._may_be_garbage = self._archive.folder is not None
        """An earlier leader may have left payloads to sweep, which wait until they are archived."""
        self._envs = EnvWatch(store, config, self._pending.batcher)
        self._sources = SourceWatch(store, self._pending.batcher)
        self._memory = MemoryWatch(
            store, config, world_size=trainer.world_size, checkpoint_every=trainer.checkpoint.every
        )
        self._allowances: Mapping[str, int] = {}
        self._published = float("-inf")
        self._is_idle = False
        """No step can be made of what is here; nor will one be when the trainer goes on."""
        self._has_heard = tenure.has_heard
        self.ended: int | None = None
        """The step after which the run has ended, once it has."""

    @property
    def tenure(self) -> Tenure:
        """State that a leadership that follows this one goes on with."""
        return Tenure(
            archive=self._archive,
            since=self._since,
            began=self._began,
            word=self._word,
            has_heard=self._has_heard,
        )

    def take_over(self) -> None:
        """Everything comes from the server.

        Raises:
            ConfigError: the run does not fit the server's memory.
        """
        self._teller.forget()
        self._archive.take_in(self._meta)
        forecast = self._memory.start(self._meta, sweeps=self._archive.folder is None)
        self._stay()
        if self._meta.error:
            # Not before: ranks that wait must not miss an error that comes again.
            self._store.set_error("")
        # Collections would be two fifths of the CPU of taking over 100,000 groups.
        with without_garbage_collection(stays=True):
            self._pending.restore()
            while self._pending.ingest(block_seconds=0.0):
                self._stay()
        own = fields(
            "ready" if self._is_first else "read again",
            run=self._store.run,
            step=self._meta.step,
            epoch=self._meta.epoch,
            pending=self._pending.count,
            server=dict(self._store.server()),
            forecast=forecast,
        )
        level = logging.INFO if self._is_first else logging.DEBUG
        _log.log(level, 'serving run "%s" from step %d', self._store.run, self._meta.step, extra=own)
        self._memory.tell()
        self._teller.figures.lead(self._pending.batcher, self._config)

    def turn(self) -> bool:
        """Reads what is new and makes a step if it can be made. -> False: all is to be read again, or the run has
        ended."""
        self._sources.look()
        if not self._pending.ingest(block_seconds=LEADER_POLL_SECONDS):
            self._sources.update_ends()
        self._stay()
        trainer = self._store.trainer()
        if trainer.claim:
            if self._archive.is_catching_up(self._meta.step):
                return True
            self._recover(trainer)
            self._stay()
            return False
        if self._wishes.has_more():
            self._stay()
            return False
        self._retire(trainer)
        # A third of the CPU of a step of 32,768 rollouts, whose plan and parts are gone when it is made.
        with without_garbage_collection():
            self._lead(trainer)
        return self.ended is None

    def _lead(self, trainer: Attempt) -> None:
        meta, batcher = self._meta, self._pending.batcher
        self._is_idle = trainer.number == 0 or (trainer.seen_seconds_ago or 0.0) > TRAINER_SILENT_SECONDS
        unknown = self._unknown(trainer)
        if unknown:
            # Nothing that is sampled now is known to train, and an allowance of before lets workers go on without end.
            self._publish({})
            self._say(unknown)
            return
        policies = trainer.policies
        self._memory.joined(trainer)
        self._teller.figures.published = {adapter: policy.version for adapter, policy in policies.items()}
        for adapter in {"", *policies}:
            batcher.set_published(policies[adapter].version if adapter in policies else -1, adapter)
        self._envs.update_pauses()
        step = meta.step + 1
        if step > trainer.trained + 1 + self._config.lookahead:
            self._pending.drop(batcher.sweep(step))
            self._publish(batcher.allowances(step, world_size=trainer.world_size))
            self._say(self._end_of(trainer) or self._of_trainer(trainer))
            return
        if trainer.hand.digest and trainer.hand.step >= step:
            # Rank 0 trains a step of this number already, and will hand it back.
            self._publish(batcher.allowances(step, world_size=trainer.world_size))
            in_hand = Waiting(kind=Wait.STEP_IN_HAND, step=trainer.hand.step)
            self._say(self._of_trainer(trainer) if self._is_idle else in_hand)
            return
        started = time.perf_counter()
        now, rng = self._pending.now, np.random.default_rng(step)
        decision = batcher.next(step, world_size=trainer.world_size, now=now, rng=rng)
        if self._ends(decision, trainer):
            return
        self._pending.drop(decision.drops)
        self._publish(decision.allowances)
        # While no tickets are given, silence is what was asked for.
        self._envs.report_silent({} if self._wishes.is_draining else decision.dead, step)
        if decision.plan is None:
            self._is_idle = True
            why = self._end_of(trainer) or decision.why
            is_draining = self._wishes.is_draining and why is not None and why.kind in WAITS_FOR_GROUPS
            self._say(Waiting(kind=Wait.DRAINING) if is_draining else why)
            return
        self._commit(decision, decision.plan, trainer, started)

    def _unknown(self, trainer: Attempt) -> Waiting | None:
        """The reason of a trainer whose place is not known yet, or whose weights nobody can sample from; else None."""
        if trainer.number == 0:
            return Waiting(kind=Wait.NO_TRAINER)
        if not self._has_heard and not self._hears(trainer):
            is_silent = (trainer.seen_seconds_ago or 0.0) > TRAINER_SILENT_SECONDS
            return self._of_trainer(trainer) if is_silent else Waiting(kind=Wait.TAKEOVER, step=self._meta.step)
        return None if trainer.policies else Waiting(kind=Wait.VERSION, step=self._meta.step + 1)

    def _end_of(self, trainer: Attempt) -> Waiting | None:
        """The reason of a trainer that has made its steps and left; None while it is there, or left otherwise."""
        if (trainer.seen_seconds_ago or 0.0) <= GONE_SECONDS:
            return None
        beat = self._store.heartbeats("rank").get("0", {})
        return Waiting(kind=Wait.ENDED, step=trainer.trained) if beat.get("finished") == trainer.trained else None

    def _ends(self, decision: Decision, trainer: Attempt) -> bool:
        """True when the run has ended: nothing more comes, and what came is trained. One that had ended may go on."""
        step, known = self._meta.step, self._meta.ended
        if not decision.is_over or trainer.trained < step:
            if known is not None:
                self._store.set_ended(None)
                self._meta = self._store.meta()
            return False
        if known != step and not self._store.set_ended(step, self._sources.known.written):
            return False
        self.ended = step
        self._teller.ended(step)
        return True

    def _hears(self, trainer: Attempt) -> bool:
        """True when the trainer has reported since the takeover, or has been silent for so long that it counts as gone.

        Until then nothing is committed: after a loss of acknowledged writes the next step here may be one that the
        trainer has trained already, or has in hand, with other content. On a server that no trainer has spoken to yet,
        silence is no word: versions may be out there that are not known here, and only the next attempt, or the one
        that lives, can begin another line of them.
        """
        is_silent = time.monotonic() - self._began > ATTEMPT_SECONDS
        has_spoken = is_silent or trainer.seen_ms not in (0, self._word)
        self._has_heard = has_spoken and trainer.server in ("", self._store.server_id())
        return self._has_heard

    def _recover(self, trainer: Attempt) -> None:
        """The trainer has steps that the server lost: the run goes on after them.

        A claim may be older than the loss, and than the step in hand: the trainer is heard as after any takeover.
        """
        outcome = self._store.recover(trainer, self._pending.entries())
        if outcome is not None:
            lost, groups = plural(outcome["forgotten"], "step"), plural(outcome["groups"], "group")
            _log.warning(
                "the server had lost %s that the trainer has trained: the run goes on after step %d in epoch %d; %s "
                "will not be trained again",
                lost,
                outcome["step"],
                outcome["epoch"],
                groups,
                extra=fields("recovery", **outcome),
            )
            self._store.retire(int(outcome["step"]))

    def _of_trainer(self, trainer: Attempt) -> Waiting:
        step, trained, silent = self._meta.step, trainer.trained, trainer.seen_seconds_ago or 0.0
        if not trainer.seen_ms:
            return Waiting(kind=Wait.TRAINER_GONE, step=step, trained=trained)
        if silent < TRAINER_SILENT_SECONDS:
            return Waiting(kind=Wait.TRAINER_BUSY, step=step, trained=trained, limit=self._config.lookahead)
        return Waiting(kind=Wait.TRAINER_GONE, step=step, trained=trained, seconds=silent // 10 * 10)

    def _stay(self) -> None:
        """Raises LeaseLost when the lease lapsed, or the server was away since this leadership began.

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

    def _retire(self, trainer: Attempt) -> None:
        up_to = min(trainer.oldest_kept, trainer.trained, self._meta.step)
        up_to = self._archive.may_retire(up_to, share=self._memory.share)
        if up_to > self._meta.retired:
            self._store.retire(up_to)
            self._memory.retired(up_to)
            self._meta = self._store.meta()
        is_due = (self._pending.replaced or self._may_be_garbage) and time.monotonic() - self._swept > SWEEP_SECONDS
        newest = self._meta.step
        if is_due and self._archive.may_retire(newest, share=self._memory.share) == newest:
            # Scored groups have left payloads behind; they must not wait for a checkpoint.
            self._swept, self._pending.replaced, self._may_be_garbage = time.monotonic(), 0, False
            self._store.retire(self._meta.retired)
        if self._memory.relieve(trainer, self._meta, self._archive):
            self._meta = self._store.meta()

    def _commit(self, decision: Decision, plan: StepPlan, trainer: Attempt, started: float) -> None:
        used = self._pending.of(plan)
        reason = "a payload is missing or of another size than its metadata says"
        broken = dict.fromkeys(self._store.pin(plan.rollouts, used), reason)
        if not broken:
            infos = {key: entry.info for key, entry in used.items() if entry.info is not None}
            columns, broken = agree(plan, infos, self._needed)
            self._doubts.look(self._meta.step)
            if not broken and self._doubts.are_any:
                broken = self._doubts.unsound(plan, used, columns)
        if broken:
            self._pending.drop_broken(broken)
            return
        status, detail = self._store.commit(
            plan,
            used,
            meta=self._memory.marked(self._meta, trainer),
            state=decision.state,
            waiting_for_version=decision.waiting_for_version,
            columns=columns,
        )
        if status == CommitStatus.GONE:
            self._pending.refused(plan, detail)
            return
        self._pending.committed(plan)
        self._meta = self._store.meta()
        try:
            header = self._store.wait_step(plan.step, block_seconds=0.0)
        except StepRetired:
            raise LeaseLost(f"step {plan.step} was trained and retired meanwhile: another leads this run") from None
        self._is_idle = False
        self._say(None)
        if header is not None:
            seconds = time.perf_counter() - started
            self._memory.committed(header, self._meta)
            self._teller.figures.committed(plan, used, header, seconds)
            self._teller.step(header, round(1000 * seconds, 2), plan.flat)
        self._teller.settled()

    def _say(self, waiting: Waiting | None) -> None:
        watches = (self._archive, self._memory, self._scorers, self._doubts)
        self._teller.say(
            waiting,
            self._state,
            [problem for watch in watches for problem in watch.problems()],
            self._workers.problems(waiting),
        )

    def _state(self) -> dict[str, Any]:
        """The leader's own part of its heartbeat."""
        return {
            "step": self._meta.step,
            "envs": self._pending.batcher.pool_sums(self._meta.step),
            "idle": self._is_idle,
            "archive": str(self._archive.folder or ""),
        }
