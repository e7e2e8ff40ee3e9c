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
from typing import Any

from rlbuffer.records.group import Group
from rlbuffer.records.rollout import Rollout, TokenSequence


def truncated(rollout: Rollout, length: int) -> Rollout:
    """The tokens of each sequence of `rollout` up to the last trained one of the first `length`, flagged as truncated.

    Itself when none is longer than that, or can be cut.

    Example:
        >>> whole = Rollout.from_completion(
        ...     prompt_ids=[1, 2], token_ids=[3, 4, 5], logprobs=[-1, -1, -1], reward=1.0, policy_version=7
        ... )
        >>> cut = truncated(whole, 4)
        >>> cut.tokens.tolist(), cut.loss_tokens, cut.is_truncated, truncated(cut, 4) is cut
        ([1, 2, 3, 4], 2, True, True)
    """
    cuts = [_cut(sequence, length) for sequence in rollout.sequences]
    if not any(cuts):
        return rollout
    further = tuple(replace(s, **cut) if cut else s for s, cut in zip(rollout.further, cuts[1:], strict=True))
    return replace(rollout, **cuts[0], further=further, is_truncated=True)


def _cut(sequence: TokenSequence, length: int) -> dict[str, Any]:
    """The fields of a sequence that is cut; none where it is short enough, or cannot be cut."""
    trained = sequence.loss_mask[:length].nonzero()[0]
    if len(sequence.tokens) <= length or not len(trained):
        return {}
    length = int(trained[-1]) + 1
    if sequence.attachments and not sequence.loss_mask[length:].all():
        return {}
    return {
        "tokens": sequence.tokens[:length],
        "loss_mask": sequence.loss_mask[:length],
        "logprobs": sequence.logprobs[:length],
        "columns": {name: values[:length] for name, values in sequence.columns.items()},
        "version_spans": tuple(s._replace(end=min(s.end, length)) for s in sequence.version_spans if s.start < length),
        "turns": tuple(t._replace(end=min(t.end, length)) for t in sequence.turns if t.start < length),
    }


def truncated_group(group: Group, length: int) -> Group:
    """The group with every sequence cut to at most `length` tokens; itself when none is longer."""
    if all(len(sequence.tokens) <= length for sequence in group.sequences()):
        return group
    return replace(group, rollouts=tuple(truncated(rollout, length) for rollout in group.rollouts))
