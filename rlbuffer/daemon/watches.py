"""The watches of a leader. Each sees what a turn has read, and looks after one thing; any may hold the turn up."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping

from rlbuffer.batcher.batcher import Batcher
from rlbuffer.config.batcher import BatcherConfig
from rlbuffer.daemon.archiving import Archiving
from rlbuffer.daemon.memory_watch import MemoryWatch
from rlbuffer.daemon.pending import Pending
from rlbuffer.daemon.strays import Strays
from rlbuffer.errors import LeaseLost, RlbufferError
from rlbuffer.process.logs import fields
from rlbuffer.records.waiting import Problem, Trouble, Wait, Waiting
from rlbuffer.state.heartbeats import Process
from rlbuffer.state.text import plural
from rlbuffer.store.claim import ATTEMPT_SECONDS
from rlbuffer.store.leader import LeaderStore
from rlbuffer.store.records import Attempt, LeaderRead, Sources, is_stream

_log = logging.getLogger(__name__)
SWEEP_SECONDS = 5.0
"""Seconds between two sweeps of what scored groups leave behind."""
FORGET_SECONDS = 60.0
"""Seconds between two looks for open rollouts that were pushed long ago."""
TRAINER_SILENT_SECONDS = 10.0
"""A trainer reports every second, also while it waits: after ten of these missed it is called silent."""


class ReadAgain(Exception):
    """What is in memory may not be true any more: everything is to be read again."""


class Watch:
    """One thing that a leader looks after. A turn calls its watches in order, and ends at the first that has a `why`:
    those behind it see nothing of the turn."""

    why: Waiting | None = None
    """The reason why no step can be made now, and none is sampled for; None: the turn goes on."""

    def tick(self, look: LeaderRead) -> None:
        """Acts on what the turn has read. Raises ReadAgain where the leader's memory may not be true any more."""


class Ends(Watch):
    """Tells the batcher which envs are done, once all that they have pushed is read."""

    def __init__(self, batcher: Batcher) -> None:
        self._batcher = batcher
        self.sources = Sources()
        """What the batcher knows."""

    def tick(self, look: LeaderRead) -> None:
        if look.sources is not None:
            self.sources = seen = look.sources
            expected = {f"[worker.{section}]" for section in seen.expected}
            self._batcher.set_sources(done=seen.done, declared=seen.declared, others=seen.open | expected)


class Claims(Watch):
    """A trainer has steps that the server lost: the run goes on after them.

    A claim may be older than the loss, and than the step in hand: the trainer is heard as after any takeover.
    """

    def __init__(self, store: LeaderStore, pending: Pending, archive: Archiving) -> None:
        self._store, self._pending, self._archive = store, pending, archive

    def tick(self, look: LeaderRead) -> None:
        if not look.trainer.claim:
            self.why = None
        elif self._archive.is_catching_up(look.meta.step):
            self.why = Waiting(kind=Wait.TAKEOVER, step=look.meta.step)
        else:
            outcome = self._store.recover(look.trainer, self._pending.entries())
            if outcome is not None:
                _log.warning(
                    "the server had lost %s that the trainer has trained: the run goes on after step %d in epoch %d; "
                    "%s will not be trained again",
                    plural(outcome["forgotten"], "step"),
                    outcome["step"],
                    outcome["epoch"],
                    plural(outcome["groups"], "group"),
                    extra=fields("recovery", **outcome),
                )
                self._store.retire(int(outcome["step"]))
            raise ReadAgain


class OperatorRequests(Watch):
    """Requests of operators: settings, drops, a run taken back. Each is met by reading everything again.

    Args:
        asked: `Meta.asked` as it was before anything else was read, the settings included.
        epoch: in which everything was read.
    """

    def __init__(self, asked: int, epoch: int) -> None:
        self._asked, self._epoch = asked, epoch
        self.is_draining = False
        """No tickets are given."""

    def tick(self, look: LeaderRead) -> None:
        if look.meta.epoch != self._epoch:
            raise LeaseLost(
                f"the run is in epoch {look.meta.epoch}, and was read in epoch {self._epoch}: everything is read again"
            )
        self.is_draining = look.meta.draining_ms > 0
        if look.meta.asked != self._asked:
            raise ReadAgain


class Retirement(Watch):
    """Steps that no checkpoint needs any more retire, once they are archived. Where memory is short strays go first,
    then trained steps that no checkpoint holds."""

    def __init__(self, store: LeaderStore, pending: Pending, archive: Archiving, memory: MemoryWatch) -> None:
        self._store, self._pending, self._archive, self._memory = store, pending, archive, memory
        self._strays = Strays(store, pending, memory.freed)
        self._swept = float("-inf")
        self._may_be_garbage = True
        """An earlier leader may have left payloads to sweep, which wait until they are archived."""

    def tick(self, look: LeaderRead) -> None:
        trainer, newest, share = look.trainer, look.meta.step, self._memory.share
        up_to = self._archive.may_retire(min(trainer.oldest_kept, trainer.trained, newest), share=share)
        if up_to > look.meta.retired:
            self._store.retire(up_to)
            self._memory.retired(up_to)
        is_due = (self._pending.replaced or self._may_be_garbage) and time.monotonic() - self._swept > SWEEP_SECONDS
        if is_due and self._archive.may_retire(newest, share=share) == newest:
            # Scored groups have left payloads behind; they must not wait for a checkpoint.
            self._swept, self._pending.replaced, self._may_be_garbage = time.monotonic(), 0, False
            self._store.retire(max(up_to, look.meta.retired))
        self._relieve(look)

    def _relieve(self, look: LeaderRead) -> None:
        """Where memory is short strays go first, and trained steps only when that was not enough."""
        is_short = self._memory.is_short() or self._strays.are_expiring
        if is_short and not self._strays.sweep(look):
            return
        if not is_short or self._memory.relieve(look.trainer, look.meta.step, self._archive):
            self._strays.begin()


class OpenRollouts(Watch):
    """Forgets open rollouts that were pushed long ago."""

    def __init__(self, store: LeaderStore) -> None:
        self._store = store
        self._looked = time.monotonic()

    def tick(self, look: LeaderRead) -> None:
        if time.monotonic() - self._looked > FORGET_SECONDS:
            self._looked = time.monotonic()
            self._store.forget_open_rollouts()


class TrainerWord(Watch):
    """Nothing is committed before the trainer says what it has trained, nor sampled before it has announced weights.

    After a loss of acknowledged writes the next step here may be one that the trainer has trained already, or has in
    hand, with other content. So it must report after a takeover, or be silent for so long that it counts as gone. On a
    server that no trainer has spoken to yet, silence is no word: versions may be out there that are not known here, and
    only the next attempt, or the one that lives, can begin another line of them.

    Args:
        store: the run.
        began: monotonic seconds of the takeover.
        word: when the trainer had spoken last by then, by the server's clock, which may be set back: a change counts.
    """

    def __init__(self, store: LeaderStore, *, began: float, word: int) -> None:
        self._store, self._began, self._word = store, began, word
        self._has_heard = False

    def tick(self, look: LeaderRead) -> None:
        trainer, step = look.trainer, look.meta.step
        self._has_heard = self._has_heard or self._hears(trainer)
        self.why = None
        if trainer.number == 0:
            self.why = Waiting(kind=Wait.NO_TRAINER)
        elif not self._has_heard and not trainer.is_finished:  # one that has made its last step says nothing more
            taken_over = Waiting(kind=Wait.TAKEOVER, step=step)
            self.why = self.silence(look) or in_hand(look) or self._at_work(look) or taken_over
        elif not trainer.policies:
            self.why = Waiting(kind=Wait.VERSION, step=step + 1, is_stream=is_stream(look.meta))

    def busy(self, look: LeaderRead, config: BatcherConfig) -> Waiting | None:
        """The reason of a trainer that has enough steps; None when the next one may be made.

        The trainer of a stream holds as many groups as its update takes, which nobody knows before: there it counts
        what it has taken.
        """
        step, trained, lookahead = look.meta.step, look.trainer.trained, config.lookahead
        if config.is_stream:
            hand = look.trainer.hand
            taken = max(trained, min(hand.step, step)) if hand.digest else trained
            is_full = step > taken + lookahead
            why = Waiting(kind=Wait.NOT_TAKEN, step=step, trained=taken, limit=lookahead) if is_full else in_hand(look)
        elif step > trained + lookahead:
            at = look.trainer.at
            is_under_way = at == trained > look.trainer.resume_step  # it has trained a new step
            why = Waiting(
                kind=Wait.TRAINER_BUSY,
                step=step,
                trained=trained,
                limit=lookahead,
                at=-1 if is_under_way else at,
                checkpoint=0 if is_under_way else look.trainer.resume_step,
            )
        else:
            why = in_hand(look)
        return why and (self.silence(look) or why)

    def silence(self, look: LeaderRead) -> Waiting | None:
        """The reason of a trainer that says nothing; None while it speaks."""
        trainer = look.trainer
        if trainer.seen_ms and not is_silent(trainer):
            return None
        seconds = (trainer.seen_seconds_ago or 0.0) // 10 * 10 if trainer.seen_ms else 0.0
        return Waiting(kind=Wait.TRAINER_GONE, step=look.meta.step, trained=trainer.trained, seconds=seconds)

    def _at_work(self, look: LeaderRead) -> Waiting | None:
        """The reason of a trainer that speaks, and still trains a step that it took before the server was away."""
        trainer, step = look.trainer, look.meta.step
        has_spoken = trainer.seen_ms not in (0, self._word)
        is_in_hand = bool(trainer.hand.digest) and trainer.trained < trainer.hand.step <= step
        if not (has_spoken and is_in_hand):
            return None
        return Waiting(kind=Wait.TRAINER_BUSY, step=step, trained=trainer.trained, limit=step - trainer.trained)

    def _hears(self, trainer: Attempt) -> bool:
        has_spoken = trainer.seen_ms not in (0, self._word) or time.monotonic() - self._began > ATTEMPT_SECONDS
        return trainer.number > 0 and has_spoken and trainer.server in ("", self._store.server_id())


class Envs(Watch):
    """Tells the batcher of envs that an operator has paused, and people of those that have fallen silent."""

    def __init__(self, config: BatcherConfig, batcher: Batcher) -> None:
        self._config, self._batcher = config, batcher
        self._paused: frozenset[str] = frozenset()
        self._dead: frozenset[str] = frozenset()

    def tick(self, look: LeaderRead) -> None:
        for env in sorted(look.paused - self._paused):
            self._batcher.pause(env)
            _log.info("%s is paused: steps go on without it", env, extra=fields("env", env=env, state="paused"))
        for env in sorted(self._paused - look.paused):
            self._batcher.resume(env)
            _log.info("%s takes part again", env, extra=fields("env", env=env, state="resumed"))
        self._paused = look.paused

    def report_silent(self, dead: Mapping[str, float], step: int) -> None:
        """Tells of envs that have fallen silent or are back.

        Args:
            dead: env -> seconds of silence.
            step: the one that waits.

        Raises:
            RlbufferError: an env is dead and the settings say that this stops the run.
        """
        for env in sorted(dead.keys() - self._dead):
            sentence = str(Waiting(kind=Wait.ENV_DEAD, env=env, step=step, seconds=dead[env]))
            _log.warning("%s", sentence, extra=fields("env", env=env, state="dead", seconds=dead[env]))
            if self._config.on_dead_env == "stop":
                raise RlbufferError(f"step {step} cannot be made: {sentence} (batcher.on_dead_env = stop)")
        for env in sorted(self._dead - dead.keys()):
            if env not in self._paused:
                _log.info("%s is back", env, extra=fields("env", env=env, state="back"))
        self._dead = frozenset(dead)


def in_hand(look: LeaderRead) -> Waiting | None:
    """The reason of a trainer whose rank 0 trains the next step already, and will hand it back."""
    hand = look.trainer.hand
    is_next = bool(hand.digest) and hand.step > look.meta.step
    return Waiting(kind=Wait.STEP_IN_HAND, step=hand.step) if is_next else None


def is_silent(trainer: Attempt) -> bool:
    """It has missed its reports."""
    return (trainer.seen_seconds_ago or 0.0) > TRAINER_SILENT_SECONDS


def full_disk(processes: Iterable[Process]) -> Waiting | None:
    """The reason of a rank that has no room for what it writes; None where all have."""
    reasons = (process.waiting for process in processes if process.kind == "rank" and process.is_fresh)
    return next((waiting for waiting in reasons if waiting is not None and waiting.kind is Wait.DISK), None)


def scorers_missing(needs: Mapping[tuple[str, str], int], processes: Iterable[Process]) -> list[Problem]:
    """A problem for each need of pending groups ((env, need) -> groups) that no living scorer gives."""
    scorers = [each for each in processes if each.kind == "scorer" and each.is_fresh]  # else its claims are lost, too
    return [
        Problem(kind=Trouble.NO_SCORER, env=env, count=count, detail=need)
        for (env, need), count in sorted(needs.items())
        if not any(need in scorer.gives and (not scorer.envs or env in scorer.envs) for scorer in scorers)
    ]
