"""Groups of a run as they were pushed, with everything: what ``rlbuffer export`` writes and ``rlbuffer push`` reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlbuffer.client.buffer import Buffer
from rlbuffer.client.details import stand_ins
from rlbuffer.client.group_view import GroupView
from rlbuffer.client.groups import pending_groups
from rlbuffer.client.kept_pushes import dropped_pushes, group_of
from rlbuffer.errors import NotFound, PayloadError, StepRetired
from rlbuffer.records.group import Group
from rlbuffer.records.states import State
from rlbuffer.store.records import PartRollout, PoolEntry, by_rollout
from rlbuffer.store.viewer import Viewer


def export_groups(buffer: Buffer, where: str, gone: list[str]) -> Iterator[Group]:
    """The groups that match `where`, a group per push; each pending, in a live step, or dropped and not swept yet.

    Args:
        gone: takes the ids of the groups of which a rollout is not there any more, or damaged.

    Raises:
        FilterError: `where` cannot be read.
    """
    store, views = buffer.store, buffer.groups(where, limit=2**31)
    by_state: dict[State, dict[str, GroupView]] = {}
    by_step: dict[int, set[str]] = {}
    for view in views:
        if view.step is not None:
            by_step.setdefault(view.step, set()).add(view.group_id)
        else:
            by_state.setdefault(view.state, {})[view.group_id] = view
    pending = by_state.get(State.FORMING, {}).keys() | by_state.get(State.READY, {}).keys()
    for view, entries in pending_groups(store) if pending else ():
        if view.group_id in pending:
            yield from _of_entries(store, entries, gone)
    for step, group_ids in sorted(by_step.items()):
        yield from _of_step(store, step, group_ids, gone)
    yield from _of_drops(store, by_state.get(State.DROPPED, {}), gone)


def _of_entries(store: Viewer, entries: Sequence[PoolEntry], gone: list[str]) -> Iterator[Group]:
    for entry in entries:
        info = entry.info
        if info is None:
            gone.append(entry.group_id)
            continue
        names = ("prompt_id", "planned_size", "adapter", "needs", "worker", "created")
        yield from _whole(store, stand_ins([entry]), {name: getattr(info, name) for name in names}, gone)


def _of_step(store: Viewer, step: int, group_ids: set[str], gone: list[str]) -> Iterator[Group]:
    try:
        parts = store.read_parts(step)
        header = store.wait_step(step, block_seconds=0.0)
    except (StepRetired, NotFound, PayloadError):
        gone.extend(sorted(group_ids))
        return
    pushes: dict[str, list[PartRollout]] = {}
    for ref in (ref for part in parts for ref in part.rollouts):
        if ref.group_id in group_ids:
            pushes.setdefault(ref.payload_key, []).append(ref)
    for ref, _ in store.left_out(header, [refs[0] for refs in pushes.values()]):
        pushes.setdefault(ref.payload_key, []).append(ref)
    for refs in pushes.values():
        refs.sort(key=lambda ref: ref.index)
        first = refs[0]
        further = {"worker": first.worker, "prompt_id": first.prompt_id, "adapter": first.adapter}
        yield from _whole(
            store, refs, {**further, "planned_size": max(first.planned_size, len(by_rollout(refs)))}, gone
        )


def _whole(store: Viewer, refs: Sequence[PartRollout], further: Mapping[str, Any], gone: list[str]) -> Iterator[Group]:
    payloads = store.read_payloads(refs)
    (group_payload,) = store.read_group_payloads([refs[0].payload_key])
    yield from group_of(refs[0].group_id, refs[0].env, payloads, group_payload, further, gone)


def _of_drops(store: Viewer, views: Mapping[str, GroupView], gone: list[str]) -> Iterator[Group]:
    """Their pushes have left the pool, and what it knew of them; the payloads are there until the next sweep."""
    keys = store.dropped_payloads(list(views))
    for group_id, view in views.items():
        pushes = list(dropped_pushes(store, view, keys.get(group_id, ()), gone))
        if not pushes:
            gone.append(group_id)
        yield from pushes
