"""Every group of a run as it stands on the server: in the pool (forming, ready), in live steps (packed, trained), or in
the history (dropped). Reading changes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from rlbuffer.client.group_view import GroupView, consumed_view, dropped_view, pending_view
from rlbuffer.errors import NotFound, PayloadError, RlbufferError, StepRetired
from rlbuffer.records.states import Reason, State
from rlbuffer.records.step_header import StepHeader
from rlbuffer.store.history import VOID_FIELDS, Committed, Dropped, RunRewound, StepsVoided
from rlbuffer.store.records import PartRollout, PoolEntry, is_stream
from rlbuffer.store.viewer import Viewer

VIEW_PAGE = 250
"""Pool entries per read: about a millisecond of the server."""
GroupSource = Sequence[PoolEntry] | Sequence[PartRollout]
"""The pushes of a pending group, or the rollouts of one in a step; () of one of which neither is kept."""


def every_group(
    store: Viewer,
    *,
    takes: Callable[[State], bool] = lambda state: True,
    takes_step: Callable[[int], bool] = lambda step: True,
    takes_push: Callable[[PoolEntry], bool] = lambda entry: True,
    problems: list[RlbufferError] | None = None,
) -> Iterator[tuple[GroupView, GroupSource]]:
    """Every group in a state, of a first push, or a step, that is taken; others are not read.

    A group that is packed or dropped while this reads is named once, as it was when it was read first. Steps that
    cannot be read are left out and added to `problems`; None: PayloadError.
    """
    pending, began_ms = set[str](), math.inf
    if takes(State.FORMING) or takes(State.READY):
        began_ms = math.floor(1000 * store.now())
        for view, sources in pending_groups(store, takes_push=takes_push):
            pending.add(view.group_id)
            yield view, sources
    if takes(State.PACKED) or takes(State.TRAINED):
        for (view, members), header in _in_steps(store, takes_step, problems):
            # Of a group that may be used again one is pending while another use of it is trained.
            if view.group_id not in pending or header.committed_ms < began_ms:
                yield view, members
    if takes(State.DROPPED):
        # A part that came late or twice is dropped while its group is pending.
        history = [
            record
            for record in store.history()
            if record.get("group_id") not in pending or round(1000 * record.get("at", 0)) < began_ms
        ]
        yield from ((view, ()) for view in dropped_groups(history, is_stream=is_stream(store.meta())))


# -- pending -----------------------------------------------------------------------------------------------------------
def pool_pages(store: Viewer, cursor: str = "0-0") -> Iterator[list[PoolEntry]]:
    """The pool behind the id `cursor`, the oldest first, :data:`VIEW_PAGE` entries at a time."""
    while entries := store.read_pool(cursor, count=VIEW_PAGE):
        yield entries
        cursor = entries[-1].entry_id


def _by_group(store: Viewer) -> dict[str, list[PoolEntry]]:
    parts: dict[str, list[PoolEntry]] = {}
    for page in pool_pages(store):
        for entry in page:
            parts.setdefault(entry.group_id, []).append(entry)
    return parts


def pending_groups(
    store: Viewer,
    *,
    takes_push: Callable[[PoolEntry], bool] = lambda entry: True,
) -> Iterator[tuple[GroupView, Sequence[PoolEntry]]]:
    """The groups in the pool, newest first, each with the pushes that make it up; as :func:`every_group`."""
    parts = _by_group(store)
    if not parts:
        return
    now = store.now()
    versions = _versions(store)
    for group_id in reversed(list(parts)):
        pushes = parts[group_id]
        if takes_push(pushes[0]):
            yield pending_view(pushes, versions=versions, now=now), pushes


def _versions(store: Viewer) -> dict[str, int]:
    """Adapter -> its newest policy version; of all weights at least the last step."""
    versions = {adapter: policy.version for adapter, policy in store.trainer().policies.items()}
    meta = store.meta()
    versions[""] = max(versions.get("", 0), 0 if is_stream(meta) else meta.step)
    return versions


# -- packed and trained ------------------------------------------------------------------------------------------------
def _in_steps(
    store: Viewer, takes_step: Callable[[int], bool], problems: list[RlbufferError] | None
) -> Iterator[tuple[tuple[GroupView, Sequence[PartRollout]], StepHeader]]:
    trained, unused = store.trainer().trained, store.unused()
    headers = [header for header in store.headers(problems=problems) if takes_step(header.step)]
    for header in sorted(headers, key=lambda h: -h.step):
        groups: dict[str, list[PartRollout]] = {}
        try:
            for part in store.read_parts(header.step):
                for member in part.rollouts:
                    groups.setdefault(member.group_id, []).append(member)
        except StepRetired:
            continue  # the leader retired it between the two reads
        except (PayloadError, NotFound) as error:
            if problems is None:
                raise
            problems.append(error)
            continue
        left = unused[header.step].rollout_ids if header.step in unused else ()
        for group_id in header.group_ids:
            members = groups.get(group_id, [])
            if used := [member for member in members if member.info.rollout_id not in left]:
                yield (consumed_view(used, header, trained=trained), members), header


# -- dropped -----------------------------------------------------------------------------------------------------------
def dropped_groups(newest_first: Iterable[Mapping[str, Any]], *, is_stream: bool = False) -> Iterator[GroupView]:
    """The groups that these records of a history say were dropped, the newest first. In a stream's no age is known: the
    steps in it are no versions."""
    since: list[Mapping[str, Any]] = []  # since the step that is met next, which was the last one then
    for record in newest_first:
        event = record.get("event")
        if event == Dropped.event:
            since.append(record)
        elif event == Committed.event:
            committed = None if is_stream else int(record["step"])
            yield from (dropped_view(one, committed=committed) for one in since)
            since = []
        elif event in (StepsVoided.event, RunRewound.event):
            yield from map(dropped_view, since)
            since = []
            for row in reversed(record.get("groups", ())):
                yield dropped_view({**dict(zip(VOID_FIELDS, row, strict=True)), "reason": Reason.VOID})
    yield from map(dropped_view, since)
