"""Cutting a rollout that is longer than a row: `oversized = "truncate"`.

The writer cuts before it pushes, so that the batcher, the ledger and every reader see the same, shorter rollout. The
reward stays what the whole rollout got; `is_truncated` says that there was more. `text` and attachments are left alone:
they are not per token.
"""

from __future__ import annotations

from dataclasses import replace

from rlbuffer.records.group import Group
from rlbuffer.records.rollout import Rollout
from rlbuffer.records.spans import Turn, VersionSpan


def truncated(rollout: Rollout, length: int) -> Rollout:
    """The first `length` tokens of `rollout`, flagged as truncated; itself when it is no longer than that.

    Example:
        >>> whole = Rollout.from_completion(
        ...     prompt_ids=[1, 2], token_ids=[3, 4, 5], logprobs=[-1, -1, -1], reward=1.0, policy_version=7
        ... )
        >>> cut = truncated(whole, 4)
        >>> cut.tokens.tolist(), cut.loss_tokens, cut.is_truncated, truncated(cut, 4) is cut
        ([1, 2, 3, 4], 2, True, True)
    """
    if rollout.length <= length:
        return rollout
    spans = tuple(VersionSpan(v, start, min(end, length)) for v, start, end in rollout.version_spans if start < length)
    turns = tuple(
        Turn(turn.role, turn.start, min(turn.end, length), turn.reward, turn.metadata)
        for turn in rollout.turns
        if turn.start < length
    )
    return replace(
        rollout,
        tokens=rollout.tokens[:length],
        loss_mask=rollout.loss_mask[:length],
        logprobs=rollout.logprobs[:length],
        columns={name: values[:length] for name, values in rollout.columns.items()},
        # Where only context is left nothing was sampled; its version still is the one that it would have aged by.
        version_spans=spans or (VersionSpan(rollout.min_policy_version, 0, length),),
        turns=turns,
        is_truncated=True,
    )


def truncated_group(group: Group, length: int) -> Group:
    """The group with every rollout cut to `length` tokens; itself when none is longer."""
    if all(rollout.length <= length for rollout in group.rollouts):
        return group
    return replace(group, rollouts=tuple(truncated(rollout, length) for rollout in group.rollouts))
