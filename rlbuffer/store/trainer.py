"""What the trainer does: ATTEMPT, REPORT and ANNOUNCE, each fenced by the attempt's number, and what its ranks say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rlbuffer.errors import (
    AttemptFenced,
    AttemptForgotten,
    EpochChanged,
    InvalidArgument,
    ResumeRefused,
    ResumeRetired,
    RlbufferError,
    TrainerAhead,
)
from rlbuffer.records.checks import as_integer
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.records.states import ReportStatus
from rlbuffer.store.claim import encode_claim
from rlbuffer.store.history import TrainerStarted
from rlbuffer.store.member import Member
from rlbuffer.store.pool import HISTORY_ENTRIES
from rlbuffer.store.records import Attempt, Claim, TrainedStep
from rlbuffer.store.session import number as number_of
from rlbuffer.store.session import text
from rlbuffer.store.step_in_hand import NOTHING, RankZero, StepInHand
from rlbuffer.store.unused import unused_lines
from rlbuffer.wire import payload

KEPT_RECORDS = 1000
"""Records of trained steps that are kept, about: 2 KB each."""


class TrainerStore(Member):
    """A run for the ranks of its trainer."""

    def attempt(
        self,
        *,
        uuid: str,
        world_size: int,
        resume_step: int,
        claim: Claim | None = None,
        announces: bool = False,
        settings: Mapping[str, Any] | None = None,
    ) -> Attempt:
        """ATTEMPT: from here on older attempts are fenced. The same `uuid` again gives the same attempt. `announces`:
        versions count what the trainer announces, and not steps. `settings`: what it trains with, for the history.

        A policy version above the run's last step, made from steps that the server has lost, is taken back. A trainer
        whose checkpoint is ahead of the server hands back `claim`, and the leader lets the run go on from there.
        Raises RunGone; ResumeRefused when the run does not reach to `resume_step` and nothing is handed back;
        ResumeRetired.
        """
        world_size, resume_step = as_integer("world_size", world_size, low=1), as_integer("resume_step", resume_step)
        keys = (self.keys.trainer, self.keys.meta, self.keys.policy, self.keys.steps, self.keys.history)
        given = ("", "", b"") if claim is None else (claim.epoch, claim.digest, encode_claim(claim))
        record = b""
        if settings is not None:
            record = payload.dumps(
                TrainerStarted(step=resume_step, world_size=world_size, settings=settings).as_object()
            )
        reply = self.move(
            "attempt",
            keys,
            (*(uuid, world_size, resume_step), *given, self.server_id(), int(announces), record, HISTORY_ENTRIES),
        )
        status = text(reply[0])
        if status == "OK":
            number, newest, epoch = map(int, reply[1:4])
            return Attempt(number=number, world_size=world_size, resume_step=resume_step, epoch=epoch, newest=newest)
        if status == "AHEAD":
            raise ResumeRefused(
                f"the trainer resumes after step {resume_step}, but run {self.run!r} ends at step {text(reply[1])}: "
                f"the checkpoint belongs to another run or to steps that were taken back, or the server lost its "
                f"newest steps. The trainer takes its newest checkpoint: move later ones away, or use another run name"
            )
        if status == "DIGEST":
            raise ResumeRefused(
                f"the trainer resumes after step {resume_step}, but run {self.run!r} has another step {resume_step} "
                f"({text(reply[1])[:12]}): the checkpoint belongs to another run or to a step that was taken back. The "
                f"trainer takes its newest checkpoint: move later ones away, or use another run name"
            )
        if status == "RETIRED":
            retired = text(reply[1])
            raise ResumeRetired(
                f"the trainer resumes after step {resume_step}, but steps up to {retired} of run {self.run!r} were "
                f"retired: resume from a checkpoint of step {retired} or later, start another run, or take this one "
                f"back to step {resume_step} with `rlbuffer runs rewind {resume_step} --force`"
            )
        raise self.unexpected("attempt", reply)

    def report(
        self,
        number: int,
        *,
        epoch: int,
        trained: int,
        digest: str,
        oldest_kept: int,
        checkpoint: int = 0,
        newest: int = 0,
        claim: Claim | None = None,
        server: str = "",
        hand: StepInHand = NOTHING,
        takes: bool = False,
        unused: Iterable[TrainedStep] = (),
        finished: bool = False,
    ) -> ReportStatus:
        """REPORT: acknowledgement, checkpoint notice and heartbeat in one; monotone. `server`: whose steps the trainer
        has; "" for this one's. `hand`: what its loop was given last; `takes`: will be, if it is here. `unused`: the
        steps up to `trained` of which something was not trained. `finished`: it has made its last step.
        Raises AttemptFenced, AttemptForgotten, EpochChanged, TrainerAhead (without a claim).
        """
        kept = {"trained": trained, "oldest_kept": oldest_kept, "checkpoint": checkpoint, "newest": newest}
        trained, oldest_kept, checkpoint, newest = (as_integer(name, step) for name, step in kept.items())
        keys = self.keys
        handed_back = b"" if claim is None else encode_claim(claim)
        reply = self.move(
            "report",
            (keys.trainer, keys.meta, keys.steps, keys.ledger, keys.policy, keys.unused, keys.history),
            (
                *(number, epoch, trained, digest, oldest_kept, handed_back, checkpoint, newest),
                *(server or self.server_id(), str(hand), int(takes)),
                *(unused_lines(unused), int(finished), HISTORY_ENTRIES),
            ),
        )
        status = text(reply[0])
        if status == "OK":
            return ReportStatus.OK if text(reply[2]) == "1" else ReportStatus.LOST
        if claim is not None and status in ("AHEAD", "DIGEST"):
            return ReportStatus.HANDED_BACK
        there = text(reply[1])
        if status == "FENCED":
            raise self._superseded(number, there)
        if status == "EPOCH":
            raise EpochChanged(
                f"run {self.run!r} is in epoch {there or 'none'}, the trainer in {epoch}: it was "
                "reset, rewound or recovered",
                epoch=int(there or 0),
                since=int(reply[2] or 0),
            )
        if status == "AHEAD":
            raise TrainerAhead(
                f"the trainer has trained step {trained}, but run {self.run!r} ends at step {there}: "
                f"the server lost acknowledged writes (power cut or failover)"
            )
        if status == "DIGEST":
            raise TrainerAhead(
                f"the trainer trained step {trained} with digest {digest}, but run {self.run!r} has {there} there"
            )
        if status == "MISSING":
            raise RlbufferError(f"run {self.run!r} has lost step {there}, which was never trained ({keys.steps})")
        raise self.unexpected("report", reply)

    def rank_0(self) -> RankZero:
        """Rank 0 of the registered attempt, for the other ranks: one small read."""
        names = ("number", "world_size", "at", "seen")
        *values, hand = self.look(lambda client: client.hmget(self.keys.trainer, *names, "hand"))
        number, world_size, at, seen_ms = (number_of(value) or 0 for value in values)
        return RankZero(attempt=number, world_size=world_size, at=at, seen_ms=seen_ms, hand=StepInHand.of(hand or b""))

    def announce(self, number: int, version: PolicyVersion) -> bool:
        """ANNOUNCE. -> False when an equal or newer version is already there, unless only this one has weights.

        Raises AttemptFenced, RunGone.
        """
        if version.version < 0:
            raise InvalidArgument(f"announce: policy version {version.version} must not be negative")
        labels = [dict(version.labels)] if version.labels else []
        record = payload.dumps([version.location, version.size, version.checksum, *labels])
        keys = self.keys
        reply = self.move(
            "announce",
            (keys.trainer, keys.meta, keys.policy),
            (number, version.adapter, version.version, record, payload.dumps(["", 0, "", *labels])),
        )
        if text(reply[0]) == "FENCED":
            raise self._superseded(number, text(reply[1]))
        return text(reply[0]) == "OK"

    def _superseded(self, number: int, current: str) -> AttemptFenced | AttemptForgotten:
        # Numbers only grow, so a smaller one is of a server that came back without its newest writes.
        if int(current) < number:
            return AttemptForgotten(
                f"run {self.run!r} is not on the server any more, nor is attempt {number} of its trainer "
                f"({self.keys.trainer}): the server was emptied, or it lost its data"
            )
        return AttemptFenced(
            f"attempt {number} of run {self.run!r} is over: attempt {current} has taken over ({self.keys.trainer})"
        )

    def count_damaged(self, step: int, rollouts: Sequence[str]) -> None:
        """Counts rollouts of `step`, each ``<group> <rollout>``, that a pull found missing or damaged; each once."""
        if rollouts:
            keys = self.keys
            self._tell((keys.ledger, keys.damaged, keys.meta), ("damaged", step, *rollouts))

    def add_record(self, record: Mapping[str, Any]) -> None:
        """Keeps what the trainer measured in a step, until the archive has it: ``step``, ``digest``, and any figures.

        Of several of a step the last one counts. A server that does not allow it is told of once, in the log.
        """
        self._tell((self.keys.records,), ("record", payload.dumps(dict(record)), KEPT_RECORDS))
