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
from rlbuffer.packing.planner import dealt_to
from rlbuffer.records.info import unfrozen
from rlbuffer.records.micro_batch import MicroBatch, Sample, Step
from rlbuffer.records.rollout import Rollout, RolloutArrays
from rlbuffer.records.step_header import StepHeader
from rlbuffer.records.step_plan import Normalizers
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
        """This rank's rows of a step: its own part, or at another world size its rows of the parts that hold them.

        Raises:
            NotFound: the server has no such part (any more).
        """
        if header.world_size != self._world_size:
            return self._dealt_again(header)
        (own,) = self._store.read_parts(header.step, [self._rank])
        return Part(own.rows, own.rollouts, own.row_tokens)

    def _dealt_again(self, header: StepHeader) -> Part:
        """The rows that `redeal` gives to this rank. Of many ranks none reads what all of them hold.

        A planner splits rows before it leaves any empty, so a step of fewer rollouts than rows has dummies: whose
        they are stands in all the parts, which are small then. Any other step's rows are counted without them.
        """
        planned = header.world_size
        any_rank = self._rank % planned
        parts = {any_rank: self._store.read_parts(header.step, [any_rank])[0]}
        first = parts[any_rank]
        deep = first.rows_per_micro_batch
        has_dummies = header.rollouts < len(first.rows) * deep * planned
        if has_dummies:
            parts = {part.rank: part for part in self._store.read_parts(header.step)}
        order = [
            (step, layer, rank)
            for step in range(len(first.rows))
            for layer in range(deep)
            for rank in range(planned)
            if not has_dummies or parts[rank].rows[step][layer]
        ]
        dealt = dealt_to(self._rank, len(order), self._world_size, rows_per_micro_batch=deep)
        needed = sorted({order[k][2] for its in dealt for k in its if k is not None} - parts.keys())
        if needed:
            parts |= {part.rank: part for part in self._store.read_parts(header.step, needed)}
        rollouts: list[PartRollout] = []

        def row(step: int, layer: int, rank: int) -> tuple[int, ...]:
            base, part = len(rollouts), parts[rank]
            its = part.rows[step][layer]
            rollouts.extend(part.rollouts[i] for i in its)
            return tuple(range(base, base + len(its)))

        rows = [tuple(() if k is None else row(*order[k]) for k in micro_batch) for micro_batch in dealt]
        return Part(rows, rollouts, first.row_tokens)

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
