"""Groups that the server has let go, out of the archive, as `inspect` shows those of the server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlbuffer.archive.drops import DroppedGroup
    from rlbuffer.archive.library import Archive, ArchivedGroup, ArchivedRollout
    from rlbuffer.client.views import GroupDetail, GroupView, RolloutView


def detail_of(archive: Archive, group: ArchivedGroup) -> GroupDetail:
    """A group of the archive as `inspect` shows groups."""
    from rlbuffer.client.views import GroupDetail

    rows = {} if group.step is None else archive.row_numbers(group.step)
    members = tuple(_member(member, rows) for member in group.members)
    view = _view(group, members) if group.dropped is None else _dropped_view(group, group.dropped, members)
    return GroupDetail(view=view, members=members, answer=group.answer, metadata=group.metadata)


def _view(group: ArchivedGroup, members: Sequence[RolloutView]) -> GroupView:
    from statistics import fmean

    from rlbuffer.client.views import GroupView, left_out_in_words
    from rlbuffer.records.states import State

    detail = left_out_in_words(members)
    members = [member for member in members if not member.left_out]
    row = group.members[0].row if group.members else {}
    scored = tuple(member.reward for member in members if member.reward is not None)
    pushed = min((int(m.row["pushed_ms"]) for m in group.members), default=0) / 1000
    return GroupView(
        group_id=group.group_id,
        env=group.env,
        prompt_id=row.get("prompt_id") or "",
        state=State.TRAINED,
        reason="",
        rollouts=len(members),
        planned_size=row.get("planned_size") or 0,
        reward=fmean(scored) if scored else None,
        rewards=scored,
        age=None if group.step is None else group.step - 1 - min(member.min_version for member in members),
        tokens=sum(member.length for member in members),
        created=pushed or None,
        waited_seconds=None,
        worker=row.get("worker") or "",
        step=group.step,
        detail=detail,
        min_version=min((member.min_version for member in members), default=0),
        max_version=max((member.max_version for member in members), default=0),
        adapter=row.get("adapter") or "",
    )


def _dropped_view(group: ArchivedGroup, dropped: DroppedGroup, members: Sequence[RolloutView]) -> GroupView:
    """A dropped group by its record in the history, as a server shows it, and by the rollouts that are there."""
    from dataclasses import asdict, replace
    from statistics import fmean

    from rlbuffer.client.views import dropped_view

    record = {**dropped.record, **asdict(dropped), "at": dropped.at_ms / 1000}
    view = dropped_view(record, dropped.committed)
    if not members:
        return view
    row, scored = group.members[0].row, tuple(member.reward for member in members if member.reward is not None)
    return replace(
        view,
        prompt_id=view.prompt_id or row["prompt_id"] or "",
        planned_size=view.planned_size or row["planned_size"] or 0,
        reward=fmean(scored) if scored else view.reward,
        rewards=scored,
        created=view.created or int(row["pushed_ms"]) / 1000 or None,
        worker=view.worker or row["worker"] or "",
        max_version=max(member.max_version for member in members),
        adapter=row["adapter"] or "",
    )


def _member(archived: ArchivedRollout, rows: Mapping[tuple[int, int], int]) -> RolloutView:
    from rlbuffer.client.views import RolloutView, StepPlace, logprob_mean
    from rlbuffer.errors import PayloadError

    row, rows_of = archived.row, archived.rows
    number = rows.get((row["rank"], row["place"]))
    try:
        rollout = archived.rollout
    except PayloadError:
        rollout = None
    return RolloutView(
        rollout_id=row["rollout_id"],
        reward=row["reward"],
        rewards=row["rewards"],
        advantage=row["advantage"],
        length=sum(its["length"] for its in rows_of),
        loss_tokens=sum(its["loss_tokens"] for its in rows_of),
        prompt_tokens=row["prompt_tokens"],
        min_version=min(its["min_version"] for its in rows_of),
        max_version=max(its["max_version"] for its in rows_of),
        is_truncated=row["is_truncated"],
        finish_reason=row["finish_reason"],
        logprob_mean=None if rollout is None else logprob_mean(rollout.sequences),
        text=row["text"],
        rollout=rollout,
        step=row["step"],
        place=None if number is None else StepPlace(row["rank"], number),
        failure=None if rollout is None else rollout.failure,
        left_out=row.get("left_out") or "",
    )
