"""What a run's leader had before it, as the archive says it: every push in the order of the pool; and the digest of a
step that is decided again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlbuffer.archive.groups import pushes_of
from rlbuffer.archive.library import Archive, ArchivedRollout, ArchivedStep
from rlbuffer.packing.further_columns import agree
from rlbuffer.records.info import GroupInfo, RolloutInfo, folded
from rlbuffer.records.step_header import StepHeader
from rlbuffer.records.step_plan import Decision
from rlbuffer.store.keys import Keys
from rlbuffer.store.records import Meta, PoolEntry
from rlbuffer.store.step_format import encoded_header, encoded_parts, header_record, left_out, step_digest


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedPush:
    """One push, as the leader read it."""

    entry_id: str
    """In the pool: ids order pushes, also those of one millisecond."""
    payload_key: str
    pushed: float
    """Server time, Unix seconds; of a group that a scorer has pushed again the time of the first push."""
    seconds: float | None
    """From its ticket to the push; None without a ticket."""
    info: GroupInfo

    @property
    def order(self) -> tuple[int, int]:
        """Place in the pool."""
        return entry_order(self.entry_id)

    @property
    def came(self) -> float:
        """When it came into the pool, Unix seconds of the server."""
        return self.order[0] / 1000


def entry_order(entry_id: str) -> tuple[int, int]:
    """An entry's place in the pool, as a sort key."""
    at, _, sequence = entry_id.partition("-")
    return int(at), int(sequence)


def recorded_pushes(archive: Archive) -> list[RecordedPush]:
    """Every push that was trained (also in steps that were taken back), dropped, or pending when the last leader left,
    in the order of the pool."""
    found: dict[str, RecordedPush] = {}
    for group in (*archive.all_groups(archive.all_steps), *archive.pending()):
        by_key: dict[str, list[ArchivedRollout]] = {}
        for member in group.members:
            by_key.setdefault(member.row["payload_key"], []).append(member)
        for key, members in by_key.items():
            row = members[0].row
            # What was pending when a leader left may have been trained or dropped by the next one, and is known whole.
            if row["entry_id"] and (key not in found or group.step is not None or group.dropped is not None):
                found[key] = RecordedPush(
                    entry_id=row["entry_id"],
                    payload_key=key,
                    pushed=row["pushed_ms"] / 1000,
                    seconds=row["seconds"],
                    info=_info_of(members),
                )
    return sorted(found.values(), key=lambda push: push.order)


def _info_of(members: Sequence[ArchivedRollout]) -> GroupInfo:
    """The push as its metadata had it: by its payloads, else by the columns of numbers."""
    # In archives of before 2026-11-30 the rows of a drop may stand there twice.
    members = [*{int(member.row["index"]): member for member in members}.values()]
    members.sort(key=lambda member: int(member.row["index"]))
    row = members[0].row
    if not any(sequence["problem"] for member in members for sequence in member.rows):
        info = next(pushes_of(members, [])).info()
        pairs = zip(info.rollouts, members, strict=True)
        rollouts = tuple(r.changed(size=m.row["size"], checksum=m.row["checksum"]) for r, m in pairs)
        return replace(info, planned_size=row["planned_size"], rollouts=rollouts, seconds=row["seconds"])
    return GroupInfo(
        group_id=row["group_id"],
        env=row["env"],
        prompt_id=row["prompt_id"] or "",
        adapter=row["adapter"] or "",
        planned_size=row["planned_size"],
        rollouts=tuple(folded([_rollout_of(row) for row in member.rows]) for member in members),
        needs=tuple(row["needs"] or ()),
        worker=row["worker"] or "",
        seconds=row["seconds"],
    )


def _rollout_of(row: Mapping[str, Any]) -> RolloutInfo:
    return RolloutInfo(
        **{
            name: row[name]
            for name in (
                *("rollout_id", "length", "prompt_tokens", "loss_tokens", "reward", "min_version", "max_version"),
                *("is_truncated", "size", "checksum", "rewards"),
            )
        }
    )


def digest_again(
    archive: Archive, step: ArchivedStep, header: StepHeader, decision: Decision, pushes: Mapping[str, RecordedPush]
) -> str:
    """The digest of a step that was decided again, as COMMIT computes it: equal where every byte is.

    Args:
        step: as it was committed.
        header: its header.
        decision: the one to compare, which has a plan.
        pushes: entry id -> push.
    """
    assert decision.plan is not None
    prefix = Keys(archive.run).payload_prefix
    used = {use.entry_id: _entry(pushes[use.entry_id]) for use in decision.plan.entries}
    columns, _ = agree(decision.plan)
    meta = Meta(
        schema=0,
        epoch=step.epoch,
        step=step.step - 1,
        digest=step.previous_digest,
        retired=0,
        config=json.loads(archive.settings(step.revision)["config"]),
        config_digest="",
        error="",
        checkpoint_now=header.checkpoint_now,
        revision=step.revision,
    )
    record = header_record(decision.plan, meta, decision.waiting_for_version, columns)
    record |= left_out(decision.plan, used, prefix)
    parts = [*encoded_parts(decision.plan, used, prefix)]
    return step_digest(step.previous_digest, encoded_header(record), parts)


def _entry(push: RecordedPush) -> PoolEntry:
    return PoolEntry(
        entry_id=push.entry_id,
        info=push.info,
        payload_key=push.payload_key,
        env=push.info.env,
        group_id=push.info.group_id,
        rollouts=len(push.info.rollouts),
        tokens=push.info.tokens,
        first_ms=round(1000 * push.pushed),
    )


def recorded_commits(archive: Archive) -> list[tuple[ArchivedStep | None, Mapping[str, Any]]]:
    """Every commit in the order in which they were made, also of steps that were taken back: the step, None where no
    file has it, and the record of its commit."""
    left: dict[int, list[ArchivedStep]] = {}
    for step in {step.digest: step for step in archive.all_steps}.values():
        left.setdefault(step.step, []).append(step)
    out: list[tuple[ArchivedStep | None, Mapping[str, Any]]] = []
    for at_ms, record in archive.commits():
        of_number = left.get(record["step"], [])
        # The newest one that was there by then: a step of the same number was taken back before the next was made.
        there = max((s for s in of_number if s.committed_ms <= at_ms), key=lambda s: s.committed_ms, default=None)
        if there is not None:
            of_number.remove(there)
        out.append((there, record))
    return out
