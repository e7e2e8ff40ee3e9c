"""From the server into an archive: whole files of steps, and the history with the rollouts of what was dropped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import msgspec

from rlbuffer.archive.rows import PENDING, Source
from rlbuffer.archive.writer import ArchiveWriter, history_rows
from rlbuffer.errors import PayloadError
from rlbuffer.records.info import GroupInfo, RolloutInfo
from rlbuffer.records.states import Reason
from rlbuffer.records.step_header import StepHeader
from rlbuffer.store.history import Dropped
from rlbuffer.store.part_rollouts import StepBytes
from rlbuffer.store.records import PartRollout, PoolEntry
from rlbuffer.store.viewer import FETCH_BYTES, GROUP_FIELD, Viewer, chunks

HISTORY_PAGE = 1000
"""Records of the history per file."""
_Drop = tuple[Mapping[str, Any], Mapping[str, Any]]
"""The row of a drop in the history, and its whole record."""
_UNKNOWN = RolloutInfo(
    rollout_id="", length=0, prompt_tokens=0, loss_tokens=0, reward=None, min_version=0, max_version=0
)
"""Stands for a rollout that only its payload describes."""


def copy_steps(store: Viewer, writer: ArchiveWriter, headers: Sequence[StepHeader]) -> int:
    """Adds consecutive steps of one epoch as one file. -> steps added: up to the first that is gone, another one by
    now, or cannot be read.

    Raises:
        OSError: the filesystem refused, and nothing is added.
    """
    whole: list[tuple[StepHeader, StepBytes]] = []
    for header in headers:
        try:
            stored = store.read_step_bytes(header.step)
        except PayloadError:
            break  # nobody can train it: `runs rewind` takes it back
        if stored is None or stored.digest != header.digest:
            break
        whole.append((header, stored))
    if whole:
        writer.add_steps(whole, (group for header, stored in whole for group in _of_step(store, header, stored)))
    return len(whole)


def _of_step(store: Viewer, header: StepHeader, stored: StepBytes) -> Iterator[list[Source]]:
    """The rollouts of a step, push by push, about 64 MiB at a time; then what its groups hold besides."""
    places: list[tuple[PartRollout, int, int]] = []
    for part in stored.decoded:
        places += [(ref, part.rank, place) for place, ref in enumerate(part.rollouts)]
    places.sort(key=lambda item: (item[0].payload_key, item[0].index))
    seen = ""
    for chunk in chunks([ref.info.size for ref, _, _ in places], FETCH_BYTES):
        pieces, sources = places[chunk.start : chunk.stop], []
        payloads = store.read_payloads([ref for ref, _, _ in pieces])
        keys = [*dict.fromkeys(ref.payload_key for ref, _, _ in pieces if ref.payload_key != seen)]
        groups = dict(zip(keys, store.read_group_payloads(keys), strict=True))
        for (ref, rank, place), data in zip(pieces, payloads, strict=True):
            group, seen = groups.pop(ref.payload_key, None), ref.payload_key
            sources.append(Source(ref=ref, data=data, group=group, step=stored.step, rank=rank, place=place))
        yield sources
    trained = {ref.payload_key for ref, _, _ in places}
    left_out = store.left_out(header, [ref for ref, _, _ in places])
    for key, rejected in groupby(left_out, key=lambda item: item[0].payload_key):
        fields = store.read_push_payload(key)
        # Beside its first rollout that the step trains there is the payload of the group already.
        group = None if key in trained else fields.get(GROUP_FIELD)
        sources = []
        for ref, reason in rejected:
            data = fields.get(str(ref.index))
            sources.append(
                Source(ref=replace(ref, info=_UNKNOWN), data=data, group=group, step=stored.step, left_out=reason)
            )
            group = None
        yield sources


def copy_history(store: Viewer, writer: ArchiveWriter) -> int:
    """Adds all of the history that is new. -> records added. Raises OSError."""
    added = 0
    while True:
        page = store.read_history(writer.history_place, count=HISTORY_PAGE)
        if not page.records:
            return added
        drops: dict[str, list[_Drop]] = {}
        for entry_id, record in page.records:
            for row in history_rows(entry_id, record):
                # The rollouts of what was unused stand with their step.
                if row["kind"] == Dropped.event and row.get("group_id") and row["reason"] != Reason.UNUSED:
                    drops.setdefault(str(row["group_id"]), []).append((row, record))
        writer.add_history(page.records, _of_drops(store, drops), is_cut=page.is_cut)
        added += len(page.records)


def copy_trained(store: Viewer, writer: ArchiveWriter) -> None:
    """Adds all of the trainer's records that are new. Raises OSError."""
    while (page := store.read_history(writer.trained_place, count=HISTORY_PAGE, of="records")).records:
        writer.add_trained(page.records, is_cut=page.is_cut)


def copy_pending(store: Viewer, writer: ArchiveWriter) -> None:
    """Writes what is pending now, without payloads, and which tickets are out, in place of those of before. Raises
    OSError."""

    def pushes() -> Iterator[list[Source]]:
        after = "0-0"
        while page := store.read_pool(after):
            after = page[-1].entry_id
            yield from (_pending(entry, entry.info) for entry in page if entry.info is not None)

    writer.add_tickets([msgspec.structs.asdict(ticket) for ticket in store.taken_tickets()])
    writer.add_pending(pushes())


def _pending(entry: PoolEntry, info: GroupInfo) -> list[Source]:
    sequences = [
        (number, len(rollout.sequences), sequence)
        for rollout in info.rollouts
        for number, sequence in enumerate(rollout.sequences)
    ]
    return [
        Source(
            ref=PartRollout(
                payload_key=entry.payload_key,
                index=index,
                info=sequence,
                group_id=info.group_id,
                env=info.env,
                adapter=info.adapter,
                advantage=0.0,
                sequence=number,
                sequences=count,
                prompt_id=info.prompt_id,
                planned_size=info.planned_size,
                worker=info.worker,
                pushed_ms=entry.pushed_ms,
                entry_id=entry.entry_id,
                seconds=info.seconds,
            ),
            data=None,
            needs=info.needs,
            created=info.created,
            gone=PENDING,
        )
        for index, (number, count, sequence) in enumerate(sequences)
    ]


def _of_drops(store: Viewer, drops: Mapping[str, Sequence[_Drop]]) -> Iterator[list[Source]]:
    """The rollouts of dropped groups that are still there, a push at a time, those of one drop together.

    `drops`: group id -> its drops, of which each may be of a part.
    """
    keys = store.dropped_payloads(list(drops)) if drops else {}
    for group_id, payload_keys in keys.items():
        places = {key: _place_of(key, drops[group_id]) for key in payload_keys}
        for place, (drop, record) in enumerate(drops[group_id]):
            for key in (key for key, number in places.items() if number == place):
                yield _of_push(drop, record, key, store.read_push_payload(key))


def _place_of(payload_key: str, drops: Sequence[_Drop]) -> int | None:
    """Which of a group's drops this push went with: the one that names it, else the last of those that name none. None
    where all name others: another page has its drop, or a scored push took its place."""
    suffix, place = payload_key.rpartition(":")[2], None
    for number, (_, record) in enumerate(drops):
        pushes = _pushes(record)
        if suffix in pushes:
            return number
        if not pushes:
            place = number
    return place


def _pushes(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Suffix of the payload key -> what a drop's record says of the push; anybody may have written it."""
    pushes = record.get("pushes")
    return pushes if isinstance(pushes, dict) else {}


def _of_push(
    drop: Mapping[str, Any], record: Mapping[str, Any], payload_key: str, fields: Mapping[str, bytes]
) -> list[Source]:
    pushed = _pushes(record).get(payload_key.rpartition(":")[2])
    if not (isinstance(pushed, list) and len(pushed) in (4, 5)):
        pushed = [record.get(name) for name in ("worker", "pushed_ms", "entry_id", "seconds")]
    worker, pushed_ms, entry_id, seconds, needs = [*pushed, None][:5]
    names = sorted((name for name in fields if name.isdigit()), key=int)
    sources = []
    for name in names:
        ref = PartRollout(
            payload_key=payload_key,
            index=int(name),
            info=_UNKNOWN,
            group_id=str(drop["group_id"]),
            env=str(drop.get("env") or ""),
            adapter=str(record.get("adapter") or ""),
            advantage=0.0,
            prompt_id=str(record.get("prompt_id") or ""),
            planned_size=_count(record.get("planned_size")),
            worker=str(worker or ""),
            pushed_ms=_count(pushed_ms),
            entry_id=str(entry_id or ""),
            seconds=float(seconds) if isinstance(seconds, int | float) else None,
        )
        group = fields.get(GROUP_FIELD) if name == names[0] else None
        missing = [str(need) for need in needs] if isinstance(needs, list) else []
        history_id = str(drop["history_id"])
        sources.append(Source(ref=ref, data=fields[name], group=group, history_id=history_id, needs=missing))
    return sources


def _count(value: Any) -> int:
    """Anybody may have written it."""
    return value if isinstance(value, int) and value >= 0 else 0


def files_of(headers: Sequence[StepHeader], *, steps: int, size: int) -> Iterator[list[StepHeader]]:
    """Consecutive steps of one epoch for one file each: at most `steps`, and none more once they have `size` bytes."""
    file: list[StepHeader] = []
    for header in headers:
        follows = file and header.step == file[-1].step + 1 and header.epoch == file[-1].epoch
        if file and (not follows or len(file) >= steps or sum(h.bytes for h in file) >= size):
            yield file
            file = []
        file.append(header)
    if file:
        yield file


def unwritten(store: Viewer, writer: ArchiveWriter) -> list[StepHeader]:
    """Headers of the live steps that the archive does not have; without those that cannot be read."""
    problems: list[Any] = []
    return [header for header in store.headers(problems=problems) if header.digest not in writer.digests]
