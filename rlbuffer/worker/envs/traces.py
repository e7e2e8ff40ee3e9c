"""From a trace of verifiers to a rollout: the tokens as the policy sampled them, everything else masked out.

A trace is a graph of messages; a path from its root to a leaf is one training sample, and each message on it holds the
tokens it adds. The sampler's own tokens are compared with those of the trace, one by one: a trace that was
tokenised again on its way is refused, since its logprobs would belong to other tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rlbuffer.errors import TraceUnusable
from rlbuffer.records.rollout import Rollout
from rlbuffer.records.spans import Turn
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
        TraceUnusable: it failed, was not scored, holds not one but several training samples (or none), or other tokens
            than were sampled.
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
    if len(branches) > 1:
        raise TraceUnusable(
            f"the trace holds {len(branches)} training samples: its messages were tokenised anew between turns. "
            "A renderer of the model's own family keeps them in one (env_options.renderer)"
        )
    episode, turns = _played(branches[0].nodes, completions, policy)
    score = Score(
        reward=float(trace.reward),
        rewards={name: float(reward.score) for name, reward in trace.rewards.items()},
        metadata={
            "trace": str(trace.id),
            "stop": str(trace.stop_condition or ""),
            "metrics": {name: float(value) for name, value in trace.metrics.items() if value is not None},
        },
    )
    rollout = episode.rollout(score, text=text)
    return replace(
        rollout,
        turns=turns if len(turns) > 2 else (),
        is_truncated=bool(trace.is_truncated) or rollout.is_truncated,
    )


def _played(
    nodes: Sequence[Any], completions: Sequence[Completion], policy: PolicyAccess
) -> tuple[Episode, tuple[Turn, ...]]:
    """The episode that the messages of one path tell, and a turn per message."""
    episode = Episode(np.zeros(0, np.int32), policy.ask, policy.sampling)
    turns, position, left = [], 0, iter(completions)
    for number, node in enumerate(nodes):
        ids, mask = np.asarray(node.token_ids, np.int32), np.asarray(node.mask, np.bool_)
        role = str(node.message.role)
        if not mask.any():
            episode.extend(ids, role=role)
        else:
            first = int(np.argmax(mask))
            end = first + int(mask.sum())
            if not mask[first:end].all():
                raise TraceUnusable(f"message {number} of the trace has sampled tokens in several places")
            completion = next((c for c in left if np.array_equal(c.tokens, ids[first:end])), None)
            if completion is None:
                raise TraceUnusable(f"message {number} of the trace holds other tokens than were sampled")
            episode.extend(ids[:first], role=role)
            episode.add(completion, role=role)
            episode.extend(ids[end:], role=role)
        turns.append(Turn(role, position, position + len(ids)))
        position += len(ids)
    return episode, tuple(turns)
