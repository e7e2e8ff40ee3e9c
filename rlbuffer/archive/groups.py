"""Groups of an archive as they were pushed, and groups in a Parquet file of their own: the columns are the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import IO, Any

from rlbuffer.archive.library import ArchivedRollout
from rlbuffer.archive.rows import UNREADABLE, Source, parquet_of, payload_of, rollout_table, rows_in
from rlbuffer.archive.schema import ADDED_COLUMNS, ROLLOUTS
from rlbuffer.archive.writer import write_file
from rlbuffer.errors import InvalidRollout, PayloadError
from rlbuffer.records.group import Group
from rlbuffer.store.records import PartRollout
from rlbuffer.wire.payload import decode_group_payload, decode_whole, encode_push

GROUPS_PER_TABLE = 64
"""Groups of one row group in a file of groups."""


def pushes_of(members: Iterable[ArchivedRollout], gone: list[str]) -> Iterator[Group]:
    """The pushes that these rollouts came in; `gone` takes the group of each rollout without a whole payload."""
    pushes: dict[str, list[ArchivedRollout]] = {}
    for member in members:
        pushes.setdefault(member.row["payload_key"], []).append(member)
    for members in pushes.values():
        members.sort(key=lambda member: int(member.row["index"]))
        whole = [member for member in members if not any(row["problem"] for row in member.rows)]
        gone.extend(member.row["group_id"] for member in members if any(row["problem"] for row in member.rows))
        if whole:
            yield _group([row for member in whole for row in member.rows])


def _group(rows: list[Mapping[str, Any]]) -> Group:
    row = rows[0]
    group_payload = next((r["group_payload"] for r in rows if r["group_payload"] is not None), None)
    answer, metadata = (None, {}) if group_payload is None else decode_group_payload(group_payload)
    by_id = groupby(rows, key=lambda row: row["rollout_id"])
    rollouts = tuple(decode_whole([*map(payload_of, sequences)]) for _, sequences in by_id)
    return Group(
        group_id=row["group_id"],
        env=row["env"],
        prompt_id=row["prompt_id"] or "",
        rollouts=rollouts,
        planned_size=max(row["planned_size"] or 0, len(rollouts)),
        adapter=row["adapter"] or "",
        answer=answer,
        metadata=metadata,
        needs=tuple(row["needs"] or ()),
        worker=row["worker"] or "",
        created=row["created"],
    )


def write_groups(path: Path, groups: Iterable[Group], *, run: str) -> None:
    """Writes a Parquet file of groups, in the archive's columns of rollouts. Raises OSError."""

    def tables() -> Iterator[Any]:
        sources: list[Source] = []
        for number, group in enumerate(groups):
            sources += _sources(number, group)
            if number % GROUPS_PER_TABLE == GROUPS_PER_TABLE - 1:
                yield rollout_table(sources)
                sources = []
        if sources:
            yield rollout_table(sources)

    write_file(path, ROLLOUTS, tables(), run=run)


def _sources(number: int, group: Group) -> Iterator[Source]:
    push = encode_push(group)
    for index, (info, data) in enumerate(zip(push.info.sequences, push.payloads, strict=True)):
        ref = PartRollout(
            payload_key=f"{group.group_id}:{number}",
            index=index,
            info=info,
            group_id=group.group_id,
            env=group.env,
            adapter=group.adapter,
            advantage=0.0,
            prompt_id=group.prompt_id,
            planned_size=group.planned_size,
            worker=group.worker,
        )
        group_payload = push.group_payload if index == 0 else None
        yield Source(ref=ref, data=data, group=group_payload, needs=group.needs, created=group.created)


def read_group_file(
    file: Path | IO[bytes],
    *,
    name: str = "",
    wrong: Callable[[str, InvalidRollout], None] | None = None,
) -> Iterator[Group]:
    """The groups of a file of rollouts, a push after the other.

    Args:
        file: path, or a binary stream that can be sought.
        name: begins what is said of it; "": nothing does.
        wrong: gets the id of each group of which a rollout is damaged, and why; None: it is raised.

    Raises:
        InvalidRollout: it is no such file, or a rollout of it is damaged; the message names the group.
    """
    place = f"{name}  " if name else ""
    try:
        with parquet_of(file) as parquet:
            if missing := [
                column
                for column in ROLLOUTS.names
                if column not in {*parquet.schema_arrow.names, "left_out", *ADDED_COLUMNS}
            ]:
                raise InvalidRollout(f"{place}it lacks the columns {', '.join(missing)}: it is no file of rollouts")
            rows = (row for row in rows_in(parquet) if row.get("left_out") is None)
            for (group_id, _), push in groupby(rows, key=lambda row: (row["group_id"], row["payload_key"])):
                try:
                    group = _group(list(push))
                except (PayloadError, InvalidRollout) as error:
                    why = InvalidRollout(f"{place}group {group_id}: {error}")
                    if wrong is None:
                        raise why from None
                    wrong(group_id, why)
                else:
                    yield group
    except UNREADABLE as error:
        raise InvalidRollout(f"{place}it cannot be read as Parquet: {error}") from None
