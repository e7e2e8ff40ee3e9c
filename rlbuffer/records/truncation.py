"""Cutting a rollout that is longer than a row: `oversized = "truncate"`.

The writer cuts before it pushes, so that the batcher, the ledger and every reader see the same, shorter rollout. The
reward stays what the whole rollout got; `is_truncated` says that there was more.

A cut ends behind the last trained token that fits: the context behind it would train nothing, and an image in it might
be cut in two. Some rollouts cannot be cut, and stay too long, so that the batcher drops them as `oversized`: those of
which no trained token fits, and those with attachments where context would be cut away, because nothing says which
attachment belongs to which tokens. `text` is for people and stays whole.
"""

from __future__ import annotations

from dataclasses import replace

from rlbuffer.records.group import Group
from rlbuffer.records.rollout import Rollout
from rlbuffer.records.spans import Turn, VersionSpan


def truncated(rollout: Rollout, length: int) -> Rollout:
    """The tokens of `rollout` up to the last trained one of the first `length`, flagged as truncated.

    Itself when it is no longer than that, or cannot be cut.

    Example:
        >>> whole = Rollout.from_completion(
        ...     prompt_ids=[1, 2], token_ids=[3, 4, 5], logprobs=[-1, -1, -1], reward=1.0, policy_version=7
        ... )
        >>> cut = truncated(whole, 4)
        >>> cut.tokens.tolist(), cut.loss_tokens, cut.is_truncated, truncated(cut, 4) is cut
        ([1, 2, 3, 4], 2, True, True)
    """
    trained = rollout.loss_mask[:length].nonzero()[0]
    if rollout.length <= length or not len(trained):
        return rollout
    length = int(trained[-1]) + 1
    if rollout.attachments and not rollout.loss_mask[length:].all():
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
        version_spans=spans,
        turns=turns,
        is_truncated=True,
    )


def truncated_group(group: Group, length: int) -> Group:
    """The group with every rollout cut to at most `length` tokens; itself when none is longer."""
    if all(rollout.length <= length for rollout in group.rollouts):
        return group
    return replace(group, rollouts=tuple(truncated(rollout, length) for rollout in group.rollouts))
