"""From a trace of verifiers to a rollout: the tokens as the policy sampled them, everything else masked out.

A trace is a graph of messages; a path from its root to a leaf is one sequence, and each message on it holds the tokens
it adds. What paths share is trained in the first of them. The sampler's own tokens are compared with those of the
trace, one by one: a trace that was tokenised again on its way is refused, since its logprobs would belong to other
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rlbuffer.errors import TraceUnusable
from rlbuffer.records.rollout import Rollout
from rlbuffer.worker.envs.base import PolicyAccess
from rlbuffer.worker.envs.episode import Episode
from rlbuffer.worker.envs.prompt import Score
from rlbuffer.worker.samplers.base import Completion


def rollout_of(trace: Any, completions: Sequence[Completion], policy: PolicyAccess, *, text: str) -> Rollout:
    """The rollout of a finished trace.

    Rewards are those of the trace's functions by name, unweighted; `reward` is the trace's own weighted sum.

    Args:
        trace: a `verifiers.v1.Trace`.
        completions: what was sampled for it, in order; requests that the trace does not hold may be among them.
        policy: how they were sampled.
        text: for people.

    Raises:
        TraceUnusable: it failed, was not scored, or holds no sampled tokens, or other ones than were sampled.
    """
    if not trace.ok:
        errors = "; ".join(f"{error.type}: {error.message}" for error in trace.errors) or "no reason given"
        raise TraceUnusable(f"the trace failed ({trace.stop_condition or 'no stop condition'}): {errors}")
    unscored = [name for name, reward in trace.rewards.items() if reward is None]
    if unscored:
        raise TraceUnusable(f"the trace was not scored by {', '.join(unscored)}")
    branches = [branch for branch in trace.branches if branch.trainable and any(branch.sampled_mask)]
    if not branches:
        raise TraceUnusable("the policy sampled nothing")
    asked: dict[int, int] = {}
    first, *further = [_played(branch.nodes, completions, asked, policy) for branch in branches]
    score = Score(
        reward=float(trace.reward),
        rewards={name: float(reward.score) for name, reward in trace.rewards.items()},
        metadata={
            "trace": str(trace.id),
            "stop": str(trace.stop_condition or ""),
            "metrics": {name: float(value) for name, value in trace.metrics.items() if value is not None},
        },
    )
    rollout = first.rollout(score, text=text, further=further)
    return replace(rollout, is_truncated=bool(trace.is_truncated) or rollout.is_truncated)


def _played(
    nodes: Sequence[Any], completions: Sequence[Completion], asked: dict[int, int], policy: PolicyAccess
) -> Episode:
    """The episode that the messages of one path tell, a turn each. `asked` has the place of each message's completion,
    once it is known; they ascend along a path."""
    episode, last = Episode(np.zeros(0, np.int32), policy.ask, policy.sampling), -1
    for number, node in enumerate(nodes):
        ids, mask = np.asarray(node.token_ids, np.int32), np.asarray(node.mask, np.bool_)
        role = str(node.message.role)
        if not mask.any():
            episode.extend(ids, role=role)
            continue
        first = int(np.argmax(mask))
        end = first + int(mask.sum())
        if not mask[first:end].all():
            raise TraceUnusable(f"message {number} of the trace has sampled tokens in several places")
        place = asked.get(id(node))
        if place is None:
            free = (i for i in range(last + 1, len(completions)) if i not in asked.values())
            place = next((i for i in free if np.array_equal(completions[i].tokens, ids[first:end])), None)
        if place is None:
            raise TraceUnusable(f"message {number} of the trace holds other tokens than were sampled")
        asked[id(node)] = last = place
        episode.message(ids[:first], completions[place], ids[end:], role=role)
    return episode
