"""One rank's part of a committed step: its rows and payloads, read from the server and assembled.

At another world size than the one that the step was planned for, its rows are dealt again; rollouts, advantages and
normalisers stay the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlbuffer.errors import PayloadError
from rlbuffer.packing.assembly import Assembly, Layout
from rlbuffer.packing.further_columns import ColumnSpec, specs_of
from rlbuffer.packing.planner import redeal
from rlbuffer.process.garbage_collection import without_garbage_collection
from rlbuffer.records.checks import MAX_ITEMS
from rlbuffer.records.columns import trained_advantage
from rlbuffer.records.micro_batch import IGNORE_INDEX, Sample, Step
from rlbuffer.records.step_header import StepHeader
from rlbuffer.records.step_plan import Normalizers, Plan
from rlbuffer.records.waiting import Problem, Trouble
from rlbuffer.state.text import printable
from rlbuffer.store.part_rollouts import PartRollouts, StepPart
from rlbuffer.store.payloads import Trainable, opened, sound
from rlbuffer.store.records import PartRollout
from rlbuffer.store.viewer import GROUP_FIELD, Viewer, chunks
from rlbuffer.wire import payload
from rlbuffer.wire.bounded_msgpack import loads
from rlbuffer.wire.frame import MAX_DETAILS_BYTES
from rlbuffer.wire.payload import Payload, in_range

CHUNK_BYTES = 16 * 2**20
"""Payloads that are read at once: what one chunk took is used again for the next. A push whose rollouts lie in several
chunks is asked once for each, so smaller ones cost more."""
# glibc's malloc gives freed memory back to the system above 128 KiB, or above twice the largest block that was freed so
# far. Without this one each chunk would come in fresh pages, whose first touch costs more than reading the payloads.
np.empty(CHUNK_BYTES, np.uint8)
NAMED_SOURCES = 3
"""Envs and workers that are named of a step's damaged rollouts."""
NO_METADATA = (b"\x80", b"\xc0")
"""An empty table, and nothing, as payloads have them."""


class StepPull:
    """Reads the steps of one rank; several threads may."""

    def __init__(
        self,
        store: Viewer,
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

    @without_garbage_collection()
    def part(self, header: StepHeader) -> StepPart:
        """This rank's rows of a step: its own part, or at another world size its rows of the parts that hold them.

        Raises:
            NotFound: the server has no such part (any more).
        """
        if header.world_size != self._world_size:
            return self._dealt_again(header)
        (part,) = self._store.read_parts(header.step, [self._rank])
        return part

    def _dealt_again(self, header: StepHeader) -> StepPart:
        """The rows that `redeal` gives to this rank, of all parts: the step was planned for other ranks."""
        parts = self._store.read_parts(header.step)
        firsts = np.cumsum([0, *(len(part.rollouts) for part in parts)]).tolist()
        rows = [
            [tuple(tuple(first + i for i in row) for row in micro_batch) for micro_batch in part.rows]
            for first, part in zip(firsts, parts, strict=False)
        ]
        planned = Plan(
            rows=tuple(zip(*rows, strict=True)),
            world_size=header.world_size,
            row_tokens=parts[0].row_tokens,
            rows_per_micro_batch=parts[0].rows_per_micro_batch,
        )
        return replace(
            parts[0],
            rank=self._rank,
            rollouts=PartRollouts.joined(part.rollouts for part in parts),
            rows=tuple(step[self._rank] for step in redeal(planned, self._world_size).rows),
        )

    @without_garbage_collection()
    def step(self, header: StepHeader, part: StepPart) -> tuple[Step, list[tuple[PartRollout, str]]]:
        """The step, and the rollouts in it that are masked padding because they cannot be trained, each with the
        reason."""
        schema = specs_of(header.columns)
        rollouts, normalizers = part.rollouts, Normalizers(**header.normalizers)
        layout = Layout(
            schema=schema,
            row_tokens=part.row_tokens,
            pad_token_id=self._pad_token_id,
            pad_to_multiple_of=self._pad_to_multiple_of,
            ignore_index=IGNORE_INDEX,
            normalizers=normalizers,
            world_size=self._world_size,
        )
        truncated = rollouts.are_truncated if header.masks_truncated else ()
        masked = {i for i, is_truncated in enumerate(truncated) if is_truncated}
        made = Assembly(part.rows, rollouts.table["length"].tolist(), rollouts.of_push("adapter"), layout, masked)
        pulled = Pulled(rollouts, masked)
        for chunk in chunks([rollouts.infos[item].size if item >= 0 else 0 for item in made.items], CHUNK_BYTES):
            self._take(made, chunk, rollouts, schema, pulled)
        micro_batches = made.micro_batches(rollouts.table["advantage"].tolist(), pulled.samples_of)
        damaged = [(rollouts[i], wrong) for i, wrong in sorted(pulled.damaged.items())]
        step = Step(
            number=header.step,
            epoch=header.epoch,
            digest=header.digest,
            world_size=self._world_size,
            micro_batches=micro_batches,
            normalizers=normalizers,
            rollouts=header.rollouts,
            groups=len(header.group_ids),
            damaged=tuple(dict.fromkeys(ref.info.rollout_id for ref, _ in damaged)),
            header=header,
            adapters=header.adapters,
        )
        return step, damaged

    def _take(
        self, made: Assembly, segments: range, rollouts: PartRollouts, schema: Mapping[str, ColumnSpec], pulled: Pulled
    ) -> None:
        """Reads the payloads of some segments, verifies each, and writes those that can be trained.

        A rollout is judged by its own values, whatever it shares a slab with: rows that are dealt again give the same.
        The ranges of tokens, marks and logprobs are looked at over many rollouts at once, which costs less.
        """
        items = [item for item in made.items[segments.start : segments.stop] if item >= 0]
        keys, names, adapters = pulled.keys, pulled.names, pulled.adapters
        request: dict[str, dict[str, int]] = {}
        for i in items:
            request.setdefault(keys[i], {GROUP_FIELD: 0})[names[i]] = rollouts.infos[i].size
        values = self._store.read_fields(request)
        pulled.groups.update({key: values[key, GROUP_FIELD] for key in request})
        read: dict[int, Payload] = {}
        for i in items:
            rollout_payload = opened(values[keys[i], names[i]], rollouts.infos[i], adapters[i], schema, self._can)
            if isinstance(rollout_payload, str):
                pulled.damaged[i] = rollout_payload
            else:
                read[i] = rollout_payload
        for run in made.runs(segments):
            if not in_range(*made.write(run, read), self._can.vocabulary):
                for i in made.items[run.segments.start : run.segments.stop]:
                    if i in read and not self._is_in_range(read[i], i in pulled.masked):
                        pulled.damaged[i] = str(sound(read.pop(i), self._can))
                made.write(run, read)
        made.note(read)
        pulled.keep(read)

    def _is_in_range(self, rollout_payload: Payload, is_masked: bool) -> bool:
        """`is_masked`: whatever its marks are, nothing of it is trained."""
        marks = np.zeros_like(rollout_payload.loss_mask) if is_masked else rollout_payload.loss_mask
        return in_range(rollout_payload.tokens, marks, rollout_payload.logprobs, self._can.vocabulary)


class Pulled:
    """What a pull keeps of the payloads of a part, beside the arrays that are trained."""

    def __init__(self, rollouts: PartRollouts, masked: Set[int]) -> None:
        self.keys, self.names = rollouts.of_push("payload_key"), [*map(str, rollouts.table["index"].tolist())]
        """Payload key and field of each rollout."""
        self.masked = masked
        """Nothing of these is trained."""
        self.adapters = rollouts.of_push("adapter")
        self.damaged: dict[int, str] = {}
        """What is wrong with those that cannot be trained."""
        self.groups: dict[str, bytes | None] = {}
        """Payload key -> encoded group part of the push."""
        self.attachments: dict[int, Mapping[str, NDArray[Any]]] = {}
        self.successes: dict[int, Mapping[str, bool]] = {}
        self.metadata: dict[int, bytes] = {}
        """The users' own, as they stand in the payloads."""
        self._rollouts = rollouts
        self._planned = rollouts.table["advantage"].tolist()
        self.advantages: dict[int, float] = {}
        """Of those that bring their own and are trained."""

    def keep(self, read: Mapping[int, Payload]) -> None:
        """Copies what samples have of payloads."""
        for i, rollout_payload in read.items():
            if rollout_payload.details.successes:
                self.successes[i] = rollout_payload.details.successes
            if (metadata := bytes(rollout_payload.details.metadata)) not in NO_METADATA:
                self.metadata[i] = metadata
            if rollout_payload.attachments:
                self.attachments[i] = {name: _copied(array) for name, array in rollout_payload.attachments.items()}
            if "advantages" in rollout_payload.columns and i not in self.masked:
                self.advantages[i] = trained_advantage(
                    self._planned[i], rollout_payload.columns, rollout_payload.loss_mask
                )

    def samples_of(self, items: Sequence[int]) -> Callable[[], tuple[Sample, ...]]:
        """A function that makes the records of these rollouts, which people and losses read. It keeps no more of the
        pull than they need."""
        groups = {key: self.groups[key] for key in {self.keys[item] for item in items}}
        attachments = {item: self.attachments[item] for item in items if item in self.attachments}
        metadata = {item: self.metadata[item] for item in items if item in self.metadata}
        return partial(_samples, self._rollouts, items, groups, attachments, self.advantages, self.successes, metadata)


def _copied(array: NDArray[Any]) -> NDArray[Any]:
    copy = array.copy()
    copy.flags.writeable = False
    return copy


def _samples(
    rollouts: PartRollouts,
    items: Sequence[int],
    groups: Mapping[str, bytes | None],
    attachments: Mapping[int, Mapping[str, Any]],
    advantages: Mapping[int, float],
    successes: Mapping[int, Mapping[str, bool]],
    metadata: Mapping[int, bytes],
) -> tuple[Sample, ...]:
    answers = {key: _answer(group) for key, group in groups.items()}
    return tuple(
        Sample(
            rollout_id=ref.info.rollout_id,
            group_id=ref.group_id,
            env=ref.env,
            reward=rollouts.reward[item],
            rewards=rollouts.rewards[item],
            advantage=advantages.get(item, ref.advantage),
            policy_versions=(ref.info.min_version, ref.info.max_version),
            answer=answers[ref.payload_key],
            prompt_tokens=ref.info.prompt_tokens,
            length=ref.info.length,
            adapter=ref.adapter,
            is_truncated=ref.info.is_truncated,
            attachments=attachments.get(item, {}),
            sequence=ref.sequence,
            sequences=ref.sequences,
            rollout=ref.number,
            rollout_loss_tokens=ref.rollout_loss_tokens,
            info=ref.info,
            successes=successes.get(item, {}),
            metadata=_metadata(metadata[item]) if item in metadata else {},
        )
        for item, ref in ((item, rollouts[item]) for item in items)
    )


def _metadata(packed: bytes) -> Mapping[str, Any]:
    """As :func:`_answer`: one that cannot be read is shown as missing."""
    try:
        metadata = loads(packed, limit=MAX_DETAILS_BYTES, max_items=MAX_ITEMS)
    except PayloadError:
        return {}
    return metadata if isinstance(metadata, dict) else {}


def _answer(group: bytes | None) -> Any:
    """Nothing trains on an answer: a damaged one is shown as missing, as the group's view does."""
    try:
        return None if group is None else payload.decode_group_payload(group)[0]
    except PayloadError:
        return None


def left_out(step: int, damaged: Sequence[tuple[PartRollout, str]]) -> str:
    """The rollouts that :meth:`StepPull.step` could not train, for people."""
    first, wrong = damaged[0]
    return (
        f"{len(damaged)} of its rollouts of step {step}, whose payloads it cannot train. The first is "
        f"{first.info.rollout_id} of group {first.group_id}, env {first.env}: {wrong}"
    )


def damage_of(step: int, damaged: Sequence[tuple[PartRollout, str]]) -> Problem:
    """The same as what somebody must cure, with the envs and workers that they came from, those of most first."""
    source_of = {
        (ref.group_id, ref.info.rollout_id): f"env {ref.env} by {ref.worker or 'an unnamed worker'}"
        for ref, _ in damaged
    }
    sources = Counter(source_of.values())
    named = ", ".join(printable(f"{count} of {source}") for source, count in sources.most_common(NAMED_SOURCES))
    more = f" and {len(sources) - NAMED_SOURCES} other sources" if len(sources) > NAMED_SOURCES else ""
    return Problem(kind=Trouble.DAMAGED, step=step, count=len(source_of), detail=named + more)
