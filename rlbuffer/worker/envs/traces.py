"""From a trace of verifiers to a rollout: the tokens as the policy sampled them, everything else masked out.

:mod:`rlbuffer.traces.verifiers` reads the trace. Each sampled message is one of the sampler's own completions, token
by token and logprob by logprob, which knows the exact version of each token; a trace that was tokenised again on its
way is refused, since its logprobs would belong to other tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlbuffer.errors import TraceUnusable
from rlbuffer.records.rollout import Rollout
from rlbuffer.records.spans import VersionSpan
from rlbuffer.traces import attempt as traces
from rlbuffer.traces.values import Value
from rlbuffer.traces.verifiers import attempt
from rlbuffer.traces.verifiers_messages import Sampled
from rlbuffer.worker.samplers.base import Completion


def rollout_of(trace: Any, completions: Sequence[Completion], *, text: str) -> Rollout:
    """The rollout of a finished trace.

    Rewards are those of the trace's functions by name, unweighted; `reward` is the trace's own weighted sum.

    Args:
        trace: a `verifiers.v1.Trace`.
        completions: what was sampled for it; requests that the trace does not hold may be among them.
        text: for people.

    Raises:
        TraceUnusable: it failed, was not scored, holds no sampled tokens, or other ones than were sampled.
    """
    record = Value(trace.model_dump(mode="python"))
    by_number = dict[int, Completion]()
    left = list(completions)

    def told(number: int, tokens: NDArray[np.int32], mask: NDArray[np.bool_]) -> Sampled:
        first = int(np.argmax(mask))
        end = first + int(mask.sum())
        if not mask[first:end].all():
            raise TraceUnusable(f"message {number} of the trace has sampled tokens in several places")
        logprobs = record["nodes"].listed()[number]["logprobs"].floats()
        by_number[number] = _taken(left, tokens[first:end], logprobs, number)
        completion = by_number[number]
        spans = [VersionSpan(v, first + start, first + stop) for v, start, stop in completion.version_spans]
        return Sampled(spans, completion.support)

    def experts(number: int) -> NDArray[Any] | None:
        return by_number[number].routed_experts if number in by_number else None

    found = attempt(record, told=told, records=experts)
    if found.failure:
        stop, (kind, message) = found.metadata["stop"] or "no stop condition", found.failure
        raise TraceUnusable(f"the trace failed ({stop}): {kind}: {message}")
    reason = by_number[max(by_number)].finish_reason
    sequences = tuple(
        replace(sequence, turns=sequence.turns if len(sequence.turns) > 2 else ()) for sequence in found.sequences
    )
    found = replace(found, sequences=sequences, finish_reason=reason)
    return replace(traces.rollout_of(found, policy_version=None), text=text)


def _taken(left: list[Completion], tokens: NDArray[np.int32], logprobs: NDArray[np.float32], number: int) -> Completion:
    """The completion that a message is, taken out of those that are left."""
    for place, one in enumerate(left):
        if np.array_equal(one.tokens, tokens) and np.array_equal(one.logprobs, logprobs):
            return left.pop(place)
    raise TraceUnusable(f"message {number} of the trace holds other tokens than were sampled")
