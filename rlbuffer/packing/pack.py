"""Packing: rollouts -> rows -> micro-batches -> ranks. Pure: no server, no clock, no randomness.

`plan` decides which rollout goes where (:mod:`rlbuffer.packing.planner`), `assemble` makes a rank's arrays from it
(:mod:`rlbuffer.packing.assembly`), `pack` does the simplest case, some rollouts in one row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from rlbuffer.errors import PackingError
from rlbuffer.packing.assembly import PackItem, assemble
from rlbuffer.records.columns import trained_advantage
from rlbuffer.records.group import infos_of
from rlbuffer.records.info import RolloutInfo
from rlbuffer.records.micro_batch import MicroBatch, Sample
from rlbuffer.records.rollout import Rollout
from rlbuffer.records.step_plan import Normalizers


def pack(
    rollouts: Sequence[Rollout],
    advantages: ArrayLike | None = None,
    *,
    row_tokens: int,
    pad_token_id: int = 0,
    pad_to_multiple_of: int = 1,
    ignore_index: int = -100,
    normalizers: Normalizers | None = None,
) -> MicroBatch:
    """Packs rollouts into one row, in the order given, each sequence a segment: a micro-batch outside of any run.

    For tests, notebooks and trainers that fetch rollouts themselves; a run's readers assemble committed steps with the
    same code. No rollouts give a dummy.

    Shapes: ``advantages`` [n], one per rollout, broadcast to its trained tokens; None is 0. A column ``advantages``
    wins. Without `normalizers` the counts of these rollouts are used; rollouts whose ids share what stands before the
    last ``/`` are one group.

    Raises:
        PackingError: the rollouts exceed `row_tokens`, or `advantages` does not fit them.

    Example:
        >>> import rlbuffer
        >>> rollout = rlbuffer.Rollout.from_completion(
        ...     prompt_ids=[5, 6], token_ids=[7, 8], logprobs=[-0.1, -0.2], reward=1.0, policy_version=0
        ... )
        >>> packed = pack([rollout, rollout], [0.5, -0.5], row_tokens=16)
        >>> packed.targets.tolist()
        [6, 7, 8, -100, 6, 7, 8, -100]
        >>> packed.advantages.tolist()
        [0.0, 0.0, 0.5, 0.5, 0.0, 0.0, -0.5, -0.5]
    """
    values = np.zeros(len(rollouts)) if advantages is None else np.asarray(advantages, dtype=np.float64)
    if values.shape != (len(rollouts),):
        raise PackingError(f"pack: advantages have shape {list(values.shape)}, not one per rollout: [{len(rollouts)}]")
    if not np.isfinite(values).all():
        worst = int(np.argmin(np.isfinite(values)))
        raise PackingError(f"pack: the advantage of rollout {worst} is {values[worst]}")
    infos = infos_of(rollouts)
    items = [
        PackItem(rollout=sequence, sample=_sample(rollout, place, number, advantage, info))
        for place, (rollout, advantage) in enumerate(zip(rollouts, values.tolist(), strict=True))
        for number, (sequence, info) in enumerate(zip(rollout.sequences, infos[place].sequences, strict=True))
    ]
    if normalizers is None:
        normalizers = Normalizers(
            loss_tokens=sum(rollout.loss_tokens for rollout in rollouts),
            rollouts=len(rollouts),
            groups=len({item.sample.group_id for item in items}),
        )
    (micro_batch,) = assemble(
        [[tuple(range(len(items)))]],
        items,
        row_tokens=row_tokens,
        normalizers=normalizers,
        pad_token_id=pad_token_id,
        pad_to_multiple_of=pad_to_multiple_of,
        ignore_index=ignore_index,
    )
    return micro_batch


def _sample(rollout: Rollout, place: int, number: int, advantage: float, info: RolloutInfo) -> Sample:
    sequence = rollout.sequences[number]
    return Sample(
        rollout_id=rollout.rollout_id,
        group_id=rollout.rollout_id.rpartition("/")[0],
        env="",
        reward=rollout.reward,
        rewards=rollout.rewards,
        advantage=trained_advantage(advantage, sequence.columns, sequence.loss_mask),
        policy_versions=(rollout.min_policy_version, rollout.max_policy_version),
        answer=None,
        prompt_tokens=sequence.prompt_tokens,
        length=len(sequence.tokens),
        is_truncated=rollout.is_truncated,
        attachments=sequence.attachments,
        sequence=number,
        sequences=1 + len(rollout.further),
        rollout=place,
        rollout_loss_tokens=rollout.loss_tokens,
        info=info,
        successes=rollout.successes,
    )
