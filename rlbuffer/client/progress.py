"""The trainer's progress, and its reports to the server.

    GIVEN --trained--> ACKNOWLEDGED --(the server forgets)--> HANDED BACK --(a new epoch)--> ACKNOWLEDGED

A trainer remembers its last steps and the versions that it has announced. A server that lost acknowledged writes can
learn them from nobody else.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rlbuffer.errors import (
    AttemptForgotten,
    CheckpointError,
    EpochChanged,
    InvalidRollout,
    RlbufferError,
    RunGone,
    ServerRefused,
    TrainerAhead,
)
from rlbuffer.records.checks import as_integer, shown
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.records.states import ReportStatus
from rlbuffer.store.claim import pack_step, unpack_step
from rlbuffer.store.records import Claim, Meta, NotTrained, TrainedStep
from rlbuffer.store.step_in_hand import NOTHING, StepInHand
from rlbuffer.store.trainer import TrainerStore

HANDED_BACK_STEPS, HANDED_BACK_GROUPS, MOST_HANDED_BACK_STEPS = 8, 4096, 256
"""Steps that are handed back at least; further ones while all have so many groups at most; steps at most. A failover
loses a second or two of steps: few large ones, or dozens of small ones."""
REPORT_TRIES = 4
"""Reports in a row that find the run in another epoch than the one before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedSteps:
    """The steps that a trainer has trained. Replaced as a whole: the heartbeat never reads half of it."""

    step: int = 0
    digest: str = ""
    steps: tuple[TrainedStep, ...] = ()
    """The last ones, the oldest first."""

    def after(self, step: TrainedStep) -> TrainedSteps:
        """One step further, or back at a step that is trained again."""
        steps = [*(s for s in self.steps if s.step < step.step), step][-MOST_HANDED_BACK_STEPS:]
        groups = sum(len(s.group_ids) for s in steps)
        first = 0
        while groups > HANDED_BACK_GROUPS and len(steps) - first > HANDED_BACK_STEPS:
            groups -= len(steps[first].group_ids)
            first += 1
        return TrainedSteps(step=step.step, digest=step.digest, steps=tuple(steps[first:]))


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenStep:
    """A step that the trainer's loop was given."""

    hand: StepInHand = NOTHING
    server: str = ""
    """The server that had it then."""
    is_sure: bool = True
    """False while that is being said: it is given only if the server has it."""


NONE_TAKEN = GivenStep()


class Progress:
    """The progress of a trainer, as one of its ranks knows it. Rank 0 reports for all. Safe from several threads."""

    settings: Mapping[str, Any] | None = None
    """What the trainer trains with, as its program says it; the history keeps it."""

    def __init__(self, store: TrainerStore, *, world_size: int, reports: bool, announces: bool = False) -> None:
        self._store = store
        self._world_size = world_size
        self._reports = reports
        self._announces = announces
        """Versions count what is announced, as a stream's do, and not steps."""
        self._told = 0
        """The last step that this server has heard of with what was not trained of it."""
        self._lock = threading.Lock()  # reports in the order in which they were made
        self._losses = store.losses()
        self._announced: dict[str, PolicyVersion] = {}
        self.place = TrainedSteps()
        self.attempt = 0
        self.epoch = 0
        """Newest epoch of the run that is known."""
        self._reported = 0
        """The epoch that the server is in, as it last said."""
        self._newest = 0
        """Newest version that earlier attempts have made in this line, as far as the server knew at the beginning."""
        self.oldest_kept = 0
        self.checkpoint = 0
        """The newest that was written; 0 before the first."""
        self.is_finished = False
        """The last step is made; every report says so."""
        self._taken = NONE_TAKEN
        """The step that the loop was given last, or is about to be given."""
        self._postponed = NONE_TAKEN
        """A step that is trained, and acknowledged later; in hand until then, whatever becomes of those after it."""
        self.held: tuple[TrainedStep, ...] = ()
        """Steps that a stream's trainer was given and has not acknowledged yet, besides that one or with it."""

    def begin(self, resume_step: int | None) -> None:
        """Begins an attempt on the reporting rank; `resume_step` other than the place's forgets the place."""
        if resume_step is not None and resume_step != self.place.step:
            self.place = TrainedSteps(step=resume_step)
        if self._reports:
            self._register()
        elif not self.epoch:
            self.epoch = self._store.meta().epoch

    def takes(self, step: int, digest: str) -> bool:
        """The loop of rank 0 is given a step. -> False when the server has lost it since it was pulled ahead.

        One script looks whether the step is there and says that it is in hand. From then on every report says so: a
        server that comes back without the step hears it before it gets another one.
        """
        losses = self._store.losses()
        self._taken = taken = GivenStep(hand=StepInHand(step, digest), server=self._store.server_id(), is_sure=False)
        is_here = self.report() is ReportStatus.OK
        # A server that went away meanwhile may have told the other ranks of it before.
        is_told = is_here or self._store.losses() != losses
        self._taken = replace(taken, is_sure=True) if is_told else self._owed()
        if is_told and not is_here:
            self.report()
        return is_told

    def still_there(self, step: int, digest: str) -> bool:
        """True when the server has the step of this content. One that it has lost is let go of."""
        try:
            header = self._store.wait_step(step, block_seconds=0.0)
        except RlbufferError:
            return False  # it is away, or the run is gone: whoever pulls the step hears it
        if header is not None and header.digest == digest:
            return True
        self._taken = GivenStep(hand=StepInHand(step))
        return False

    def lets_go(self) -> None:
        """The step that it had taken is not trained: it asks again, for it or another one."""
        self._taken = self._owed()

    def postpones(self, step: int, digest: str) -> None:
        """The step that it had taken is trained, and acknowledged later. -> :meth:`trained`"""
        taken = self._taken
        is_taken = taken.hand == StepInHand(step, digest)
        self._postponed = (
            taken if is_taken else GivenStep(hand=StepInHand(step, digest), server=self._store.server_id())
        )

    def is_postponed(self, step: int) -> bool:
        """It is trained, and not acknowledged yet."""
        return self._owed().hand.step == step

    def _owed(self) -> GivenStep:
        """The step that is trained, and not acknowledged yet."""
        return self._postponed if self._postponed.hand.step > self.place.step else NONE_TAKEN

    def trained(self, *steps: TrainedStep, epoch: int) -> None:
        """Acknowledges steps, one after the other. Raises as :meth:`report`."""
        place = self.place
        for step in steps:
            place = place.after(step)
        self.place = place
        self.epoch = max(self.epoch, epoch)
        self.report()

    def report(self) -> ReportStatus:
        """Says how far the trainer is, and what it has in hand; hands back what the server forgot.

        Raises:
            AttemptFenced: a newer attempt has taken over.
            RunGone: the run is not there any more, was rewound, or has another step and nothing can be handed back.
        """
        if not self._reports or not self.attempt:
            return ReportStatus.OK
        with self._lock:
            for tries in range(REPORT_TRIES):
                try:
                    status = self._send()
                    if status is ReportStatus.LOST and self._takes_held():
                        continue
                    return status
                except EpochChanged as change:
                    if not change.follows(self.epoch) or tries == REPORT_TRIES - 1:
                        raise
                    # The server's loss was recovered: the run goes on after what this trainer had.
                    self._reported, self._losses, self._newest = change.epoch, -1, self.place.step
                    self.epoch = max(self.epoch, change.epoch)
                except AttemptForgotten as forgotten:
                    self._again(forgotten)
        return ReportStatus.LOST

    def _takes_held(self) -> bool:
        """The server has lost groups that a stream's trainer holds. -> True when they count as trained from now on.

        The trainer trains them, and nothing else is committed before it has; it may need further ones to do so.
        """
        ahead = [step for step in self.held if step.step > self.place.step]
        if not ahead or not self._taken.is_sure:
            return False
        for step in ahead:
            self.place = self.place.after(step)
        return True

    def announce(self, version: PolicyVersion) -> bool:
        """Announces a version, and remembers it for a server that forgets. -> False when a newer one is there.

        A server that takes no writes for now hears it with the next report that it takes.
        """
        announced = self._announced.get(version.adapter)
        if announced is not None and not version.labels:
            version = replace(version, labels=announced.labels)  # the weights of a version that has a label
        if announced is None or version.version >= announced.version:
            self._announced[version.adapter] = version
        try:
            try:
                return self._store.announce(self.attempt, version)
            except AttemptForgotten:
                self.report()
                return self._store.announce(self.attempt, version)
        except ServerRefused:
            with self._lock:
                self._losses = -1
            return True

    def check_run(self) -> Meta:
        """Returns the run as it is, for a rank that waits. Raises RunGone when no step can come any more."""
        meta = self._store.meta()
        if meta.step < self.place.step:
            self._check_epoch(meta)
        return meta

    def is_known(self) -> bool:
        """True when the run has the place's step, of this content, as trained, as far as it can still be known."""
        place, meta = self.place, self._store.meta()
        if min(meta.step, self._store.trainer().trained) < place.step:
            return False
        if place.step <= meta.retired or not place.digest:
            return True
        header = self._store.wait_step(place.step, block_seconds=0.0)
        return header is not None and header.digest == place.digest

    def is_going_back(self, step: int) -> bool:
        """True when the run is about to go on from before `step`, although the step is retired: what the trainer handed
        back was not carried out yet, or just now."""
        return bool(self._store.trainer().claim) or self._store.meta().retired < step

    def state_dict(self) -> dict[str, Any]:
        place = self.place
        steps = [pack_step(step) for step in place.steps]
        return {"step": place.step, "epoch": self.epoch, "digest": place.digest, "steps": steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from there. Raises CheckpointError where it is no state of a reader."""
        remedy = "give what state_dict() of a reader has given"
        if not isinstance(state, Mapping):
            raise CheckpointError(f"load_state_dict: expected a mapping, got {shown(state)}: {remedy}")
        if lacking := [name for name in ("step", "epoch", "digest") if name not in state]:
            there = shown(sorted(map(str, state)))
            raise CheckpointError(f"load_state_dict: the state has no {lacking[0]!r}, only {there}: {remedy}")
        try:
            step, epoch = (as_integer(name, state[name]) for name in ("step", "epoch"))
            steps = tuple(unpack_step(step) for step in state.get("steps", ()))
        except InvalidRollout as error:
            raise CheckpointError(f"load_state_dict: {error}: {remedy}") from None
        except (TypeError, ValueError, KeyError, AttributeError):
            raise CheckpointError(f"load_state_dict: steps are {shown(state['steps'])}: {remedy}") from None
        self.place = TrainedSteps(step=step, digest=str(state["digest"]), steps=steps)
        self.epoch = epoch

    # -- inside ----------------------------------------------------------------------------------------------------
    def _send(self) -> ReportStatus:
        losses, place, taken = self._store.losses(), self.place, self._taken
        if losses != self._losses:
            self._told = 0
        values: dict[str, Any] = {
            "epoch": self._reported,
            "trained": place.step,
            "digest": place.digest,
            "oldest_kept": self.oldest_kept,
            "checkpoint": self.checkpoint,
            "newest": 0 if self._announces else self._newest,
            "unused": [step for step in place.steps if step.unused and step.step > self._told],
            "server": self._server_of(taken, place.step),
            "hand": taken.hand,
            "takes": not taken.is_sure,
            "finished": self.is_finished,
        }
        try:
            status = self._store.report(self.attempt, **values)
        except TrainerAhead:
            claim = self._claim()
            if claim is None:
                raise
            status = self._store.report(self.attempt, **values, claim=claim)
            if status is not ReportStatus.HANDED_BACK:
                raise
            return status
        self._told = place.step
        if status is ReportStatus.OK and self._announces and self._has_moved(taken) and values["server"]:
            return self._send()
        if losses != self._losses:
            # The server was away, or went on after a loss: it may have forgotten what could be sampled from.
            for version in list(self._announced.values()):
                self._store.announce(self.attempt, version)
            self._losses = losses
        return status

    def _server_of(self, taken: GivenStep, trained: int) -> str:
        """Which server has what is in hand; "" where nothing is.

        Another one may not have it. Until the trainer's word on that, nothing is committed there, and what was sampled
        from it, should this trainer end, is of a line that is given up. A step that is taken behind one that is not
        acknowledged yet says where both are once it is sure.
        """
        postponed = self._postponed
        if postponed.hand.step > trained and not (taken.is_sure and taken.hand.digest):
            return postponed.server
        return taken.server if taken.hand.step > trained else ""

    def _has_moved(self, taken: GivenStep) -> bool:
        """This server has what a stream's trainer holds. -> True where that was another one's.

        It is said at once then: nothing more is committed here before, and the trainer may need just that to train any.
        """
        if self._taken is not taken or not taken.is_sure:
            return False
        here = self._store.server_id()
        self._taken = replace(taken, server=here)
        return here != taken.server

    def _claim(self) -> Claim | None:
        place = self.place
        if place.step and not place.digest:
            return None  # nothing is known of the step
        return Claim(step=place.step, epoch=self.epoch, digest=place.digest, steps=place.steps)

    def _register(self) -> None:
        attempt = self._store.attempt(
            uuid=uuid.uuid4().hex,
            world_size=self._world_size,
            resume_step=self.place.step,
            claim=self._claim(),
            announces=self._announces,
            settings=self.settings,
        )
        self.attempt, self._reported, self._newest = attempt.number, attempt.epoch, attempt.newest
        self.epoch = max(self.epoch, attempt.epoch)

    def _again(self, forgotten: AttemptForgotten) -> None:
        """The server has lost this very attempt: it is registered again, unless the run is gone or another one."""
        try:
            meta = self._store.meta()
        except RunGone:
            raise forgotten from None
        self._check_epoch(meta)
        self._register()

    def _check_epoch(self, meta: Meta) -> None:
        message = f"run {self._store.run!r} is in epoch {meta.epoch}, the trainer in {self.epoch}: it was reset"
        change = EpochChanged(message, epoch=meta.epoch, since=meta.since)
        if not change.follows(self.epoch):
            raise change


def remembered(
    step: int,
    digest: str,
    group_ids: tuple[str, ...],
    envs: Mapping[str, Mapping[str, Any]],
    unused: Mapping[str, NotTrained] | None = None,
) -> TrainedStep:
    """A step's header as it is kept, and what of it was given and not trained."""
    totals = {env: (int(values["rollouts"]), int(values["tokens"])) for env, values in envs.items()}
    return TrainedStep(step=step, digest=digest, group_ids=group_ids, envs=totals, unused=unused or {})
