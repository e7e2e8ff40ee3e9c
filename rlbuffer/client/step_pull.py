"""One rank's part of a committed step: its rows and payloads, read from the server and assembled.

At another world size than the one that the step was planned for, its rows are dealt again; rollouts, advantages and
normalisers stay the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rlbuffer.errors import PayloadError
from rlbuffer.packing.arena import Arena
from rlbuffer.packing.assembly import PackItem, assemble
from rlbuffer.packing.further_columns import ColumnSpec, column_spec
from rlbuffer.packing.planner import redeal
from rlbuffer.records.info import unfrozen
from rlbuffer.records.micro_batch import MicroBatch, Sample, Step
from rlbuffer.records.rollout import Rollout, RolloutArrays
from rlbuffer.records.step_header import StepHeader
from rlbuffer.records.step_plan import Normalizers, Plan
from rlbuffer.store.payloads import Trainable, decoded, read_views
from rlbuffer.store.protocol import Store
from rlbuffer.store.records import PartRollout
from rlbuffer.wire import payload
from rlbuffer.wire.views import in_range

_UnfrozenSample = unfrozen(Sample)


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's part of a step, before its payloads are read."""

    rows: Sequence[Any]
    """Per micro-step: tuple of rows, each a tuple of indices into `rollouts`; () is a dummy."""
    rollouts: Sequence[PartRollout]
    row_tokens: int


class StepPull:
    """Reads the steps of one rank; several threads may."""

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        can: Trainable,
        *,
        pad_token_id: int,
        pad_to_multiple_of: int,
    ) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._can = can
        self._pad_token_id = pad_token_id
        self._pad_to_multiple_of = pad_to_multiple_of
        self._arena = Arena()

    def part(self, header: StepHeader) -> Part:
        """This rank's rows of a step: its own part, or at another world size all parts, dealt again.

        Raises:
            NotFound: the server has no such part (any more).
        """
        same = header.world_size == self._world_size
        parts = self._store.read_parts(header.step, [self._rank] if same else None)
        rollouts: list[PartRollout] = []
        per_rank = []
        for part in parts:
            base = len(rollouts)
            rollouts.extend(part.rollouts)
            per_rank.append([tuple(tuple(base + i for i in row) for row in rows) for rows in part.rows])
        plan = Plan(
            rows=tuple(zip(*per_rank, strict=True)),
            world_size=len(parts),
            row_tokens=parts[0].row_tokens,
            rows_per_micro_batch=parts[0].rows_per_micro_batch,
        )
        if same:
            return Part([step[0] for step in plan.rows], rollouts, plan.row_tokens)
        plan = redeal(plan, self._world_size)
        rows = [step[self._rank] for step in plan.rows]
        used = sorted({i for step in rows for row in step for i in row})
        place = {index: k for k, index in enumerate(used)}
        dealt = [tuple(tuple(place[i] for i in row) for row in step) for step in rows]
        return Part(dealt, [rollouts[i] for i in used], plan.row_tokens)

    def step(self, header: StepHeader, part: Part) -> tuple[Step, list[tuple[PartRollout, str]]]:
        """The step, and the rollouts in it that are masked padding because they cannot be trained, each with the
        reason."""
        schema = {
            name: column_spec(name) or ColumnSpec(fill=0, dtype=np.dtype(dtype), shape=shape)
            for name, (dtype, shape) in header.columns.items()
        }
        refs = part.rollouts
        outcomes: list[RolloutArrays | Rollout | str] = []
        answers: dict[str, Any] = {}
        for ref, (outcome, group) in zip(refs, read_views(self._store, refs, schema, self._can), strict=True):
            outcomes.append(outcome)
            if ref.payload_key not in answers:
                answers[ref.payload_key] = _answer(group)
        items = [_item(*pair, header, answers) for pair in zip(refs, outcomes, strict=True)]
        normalizers = Normalizers(**header.normalizers)

        def assembled() -> tuple[MicroBatch, ...]:
            return assemble(
                part.rows,
                items,
                row_tokens=part.row_tokens,
                normalizers=normalizers,
                pad_token_id=self._pad_token_id,
                pad_to_multiple_of=self._pad_to_multiple_of,
                arena=self._arena,
                schema=schema,
            )

        micro_batches = assembled()
        if doubtful := self._out_of_range(part, outcomes, micro_batches):
            del micro_batches  # the arena's memory
            for i, data in doubtful.items():
                outcomes[i] = decoded(refs[i], data, schema, self._can)
                items[i] = _item(refs[i], outcomes[i], header, answers)
            micro_batches = assembled()
        damaged = [(ref, wrong) for ref, wrong in zip(refs, outcomes, strict=True) if isinstance(wrong, str)]
        step = Step(
            number=header.step,
            epoch=header.epoch,
            digest=header.digest,
            world_size=self._world_size,
            micro_batches=micro_batches,
            normalizers=normalizers,
            rollouts=header.rollouts,
            groups=len(header.group_ids),
            damaged=tuple(ref.info.rollout_id for ref, _ in damaged),
            header=header,
            adapters=header.adapters,
        )
        return step, damaged

    def _out_of_range(
        self, part: Part, outcomes: Sequence[RolloutArrays | Rollout | str], micro_batches: Sequence[MicroBatch]
    ) -> dict[int, bytes]:
        """Index -> payload of the rollouts that have a token or logprob that cannot be trained.

        Each by its own values, whatever it shares a micro-batch with: rows that are dealt again give the same."""
        size = self._can.vocabulary
        payloads = {}
        for rows, micro_batch in zip(part.rows, micro_batches, strict=True):
            if in_range(micro_batch.input_ids, micro_batch.loss_mask, micro_batch.logprobs, size):
                continue
            for i in (i for row in rows for i in row):
                views = outcomes[i]
                if isinstance(views, RolloutArrays) and not in_range(*views[:3], size):
                    payloads[i] = bytes(views.payload)
        return payloads


def _answer(group: bytes | None) -> Any:
    """Nothing trains on an answer: a damaged one is shown as missing, as the group's view does."""
    try:
        return None if group is None else payload.decode_group_payload(group)[0]
    except PayloadError:
        return None


def _item(
    ref: PartRollout, outcome: RolloutArrays | Rollout | str, header: StepHeader, answers: Mapping[str, Any]
) -> PackItem:
    """One that is missing, damaged or not to be trained here becomes masked padding."""
    info = ref.info
    rollout = None if isinstance(outcome, str) else outcome
    if rollout is not None and header.masks(info):
        untrained = np.zeros_like(rollout.loss_mask)
        if isinstance(rollout, RolloutArrays):
            rollout = rollout._replace(loss_mask=untrained)
        else:
            rollout = replace(rollout, loss_mask=untrained)
    sample = _UnfrozenSample()
    sample.rollout_id = info.rollout_id
    sample.group_id = ref.group_id
    sample.env = ref.env
    sample.reward = info.reward
    sample.rewards = info.rewards
    sample.advantage = ref.advantage
    sample.policy_versions = info.min_version, info.max_version
    sample.answer = answers[ref.payload_key]
    sample.prompt_tokens = info.prompt_tokens
    sample.length = info.length
    sample.adapter = ref.adapter
    sample.is_truncated = info.is_truncated
    sample.attachments = {} if rollout is None else rollout.attachments
    sample.__class__ = Sample
    return PackItem(rollout=rollout, length=info.length, sample=sample, adapter=ref.adapter)
