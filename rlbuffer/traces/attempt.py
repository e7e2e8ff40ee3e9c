"""What a trace says of one attempt at a prompt, before it is a rollout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlbuffer.errors import InvalidRollout, RlbufferError
from rlbuffer.records.failure import Failure, kind_of
from rlbuffer.records.rollout import Rollout, TokenSequence
from rlbuffer.records.spans import Turn, VersionSpan
from rlbuffer.traces.values import Value


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stretch:
    """The tokens of a sequence, before the version that sampled them is known; a rollout has one or several."""

    tokens: NDArray[np.int32]
    """[T] int32."""
    loss_mask: NDArray[np.bool_]
    """[T] bool; a sampled token is trained in the first sequence that holds it."""
    logprobs: NDArray[np.float32]
    """[T] float32; inference logprobs, also of sampled tokens that an earlier sequence trains."""
    version_spans: tuple[VersionSpan, ...] = ()
    """Of the trained tokens; () where the producer does not say."""
    turns: tuple[Turn, ...] = ()
    """Role that spoke each range of tokens."""
    columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Further quantities per token."""
    name: str = ""
    """For people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceAttempt:
    """One attempt: a rollout, once its sequences are there."""

    at: Value
    """The record that it comes from."""
    group: str
    """What it has in common with the other attempts of its group."""
    prompt: str
    """Name of the prompt."""
    sequences: tuple[Stretch, ...] = ()
    """The main one first."""
    env: str = ""
    """As the producer calls it."""
    reward: float | None = None
    """Scalar; None: the producer does not say."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Named rewards."""
    finish_reason: str = ""
    """Why sampling ended."""
    is_truncated: bool = False
    """A limit ended it."""
    failure: Failure | None = None
    """Why it cannot be trained; `sequences` has what there is of its tokens. The kind is the producer's word."""
    at_limit: bool = False
    """`failure` is a limit that ended it, and it was scored all the same."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """What else is worth keeping."""


def rollout_of(attempt: TraceAttempt, *, policy_version: int | None) -> Rollout:
    """The rollout of an attempt that has sequences.

    Raises:
        InvalidRollout: what the record refuses, or neither the producer nor the caller names a policy version.
    """
    if not attempt.sequences:
        raise attempt.at.wrong("no token of it is there")
    columns = [_fields(attempt, stretch, policy_version) for stretch in attempt.sequences]
    try:
        return Rollout.from_sequences(
            [TokenSequence(**one) for one in columns],
            reward=attempt.reward,
            rewards=attempt.rewards,
            finish_reason=attempt.finish_reason,
            is_truncated=attempt.is_truncated or attempt.finish_reason == "length",
            failure=attempt.failure and attempt.failure._replace(kind=kind_of(attempt.failure.kind)),
            metadata=attempt.metadata,
        )
    except InvalidRollout as error:
        raise attempt.at.wrong(str(error)) from None


def as_far_as_read(failure: Failure | None, read: Callable[[], Sequence[Stretch]]) -> tuple[Stretch, ...]:
    """The sequences that `read` gives; of an attempt that failed none where they are damaged or not there."""
    try:
        return tuple(read())
    except RlbufferError:
        if failure is None:
            raise
        return ()


def _fields(attempt: TraceAttempt, stretch: Stretch, version: int | None) -> dict[str, Any]:
    """Those of the sequence, as sampled by `version` where the producer names none."""
    spans = stretch.version_spans
    if not spans:
        if version is None:
            raise attempt.at.wrong("the policy version that sampled it is not there: give policy_version")
        spans = spans_of(stretch.loss_mask, version)
    values = {field.name: getattr(stretch, field.name) for field in fields(stretch)}
    return values | {"version_spans": spans}


def spans_of(mask: NDArray[np.bool_], version: int) -> tuple[VersionSpan, ...]:
    """One span over the trained tokens; over all where none is trained."""
    trained = np.flatnonzero(mask)
    if not len(trained):
        return (VersionSpan(version, 0, len(mask)),)
    return (VersionSpan(version, int(trained[0]), int(trained[-1]) + 1),)
