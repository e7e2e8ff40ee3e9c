"""One rank's part of a committed step: its rows and payloads, read from the server and assembled.

At another world size than the one that the step was planned for, its rows are dealt again; rollouts, advantages and
normalisers stay the same.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rlbuffer.errors import PayloadError
from rlbuffer.packing.arena import Arena
from rlbuffer.packing.assembly import PackItem, assemble
from rlbuffer.packing.further_columns import ColumnSpec, column_spec
from rlbuffer.packing.planner import redeal
from rlbuffer.records.micro_batch import Sample, Step
from rlbuffer.records.step_header import StepHeader
from rlbuffer.records.step_plan import Normalizers, Plan
from rlbuffer.store.payloads import Trainable, read_rollouts
from rlbuffer.store.protocol import Store
from rlbuffer.store.records import PartRollout
from rlbuffer.wire import payload


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
        self._assembling = threading.Lock()  # an arena serves one caller at a time; `pull` may run beside a prefetch

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
        items, damaged = self._items(part.rollouts, schema, header)
        normalizers = Normalizers(**header.normalizers)
        with self._assembling:
            micro_batches = assemble(
                part.rows,
                items,
                row_tokens=part.row_tokens,
                normalizers=normalizers,
                pad_token_id=self._pad_token_id,
                pad_to_multiple_of=self._pad_to_multiple_of,
                arena=self._arena,
                schema=schema,
            )
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

    def _items(
        self, refs: Sequence[PartRollout], schema: Mapping[str, ColumnSpec], header: StepHeader
    ) -> tuple[list[PackItem], list[tuple[PartRollout, str]]]:
        """Every rollout, and those that are missing, damaged or not to be trained here, with what is wrong: they
        become masked padding."""
        answers = self._answers(refs)
        items: list[PackItem] = []
        damaged: list[tuple[PartRollout, str]] = []
        for ref, outcome in read_rollouts(self._store, refs, schema, self._can):
            info = ref.info
            rollout = None if isinstance(outcome, str) else outcome
            if isinstance(outcome, str):
                damaged.append((ref, outcome))
            elif header.masks(info):
                rollout = replace(outcome, loss_mask=np.zeros_like(outcome.loss_mask))
            sample = Sample(
                rollout_id=info.rollout_id,
                group_id=ref.group_id,
                env=ref.env,
                reward=info.reward,
                rewards=info.rewards,
                advantage=ref.advantage,
                policy_versions=(info.min_version, info.max_version),
                answer=answers.get(ref.payload_key),
                prompt_tokens=info.prompt_tokens,
                length=info.length,
                adapter=ref.adapter,
                is_truncated=info.is_truncated,
                attachments={} if rollout is None else rollout.attachments,
            )
            items.append(PackItem(rollout=rollout, length=info.length, sample=sample, adapter=ref.adapter))
        return items, damaged

    def _answers(self, refs: Sequence[PartRollout]) -> dict[str, Any]:
        keys = list(dict.fromkeys(ref.payload_key for ref in refs))
        answers = {}
        for key, data in zip(keys, self._store.read_group_payloads(keys), strict=True):
            if data is not None:
                try:
                    answers[key] = payload.decode_group_payload(data)[0]
                except PayloadError:
                    # Nothing trains on an answer: a damaged one is shown as missing, as the group's view does.
                    answers[key] = None
        return answers
