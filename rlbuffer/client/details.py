"""One group whole: its rollouts with their payloads, and where each stands in its step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, count, islice
from typing import Any

from rlbuffer.client.group_view import GroupView, with_rollouts
from rlbuffer.client.groups import GroupSource, every_group
from rlbuffer.client.kept_pushes import dropped_pushes
from rlbuffer.client.rollout_view import RolloutView, StepPlace, left_out_in_words, places_of, rollout_view, view_of
from rlbuffer.errors import AmbiguousId, NotFound, PayloadError, RlbufferError, StepRetired
from rlbuffer.records.group import Group, infos_of
from rlbuffer.records.info import GroupInfo
from rlbuffer.records.states import Reason, State
from rlbuffer.records.step_header import StepHeader
from rlbuffer.state.text import several_ids
from rlbuffer.store.part_rollouts import StepPart
from rlbuffer.store.records import PartRollout, PoolEntry, by_rollout
from rlbuffer.store.viewer import Viewer
from rlbuffer.wire import payload


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDetail:
    """One group whole."""

    view: GroupView
    members: tuple[RolloutView, ...]
    answer: Any
    metadata: Mapping[str, Any]

    def tree(self) -> tuple[RolloutView, ...]:
        """Its rollouts, each followed by its sequences where it has several."""
        return tuple(view for member in self.members for view in (member, *member.sequences()))


@dataclass(frozen=True, slots=True, kw_only=True)
class InStep:
    """What a step says of its groups."""

    step: int
    parts: Sequence[StepPart] = ()
    """None of one that was retired; so are the next two."""
    places: Mapping[tuple[str, int], StepPlace] = field(default_factory=dict)
    header: StepHeader | None = None
    unused: Sequence[str] = ()
    """Ids of rollouts that the trainer of a stream was given in it and has not trained."""


class Steps:
    """Reads steps for the details of groups. The last one is kept: a list has the groups of a step together."""

    def __init__(self, store: Viewer) -> None:
        self._store = store
        self._last = InStep(step=-1)

    def read(self, step: int) -> InStep:
        """Raises PayloadError where it cannot be read."""
        if step != self._last.step:
            self._last = self._read(step)
        return self._last

    def _read(self, step: int) -> InStep:
        left = self._store.unused().get(step)
        unused = left.rollout_ids if left is not None else ()
        try:
            parts = self._store.read_parts(step)
            header = self._store.wait_step(step, block_seconds=0.0)
        except (StepRetired, NotFound):
            return InStep(step=step, unused=unused)
        return InStep(step=step, parts=parts, places=places_of(parts), header=header, unused=unused)


def find_group(store: Viewer, group_id: str) -> GroupDetail:
    """Finds a group by its id, a rollout's id (``<group>/<index>``), or a unique prefix of the group's id.

    Raises:
        NotFound: it is not there. AmbiguousId: the prefix fits several.
    """
    id_or_prefix = group_id.rsplit("/", 1)[0]
    candidates: dict[str, tuple[GroupView, GroupSource]] = {}
    problems: list[RlbufferError] = []
    for view, sources in every_group(
        store, takes_push=lambda entry: entry.group_id.startswith(id_or_prefix), problems=problems
    ):
        if view.group_id == id_or_prefix:
            return detail_of(store, view, sources)
        if view.group_id.startswith(id_or_prefix):
            candidates.setdefault(view.group_id, (view, sources))
    if len(candidates) == 1:
        return detail_of(store, *next(iter(candidates.values())))
    if candidates:
        raise AmbiguousId(several_ids(id_or_prefix, candidates, f"run {store.run!r}"))
    if problems:
        raise problems[0]  # it may be in there
    raise NotFound(f"run {store.run!r} has no group {group_id!r}: it was retired with its step, or never pushed.")


def detail_of(
    store: Viewer,
    view: GroupView,
    sources: GroupSource,
    dropped: Mapping[str, Sequence[str]] | None = None,
    steps: Steps | None = None,
) -> GroupDetail:
    """A group whole: its view, and what :func:`every_group` gave with it; of a dropped one what was not swept yet.

    `dropped` has the payload keys of dropped groups; None: they are looked for. `steps` reads what holds its groups.
    """
    if view.state is State.DROPPED and view.step is None:
        keys = store.dropped_payloads([view.group_id]) if dropped is None else dropped
        return _dropped_detail(view, list(dropped_pushes(store, view, keys.get(view.group_id, ()), [])))
    in_step = InStep(step=-1) if view.step is None else (steps or Steps(store)).read(view.step)
    refs = stand_ins(sources) if sources or view.step is None else _named(in_step.parts, view.group_id, in_step.unused)
    rollouts = by_rollout(refs)
    payloads = iter(store.read_payloads([*chain.from_iterable(rollouts)]) if refs else [])
    members = tuple(
        rollout_view(
            sequences,
            view.step,
            in_step.places.get((sequences[0].payload_key, sequences[0].index)),
            [*islice(payloads, len(sequences))],
        )
        for sequences in rollouts
    )
    members = tuple(m.changed(left_out=Reason.UNUSED) if m.rollout_id in in_step.unused else m for m in members)
    if view.step is not None and view.state is not State.DROPPED:
        members += tuple(_left_out(store, in_step.header, refs))
        view = replace(view, detail=left_out_in_words(members))
    answer, metadata = _group_payload(store, refs)
    return GroupDetail(view=view, members=members, answer=answer, metadata=metadata)


def _named(parts: Sequence[StepPart], group_id: str, rollout_ids: Sequence[str]) -> list[PartRollout]:
    """These rollouts of a group as the parts name them."""
    members = (ref for part in parts for ref in part.rollouts if ref.group_id == group_id)
    return [ref for ref in members if ref.info.rollout_id in rollout_ids]


def _dropped_detail(view: GroupView, pushes: Sequence[Group]) -> GroupDetail:
    pairs = [pair for push in pushes for pair in zip(push.info().rollouts, push.rollouts, strict=True)]
    return GroupDetail(
        view=with_rollouts(view, [info for info, _ in pairs]),
        members=tuple(view_of(info, rollout) for info, rollout in pairs),
        answer=pushes[0].answer if pushes else None,
        metadata=pushes[0].metadata if pushes else {},
    )


def _left_out(store: Viewer, header: StepHeader | None, refs: Sequence[PartRollout]) -> Iterator[RolloutView]:
    """The rollouts that the step leaves out of this group, as far as their payloads can be read; one that came again
    is there once."""
    found = store.left_out(header, refs)
    payloads = store.read_payloads([ref for ref, _ in found]) if found else []
    reasons = dict[str, str]()
    for (_, reason), data in zip(found, payloads, strict=True):
        with suppress(PayloadError):
            reasons.setdefault(payload.decode(data or b"").details.rollout_id, reason)
    seen = {ref.info.rollout_id for ref in refs}
    for rollout in filter(None, payload.decode_rollouts(payloads)):
        if rollout.rollout_id not in seen:
            seen.add(rollout.rollout_id)
            yield view_of(infos_of([rollout])[0], rollout).changed(left_out=reasons[rollout.rollout_id])


def stand_ins(sources: Sequence[PoolEntry | PartRollout]) -> list[PartRollout]:
    """The sequences of a group's rollouts as a step names them, or would name them: what payloads are read by."""
    refs: list[PartRollout] = []
    for source in sources:
        if isinstance(source, PartRollout):
            refs.append(source)
        elif source.info is not None:
            refs += _pending(source, source.info)
    return refs


def _pending(entry: PoolEntry, info: GroupInfo) -> Iterator[PartRollout]:
    index = count()
    for rollout in info.rollouts:
        for number, part in enumerate(rollout.sequences):
            yield PartRollout(
                payload_key=entry.payload_key,
                index=next(index),
                info=part,
                group_id=entry.group_id,
                env=entry.env,
                adapter=info.adapter,
                advantage=0.0,
                sequence=number,
                sequences=len(rollout.sequences),
            )


def _group_payload(store: Viewer, refs: Sequence[PartRollout]) -> tuple[Any, Mapping[str, Any]]:
    keys = list(dict.fromkeys(ref.payload_key for ref in refs))
    for data in store.read_group_payloads(keys) if keys else []:
        if data is not None:
            try:
                return payload.decode_group_payload(data)
            except PayloadError:
                continue
    return None, {}
