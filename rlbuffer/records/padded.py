"""Rollouts as rows of equal length, for trainers that want ``[B, L]`` in place of a packed row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from rlbuffer.records.micro_batch import MicroBatch, Sample
    from rlbuffer.records.step_plan import Normalizers


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Padded:
    """One rollout a row, padded on the right.

    As in a micro-batch everything belongs to the token itself: the logprob of token t comes from the logits at t - 1,
    and token 0 is never trained.

    Rows beyond the rollouts hold padding that nothing masks, of which nothing is trained: there is at least one row, so
    that every rank has a forward pass to make, and as many as were asked for, where ranks must have equally many.
    """

    input_ids: NDArray[np.int32]
    """[B, L] int32; padding is `pad_token_id`."""
    attention_mask: NDArray[np.bool_]
    """[B, L] bool; False where a rollout is padded."""
    loss_mask: NDArray[np.bool_]
    """[B, L] bool; True where a token is trained."""
    advantages: NDArray[np.float32]
    """[B, L] float32; 0 where not trained."""
    logprobs: NDArray[np.float32]
    """[B, L] float32; inference logprobs, 0 where not sampled."""
    policy_versions: NDArray[np.int64]
    """[B, L] int64; the policy version that sampled the token, -1 where none did."""
    columns: Mapping[str, NDArray[Any]]
    """Further columns, [B, L] or [B, L, ...]; 0 in padding."""
    samples: tuple[Sample, ...]
    """The rollouts, in the order of the rows."""
    normalizers: Normalizers
    """Of the whole update, over all ranks."""


def padded(
    micro_batches: Sequence[MicroBatch], *, rows: int = 1, pad_token_id: int = 0, pad_to_multiple_of: int = 1
) -> Padded:
    """The rollouts of these micro-batches, which are on the host, in their order; `rows` rows or more."""
    first = micro_batches[0]
    longest = max([s.length for m in micro_batches for s in m.samples], default=first.length)
    length = longest + -longest % pad_to_multiple_of
    count = max(rows, sum(len(m.samples) for m in micro_batches))

    def table(values: Sequence[Any], fill: float = 0) -> NDArray[Any]:
        out = np.full((count, length, *values[0].shape[1:]), fill, values[0].dtype)
        parts = [part for m, own in zip(micro_batches, values, strict=True) for part in m.unpack(own)]
        for row, part in zip(out, parts, strict=False):
            row[: len(part)] = part
        return out

    attention = table([np.ones(m.length, np.bool_) for m in micro_batches])
    attention[sum(len(m.samples) for m in micro_batches) :] = True  # a row that sees nothing would be NaN
    return Padded(
        input_ids=table([m.input_ids for m in micro_batches], pad_token_id),
        attention_mask=attention,
        loss_mask=table([m.loss_mask for m in micro_batches]),
        advantages=table([m.advantages for m in micro_batches]),
        logprobs=table([m.logprobs for m in micro_batches]),
        policy_versions=table([m.policy_versions for m in micro_batches], -1),
        columns={name: table([m.columns[name] for m in micro_batches]) for name in first.columns},
        samples=tuple(sample for m in micro_batches for sample in m.samples),
        normalizers=first.normalizers,
    )
