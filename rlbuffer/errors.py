"""Every exception of rlbuffer. A docstring is the default message; an instance says what happened, with its values.

The attribute ``exit_code`` is what a command ends with: 1 failure, 3 config, 4 server unreachable, 5 timed out, 6
refused: started again, it would be refused again, until somebody has done what the message says.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

MOST_RECOVERIES_LOST = 100
"""Epochs by which a process may be ahead of a server that lost the recoveries which began them."""


class RlbufferError(Exception):
    """Something in rlbuffer failed."""

    exit_code = 1

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or inspect.getdoc(type(self)) or type(self).__name__)


def text_of(error: Exception) -> str:
    """What `error` says, with the notes that were added to it on its way."""
    return "\n".join([str(error) or type(error).__name__, *getattr(error, "__notes__", ())])


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what it came from, the last one first. Each comes once: an error that was raised again can be among
    its own causes."""
    seen: list[BaseException] = []
    while error is not None and not any(error is one for one in seen):
        yield error
        seen.append(error)
        error = error.__cause__ or error.__context__


def installed_by(extra: str) -> str:
    """What to type for the packages of an extra. No package index has rlbuffer: it is installed from a checkout.

    Example:
        >>> installed_by("train")
        "pip install '.[train]' in the checkout of rlbuffer"
    """
    return f"pip install '.[{extra}]' in the checkout of rlbuffer"


def clause(sentence: object) -> str:
    """What an error or somebody else says, to go on from in a sentence: without the full stop at its end.

    Example:
        >>> clause("The disk is full."), clause("it waits ..."), clause(NotFound("no step 9"))
        ('The disk is full', 'it waits ...', 'no step 9')
    """
    text = str(sentence).rstrip()
    return text[:-1] if text.endswith(".") and not text.endswith("..") else text


class InvalidRollout(RlbufferError, ValueError):
    """A rollout or group does not satisfy the rules of its record."""


class InvalidLoss(RlbufferError, ValueError):
    """A loss cannot be trained: it is no number that the model has made, or it is not finite."""


class PackingError(RlbufferError, ValueError):
    """Rollouts cannot be packed as asked."""


class InvalidArgument(RlbufferError, ValueError):
    """An argument of a call is of another kind than it must be, or outside its range."""


class PayloadError(RlbufferError, ValueError):
    """Bytes are not a payload that this version can read."""


class ConfigError(RlbufferError):
    """A setting is unknown, malformed, or can never make a batch."""

    exit_code = 3

    def __init__(self, message: str | None = None, *, setting: str = "") -> None:
        super().__init__(message)
        self.setting = setting
        """Dotted path of the setting, so that whoever loaded it can say where its value came from."""


class ConfigChanged(RlbufferError):
    """The run's settings changed while others were being asked for."""


class UnknownLabel(RlbufferError, LookupError):
    """A name is of no policy version that a stream's trainer has announced."""


class ServerUnreachable(RlbufferError, ConnectionError):
    """The Redis or Valkey server cannot be reached."""

    exit_code = 4


class BufferClosed(RlbufferError):
    """The buffer was closed in this process: nothing can be asked of its run through it any more."""


class PushFailed(RlbufferError):
    """A push failed for a reason of its own: those of other groups may go on."""

    group: Any = None
    """The group that the writer was asked to push."""


class PushBroken(ServerUnreachable, PushFailed):
    """The connection broke in the middle of a push, and the server answers others: the push itself may be the cause."""


class PushRefused(PushFailed):
    """The server, or a proxy before it, refuses a push, and would refuse it again: nothing of it is stored."""

    exit_code = 4

    def __init__(self, message: str | None = None, *, may_pass: bool = False) -> None:
        super().__init__(message)
        self.may_pass = may_pass
        """Nobody here knows the refusal: it may be of this moment."""


class ServerUnsuitable(RlbufferError):
    """The server is reachable but cannot hold a run: too old, or set to evict keys."""

    exit_code = 4


class ServerRefused(RlbufferError):
    """The server refused a write for a reason that passes (memory, disk, loading, failover)."""

    exit_code = 4
    is_known = True
    """False where its error has a code that stands in no table here: then nobody knows whether it passes."""


class ServerFull(ServerRefused):
    """The server is at its memory limit: it takes pushes again when steps retire."""


class WrongType(ServerRefused):
    """A key of the run holds another type than rlbuffer puts there: nothing can go on until it is gone."""


class WrongAnswer(RlbufferError):
    """The server's answer makes no sense here: it does not know the command, or a script of it failed."""


class SchemaMismatch(RlbufferError):
    """The run on the server was written by an incompatible version of rlbuffer."""

    def __init__(self, message: str | None = None, *, schema: int = 0) -> None:
        super().__init__(message)
        self.schema = schema
        """Of the run."""


class RunGone(RlbufferError):
    """The run was reset or rewound while this process was at work: its epoch is another one now."""


class RunDamaged(RunGone):
    """The run's meta is gone from the server and other keys of it are there: nothing begins beside them. Or its
    trainer's record cannot be read."""


class ResumeRefused(RunGone):
    """The trainer's checkpoint is of steps that the run does not have."""

    exit_code = 6


class EpochChanged(RunGone):
    """The run is in another epoch than this process."""

    def __init__(self, message: str | None = None, *, epoch: int = 0, since: int = 0) -> None:
        super().__init__(message)
        self.epoch = epoch
        """The run's epoch; 0 when there is no such run."""
        self.since = since
        """First epoch that `epoch` goes on from: whoever works in one from it on may follow."""

    def follows(self, epoch: int) -> bool:
        """True when a process of `epoch` can go on in the run's: one began from the other by a recovery of lost writes.

        The server may have lost a recovery, too, so `epoch` can be the newer one by a few. Epochs of a run that was
        made again are clock times, and lie further away.
        """
        return self.since <= epoch <= self.epoch + MOST_RECOVERIES_LOST


class TrainerAhead(RunGone):
    """The trainer has trained steps that the server does not have, or has otherwise: it lost acknowledged writes."""


class AttemptForgotten(RunGone):
    """The server does not know this attempt of the trainer any more: it lost acknowledged writes, or all of them."""


class ProducerGap(RlbufferError):
    """The server has not seen the pushes before this one."""

    def __init__(self, message: str | None = None, *, last: int = 0) -> None:
        super().__init__(message)
        self.last = last
        """The last sequence that the server has."""


class LeaseLost(RlbufferError):
    """Another batcher leads this run now."""


class BatcherFailed(RlbufferError):
    """The batcher stopped with a fatal error; every waiting rank is told."""


class BatchTimeout(RlbufferError, TimeoutError):
    """No batch came within the time allowed."""

    exit_code = 5


class TicketGone(RlbufferError):
    """The ticket is not out any more, or its group was begun by another: take another one."""

    is_out = False
    """The ticket is still out, and can be given back: the key of its caller stands for a group that is lost."""


class OpenRolloutUnknown(RlbufferError, LookupError):
    """There is no such open rollout on the server, or it has another capability."""


class OpenRolloutEnded(RlbufferError):
    """The open rollout has ended: it takes no calls any more."""

    def __init__(self, message: str | None = None, *, end: Any = None) -> None:
        super().__init__(message)
        self.end = end
        """How it ended (:class:`rlbuffer.store.open_rollouts.End`)."""


class OtherEnd(OpenRolloutEnded):
    """The open rollout has ended with another reward or failure."""


class OpenRolloutFull(RlbufferError):
    """The open rollout has as many calls, or as many bytes of them, as one may have."""


class EnvDone(RlbufferError):
    """The env has given all its tickets, and none is out: there is nothing more to sample."""


class RunEnded(EnvDone):
    """The run has ended: its trainer has made its last step, and nothing more is to be sampled."""


class StepRetired(RlbufferError):
    """The step was trained, checkpointed and retired: its payloads are gone."""


class ResumeRetired(StepRetired):
    """The steps after the trainer's checkpoint were retired."""

    exit_code = 6


class AttemptFenced(RlbufferError):
    """A newer attempt of the trainer has taken over."""


class WeightsError(RlbufferError):
    """Published weights are missing, incomplete or not those that were announced."""


class SamplerUnavailable(RlbufferError):
    """The sampler cannot be reached, or has broken; what was asked of it may be asked again."""


class SamplerBusy(SamplerUnavailable):
    """The sampler takes no request at this moment; it works otherwise."""

    def __init__(self, message: str | None = None, *, seconds: float = 0.0) -> None:
        super().__init__(message)
        self.seconds = seconds
        """Seconds after which it wants to be asked again; 0: it does not say."""


class RequestFailed(RlbufferError):
    """The sampler works, and gave no answer that can be used to this one request."""


class WrongLogprobs(RlbufferError):
    """A sampler's logprobs are not those of the policy that it says it serves."""


class PromptTooLong(RlbufferError):
    """A prompt leaves no room for a completion in the model's context."""


class ArchiveError(RlbufferError):
    """An archive cannot be written, or holds something else than was looked for."""


class CheckpointError(RlbufferError):
    """A checkpoint cannot be read or does not belong to this run."""


class OtherCheckpoint(CheckpointError):
    """A checkpoint is of another run, model or format."""

    exit_code = 6


class RankFailed(RlbufferError):
    """Another rank of the trainer failed; its own message says why."""


class PackedForwardError(RlbufferError):
    """The model does not give the same logprobs packed as separately."""

    exit_code = 6


class FilterError(RlbufferError, ValueError):
    """A filter (`--where`) cannot be understood."""

    exit_code = 2


class NotFound(RlbufferError, LookupError):
    """Nothing in the run has this id."""


class AmbiguousId(RlbufferError, LookupError):
    """Several ids begin so: more of the one that is meant is needed."""


class Skip(RlbufferError):
    """Raised by an env's ``prompt``: there is nothing to sample for this ticket."""


class UnknownParameter(RlbufferError):
    """A request asks for sampling that the worker's samplers do not do."""


class RewardFailed(RlbufferError):
    """A reward function raised, took too long, or gave no number."""


class TraceUnusable(RlbufferError):
    """A trace is no rollout that could be trained."""


class GroupFailed(RlbufferError):
    """Too few rollouts of a group could be made."""


class Aborted(RlbufferError):
    """The sampler was asked to stop: nothing is wrong with the group."""
