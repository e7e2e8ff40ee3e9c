"""Pending pushes: the entries of the pool and of the groups that may be trained again, decoded, and DROP.

PUSH brings them in, DROP and COMMIT take them out, nothing else touches them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlbuffer.errors import PayloadError
from rlbuffer.records.info import GroupInfo
from rlbuffer.records.states import Reason, Trait
from rlbuffer.records.step_plan import Drop
from rlbuffer.store.history import Dropped
from rlbuffer.store.keys import SUFFIX, Keys
from rlbuffer.store.records import Decided, PoolEntry, Reused
from rlbuffer.store.session import Entry, Fields, number, text
from rlbuffer.wire import payload

DROP_ENTRIES = 500
"""Pool entries per DROP: about 1.5 ms of the server's time."""
RECORD_BYTES = 16 * 1024
"""Of a drop's record that names its pushes. Workers wrote what it says of them, as long as they like; every leader
reads the history, and the server keeps all of it."""
HISTORY_ENTRIES = 10_000
"""Records of drops and steps that are kept."""
CLOSING_REASONS = frozenset(reason for reason in Reason if Trait.CLOSES in reason.traits)


def pool_entries(keys: Keys, entries: Sequence[Entry]) -> list[PoolEntry]:
    """Pool entries as the server has them. A push that cannot be decoded says so in `error`, and must go."""
    infos = payload.decode_infos([fields.get(b"metadata", b"") for _, fields in entries])
    return [_entry(keys, entry_id, fields, info) for (entry_id, fields), info in zip(entries, infos, strict=True)]


def _entry(keys: Keys, entry_id: str, fields: Fields, info: GroupInfo | PayloadError) -> PoolEntry:
    if isinstance(info, GroupInfo) and _agrees(fields, info):
        return PoolEntry(
            entry_id=entry_id,
            info=info,
            payload_key=keys.payload(info.group_id, text(fields.get(b"key", b""))),
            env=info.env,
            group_id=info.group_id,
            rollouts=info.totals.rollouts,
            tokens=info.totals.tokens,
            replaces=text(fields.get(b"replaces", b"")),
            first_ms=_first_ms(fields, entry_id),
        )
    # Cut to what is allowed: an entry that somebody wrote by hand must not fill the history.
    env, group_id = text(fields.get(b"env", b"")[:64]), text(fields.get(b"group", b"")[:128])
    rollouts, tokens = _count(fields, b"rollouts"), _count(fields, b"tokens")
    if isinstance(info, PayloadError):
        error = f"metadata: {info}"
    elif SUFFIX.match(fields.get(b"key", b"")) is None:
        error = f"its payload's key ends with {text(fields.get(b'key', b'')[:64])!r}, not with INCARNATION.SEQUENCE"
    else:
        error = (
            f"metadata of {info.group_id} ({info.env}, {info.totals.rollouts} rollouts, {info.tokens} tokens) "
            f"disagrees with its entry: {group_id} ({env}, {rollouts} rollouts, {tokens} tokens)"
        )
    return PoolEntry(
        entry_id=entry_id,
        info=None,
        payload_key=keys.payload(group_id, text(fields.get(b"key", b""))),
        env=env,
        group_id=group_id,
        rollouts=rollouts,
        tokens=tokens,
        error=error,
        replaces=text(fields.get(b"replaces", b"")[:64]),
        first_ms=_first_ms(fields, entry_id),
    )


def _first_ms(fields: Fields, entry_id: str) -> int:
    """The time when the rollouts were first pushed, not later than the entry itself says; 0 where no other push was."""
    first = _count(fields, b"pushed")
    return first and min(first, int(entry_id.partition("-")[0]))


def _agrees(fields: Fields, info: GroupInfo) -> bool:
    """True when the entry agrees with the metadata of its push, and names a payload that a push can have."""
    totals = info.totals
    return (
        SUFFIX.match(fields.get(b"key", b"")) is not None
        and fields.get(b"env") == info.env.encode()
        and fields.get(b"group") == info.group_id.encode()
        and _count(fields, b"rollouts") == totals.rollouts
        and _count(fields, b"tokens") == totals.tokens
    )


def reused_groups(keys: Keys, fields: Mapping[bytes, bytes]) -> list[Reused]:
    """The reuse hash decoded; commit.lua says what is in it."""
    groups: dict[str, tuple[int, int]] = {}
    pushes: list[Entry] = []
    owners: list[str] = []
    for name, value in fields.items():
        group_id, _, entry_id = text(name).partition(" ")
        if not entry_id:
            uses, _, step = text(value).partition(" ")
            groups[group_id] = (int(uses), int(step))
            continue
        env, key, rollouts, tokens, metadata = value.split(b" ", 4)
        push = {b"env": env, b"group": group_id.encode(), b"key": key, b"metadata": metadata}
        pushes.append((entry_id, {**push, b"rollouts": rollouts, b"tokens": tokens}))
        owners.append(group_id)
    entries: dict[str, list[PoolEntry]] = {}
    for group_id, entry in zip(owners, pool_entries(keys, pushes), strict=True):
        entries.setdefault(group_id, []).append(entry)
    out = [
        Reused(
            group_id=group_id,
            uses=uses,
            step=step,
            entries=tuple(sorted(entries.get(group_id, ()), key=lambda entry: stream_order(entry.entry_id))),
        )
        for group_id, (uses, step) in groups.items()
    ]
    return sorted(out, key=lambda group: [stream_order(entry.entry_id) for entry in group.entries])


def stream_order(entry_id: str) -> tuple[int, int]:
    """Sorts ids as their stream does: "1-10" comes after "1-2"."""
    at, _, sequence = entry_id.partition("-")
    return int(at), int(sequence or 0)


def _count(fields: Fields, name: bytes) -> int:
    """The count that DROP would read: anything but a plain number of at most 15 digits is 0."""
    return number(fields.get(name)) or 0


def drop(
    move: Callable[[str, Sequence[str], Sequence[Any]], list[Any]],
    keys: Keys,
    token: int | str,
    drops: Sequence[tuple[Drop, Sequence[PoolEntry]]],
    decided: Decided | None = None,
) -> int:
    """DROP, in calls of at most :data:`DROP_ENTRIES` entries. -> pushes that left the pool.

    An empty token is an operator's. `decided` is kept in the history. Raises what `move` does.
    """
    dropped = 0
    where = (keys.lease, keys.pool, keys.ledger, keys.closed, keys.garbage, keys.history, keys.meta, keys.reuse)
    for chunk in _chunks(drops):
        args: list[Any] = [token, keys.payload_prefix, HISTORY_ENTRIES, len(chunk)]
        for drop, entry_ids, pushes in chunk:
            closes = "1" if pushes and drop.reason in CLOSING_REASONS else "0"
            record = _drop_record(drop, pushes, decided) if pushes else b""
            args += [drop.group_id, drop.env, drop.reason, closes, record, len(entry_ids), *entry_ids]
        reply = move("drop", where, args)
        dropped += int(reply[1])
    return dropped


def _chunks(
    drops: Sequence[tuple[Drop, Sequence[PoolEntry]]],
) -> Iterator[list[tuple[Drop, list[str], Sequence[PoolEntry]]]]:
    """Drops in calls of at most :data:`DROP_ENTRIES` entries; the last piece of a drop comes with its entries."""
    chunk: list[tuple[Drop, list[str], Sequence[PoolEntry]]] = []
    chunk_entries = 0
    for drop, entries in drops:
        ids = [entry.entry_id for entry in entries]
        for start in range(0, len(ids), DROP_ENTRIES):
            piece = ids[start : start + DROP_ENTRIES]
            if chunk_entries + len(piece) > DROP_ENTRIES:
                yield chunk
                chunk, chunk_entries = [], 0
            chunk.append((drop, piece, entries if start + DROP_ENTRIES >= len(ids) else ()))
            chunk_entries += len(piece)
    if chunk:
        yield chunk


def _drop_record(drop: Drop, entries: Sequence[PoolEntry], decided: Decided | None) -> bytes:
    record = Dropped.of(drop, entries, decided)
    data = payload.dumps(record.as_object())
    if len(data) <= RECORD_BYTES:
        return data
    return payload.dumps(replace(record, pushes=None).as_object())
